"""Private names of Detectron2 and PyTorch are still there; known warnings, and no others, are hidden."""

from __future__ import annotations

import importlib
import inspect
import operator
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nonlocal_det import upstream
from nonlocal_det.upstream import (
    COCO_MODULES,
    PRIVATE_MEMBERS,
    PRIVATE_NAMES,
    UPSTREAM_WARNINGS,
    annotation_files_from,
)

ROOT = Path(__file__).resolve().parents[1]
PINNED_TORCH = next(
    line.split("==")[1]
    for line in (ROOT / "requirements" / "constraints.txt").read_text().splitlines()
    if line.startswith("torch==")
)

# Detectron2 doing what it warns at: being imported, making anchors, collecting keypoints, pooling, wrapping a
# model for several processes.
UPSTREAM_CODE = """
import sys
import numpy as np
import torch
import detectron2.engine, detectron2.modeling
from detectron2.modeling.anchor_generator import DefaultAnchorGenerator
from detectron2.modeling.poolers import ROIPooler
from detectron2.structures import Boxes, Keypoints
from detectron2.utils import comm

DefaultAnchorGenerator(sizes=[[32.0]], aspect_ratios=[[1.0]], strides=[4])([torch.zeros(1, 3, 4, 4)])
Keypoints([np.zeros((17, 3)), np.zeros((17, 3))])
ROIPooler(7, [0.25], 0, "ROIAlignV2")([torch.zeros(1, 3, 8, 8)], [Boxes(torch.tensor([[0.0, 0, 8, 8]]))])
torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
comm.get_world_size = lambda: 2  # with one process it would not wrap
model = detectron2.engine.create_ddp_model(torch.nn.Linear(2, 2), broadcast_buffers=False, device_ids=None)
assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
"""

# The same warnings where the user's own code is the cause, and others from the same places.
OTHER_CODE = """
import logging, sys, warnings
import numpy as np
import torch
torch.tensor([np.zeros(3), np.zeros(3)])
torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), broadcast_buffers=False)
for place in (
    "torch.jit._script", "torch.functional", "detectron2.structures.keypoints", "detectron2.engine.defaults"
):
    for category in (UserWarning, FutureWarning):
        warnings.warn_explicit(f"another {category.__name__}", category, "file.py", 1, module=place)
logging.getLogger("torch.fx._symbolic_trace").warning("another log record")
"""

TEXTS = (
    "`torch.jit.script` is deprecated",
    "torch.meshgrid: in an upcoming release",
    "Creating a tensor from a list of numpy.ndarrays",
    "`broadcast_buffers` is deprecated",
    "is_fx_tracing will return true",
)


def messages(code: str, folder: Path) -> str:
    """Return what a new Python process writes to stderr when it runs ``code``."""
    command = [sys.executable, "-W", "always", "-c", code, str(folder / "store")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return messages(UPSTREAM_CODE, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def filtered(tmp_path_factory):
    return messages("import nonlocal_det\n" + UPSTREAM_CODE, tmp_path_factory.mktemp("filtered"))


@pytest.mark.parametrize("text", TEXTS)
def test_known_warnings_are_hidden(text, plain, filtered):
    if text not in plain and torch.__version__.split("+")[0] != PINNED_TORCH:
        pytest.skip(f"torch {torch.__version__} does not give this warning")
    assert text in plain
    assert text not in filtered


def test_other_warnings_stay(tmp_path):
    shown = messages("import nonlocal_det\n" + OTHER_CODE, tmp_path)
    assert "Creating a tensor from a list of numpy.ndarrays" in shown
    if torch.__version__.split("+")[0] == PINNED_TORCH:
        assert "`broadcast_buffers` is deprecated" in shown
    assert shown.count("another UserWarning") == 4
    assert shown.count("another FutureWarning") == 4
    assert "another log record" in shown


def test_filters_fit_into_pytest_options():
    # pytest splits "action:message:category:module" at every colon.
    assert all(":" not in message + module for _, message, _, module in UPSTREAM_WARNINGS)


def test_annotation_files_come_from_memory_for_a_while():
    """Detectron2 opens them by a class that it takes from these modules when it needs it."""
    from detectron2.data import MetadataCatalog
    from detectron2.data.datasets import load_coco_json
    from detectron2.evaluation import COCOEvaluator

    content = {"images": [{"id": 1, "file_name": "a.png", "width": 2, "height": 2}]}
    content.update(categories=[{"id": 1, "name": "nut"}], annotations=[])
    theirs = [importlib.import_module(module).COCO for module in COCO_MODULES]
    asked = []
    with annotation_files_from(lambda path: asked.append(path) or content):
        assert load_coco_json("nowhere.json", "images")[0]["image_id"] == 1
        MetadataCatalog.get("from_memory").json_file = "nowhere too.json"
        COCOEvaluator("from_memory", use_fast_impl=False)
    MetadataCatalog.remove("from_memory")
    assert asked == ["nowhere.json", "nowhere too.json"]
    assert [importlib.import_module(module).COCO for module in COCO_MODULES] == theirs


def found(path: str) -> object:
    """The object at a dotted path; its module is imported."""
    module, _, name = path.rpartition(".")
    while True:
        try:
            value = importlib.import_module(module)
        except ModuleNotFoundError:
            module, _, outer = module.rpartition(".")
            name = f"{outer}.{name}"
        else:
            return operator.attrgetter(name)(value)


def has_member(owner: object, member: str) -> bool:
    """Whether an object has a member, or the code of a class or of one of its bases sets it on instances."""
    if hasattr(owner, member) or not inspect.isclass(owner):
        return hasattr(owner, member)
    sources = (inspect.getsource(base) for base in owner.__mro__[:-1] if base.__module__ != "abc")
    return any(re.search(rf"\bself\.{member}\b(:[^=]+)? = ", source) for source in sources)


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_private_names_are_where_they_are_imported_from(name):
    module, private = PRIVATE_NAMES[name]
    assert hasattr(importlib.import_module(module), private), f"{module} has no {private} any more"
    assert getattr(upstream, name) is getattr(importlib.import_module(module), private)


@pytest.mark.parametrize(
    ("owner", "member"), [(owner, member) for owner, members in PRIVATE_MEMBERS.items() for member in members]
)
def test_private_members_are_there(owner, member):
    assert has_member(found(owner), member), f"{owner} has no {member} any more"


def test_a_private_member_that_is_gone_is_noticed():
    assert not has_member(found("detectron2.engine.hooks.EvalHook"), "_gone")
    assert not has_member(found("torch.ops.aten"), "_gone")


def test_every_private_name_in_the_lists_is_used():
    """By name alone: a list that has grown old is as bad as one that lacks something."""
    package = [path for path in (ROOT / "nonlocal_det").rglob("*.py") if path.name != "upstream.py"]
    text = "\n".join(path.read_text() for path in package)
    members = {member for members in PRIVATE_MEMBERS.values() for member in members}
    unused = [name for name in (*PRIVATE_NAMES, *members) if not re.search(rf"\b{name}\b", text)]
    assert not unused


def test_other_attributes_of_the_module_are_missing():
    with pytest.raises(AttributeError, match=r"'nonlocal_det\.upstream' has no attribute 'nothing'"):
        upstream.nothing  # noqa: B018
