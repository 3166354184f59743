"""The names that other code relies on, each taken in a process of its own, as nothing was imported before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("detectron2")

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml"
REGISTERED = """
from detectron2.data import DatasetCatalog
from detectron2.modeling import BACKBONE_REGISTRY, ROI_KEYPOINT_HEAD_REGISTRY
assert "build_nonlocal_backbone" in BACKBONE_REGISTRY
assert "NonLocalKeypointHead" in ROI_KEYPOINT_HEAD_REGISTRY
assert "nonlocal_people_train" in DatasetCatalog
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "code",
    [
        "from nonlocal_det import ConfigError, add_nonlocal_config, get_config" + REGISTERED,
        f"import nonlocal_det; nonlocal_det.get_config('{CONFIG}')" + REGISTERED,
        f"from nonlocal_det.engine.task import get_config; get_config('{CONFIG}')" + REGISTERED,
        "from detectron2.config import get_cfg\n"
        "from nonlocal_det.engine.task import add_nonlocal_config\n"
        "cfg = get_cfg(); add_nonlocal_config(cfg)\n"
        "assert cfg.DATASETS.ALLOW_OUTSIDE_IMAGE_ROOT is False" + REGISTERED,
        "import nonlocal_det; assert {'get_config', 'ConfigError'} <= set(dir(nonlocal_det))",
        "import nonlocal_det; nonlocal_det.layers.NonLocalBlock",
        "from nonlocal_det.layers import NonLocalBlock",
        "from nonlocal_det.modeling import build_on_meta",
        "from nonlocal_det.checkpoint import NonLocalCheckpointer",
    ],
)
def test_names_that_others_rely_on(code):
    run(code)


def test_the_bare_import_is_light_and_quiet():
    code = "import sys, nonlocal_det; assert not {'torch', 'detectron2', 'numpy'} & set(sys.modules)"
    assert run(code) == ""


@pytest.mark.parametrize("tool", ["train", "demo", "compare", "check_dataset"])
def test_tools_without_detectron2_say_how_to_get_it(tool):
    flags = {
        "train": ["--config-file", CONFIG],
        "demo": ["--config-file", CONFIG, "--input", ".", "--output", "drawn"],
        "compare": ["--output", "nowhere"],
        "check_dataset": ["train.json"],
    }[tool]
    code = f"""
import sys
sys.modules["detectron2"] = None
from nonlocal_det.tools.{tool} import main
sys.exit(main({flags!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: nonlocal_det needs Detectron2")
    assert "make setup" in line
