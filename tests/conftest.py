"""What all tests share: the data outside the project, small detectors, and pytest's view of warnings."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
import torch

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"

# Detectron2 reads it once, when it is imported.
if (DATA / "coco").is_dir():
    os.environ["DETECTRON2_DATASETS"] = str(DATA)

torch.set_num_threads(min(2, torch.get_num_threads()))

#: Overrides that make any config of this project small, and trained from scratch.
SMALL = {
    "MODEL.WEIGHTS": "",
    "MODEL.DEVICE": "cpu",
    "MODEL.BACKBONE.FREEZE_AT": 0,
    "MODEL.RESNETS.NORM": "BN",
    "MODEL.RESNETS.STEM_OUT_CHANNELS": 8,
    "MODEL.RESNETS.RES2_OUT_CHANNELS": 16,
    "MODEL.RESNETS.WIDTH_PER_GROUP": 4,
    "MODEL.FPN.OUT_CHANNELS": 16,
    "MODEL.ROI_BOX_HEAD.FC_DIM": 32,
    "MODEL.ROI_MASK_HEAD.CONV_DIM": 8,
    "MODEL.ROI_KEYPOINT_HEAD.CONV_DIMS": [16] * 8,
    "MODEL.RPN.POST_NMS_TOPK_TRAIN": 40,
    "MODEL.RPN.POST_NMS_TOPK_TEST": 40,
    "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 16,
    # Untrained models find something, too.
    "MODEL.ROI_HEADS.SCORE_THRESH_TEST": 0.0,
    "MODEL.RETINANET.SCORE_THRESH_TEST": 0.0,
    "TEST.DETECTIONS_PER_IMAGE": 5,
    "INPUT.MIN_SIZE_TRAIN": (64,),
    "INPUT.MIN_SIZE_TEST": 64,
    "SOLVER.IMS_PER_BATCH": 2,
    "SOLVER.REFERENCE_WORLD_SIZE": 0,
    "SOLVER.BASE_LR": 0.001,
    "DATALOADER.NUM_WORKERS": 0,
}


def pytest_configure(config: pytest.Config) -> None:
    try:
        from nonlocal_det.upstream import UPSTREAM_WARNINGS
    except ImportError:
        return
    for action, message, category, module in UPSTREAM_WARNINGS:
        # pytest sets the filters anew for every test. A later line comes before an earlier one.
        config.addinivalue_line("filterwarnings", f"{action}:{message}:{category.__name__}:{module}")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of test data, which lies outside the project."""
    if not DATA.is_dir():
        pytest.skip(f"test data not found at {DATA}")
    return DATA


@pytest.fixture(scope="session")
def small_options():
    """A function: overrides for a small detector as a list, changed or added to by keys and values."""

    def options(changes: dict | None = None) -> list:
        return [item for pair in {**SMALL, **(changes or {})}.items() for item in pair]

    return options


@pytest.fixture(scope="session")
def mini_coco(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for DETECTRON2_DATASETS with 6 train and 5 val images of COCO, all with persons.

    In this process the same sets are registered as mini_train, mini_val, mini_keypoints_train and
    mini_keypoints_val.
    """
    from detectron2.data import DatasetCatalog
    from detectron2.data.datasets import register_coco_instances
    from detectron2.data.datasets.builtin_meta import _get_builtin_metadata

    root = tmp_path_factory.mktemp("mini")
    (root / "coco" / "annotations").mkdir(parents=True)
    for split, count in (("train", 6), ("val", 5)):
        (root / "coco" / f"{split}2017").symlink_to(data_dir / "coco" / f"{split}2017")
        keep: set[int] = set()
        for kind, name, builtin in (
            ("person_keypoints", f"mini_keypoints_{split}", "coco_person"),
            ("instances", f"mini_{split}", "coco"),
        ):
            file = f"{kind}_{split}2017.json"
            content = json.loads((data_dir / "coco" / "annotations" / file).read_text())
            if not keep:
                visible = {
                    x["image_id"]
                    for x in content["annotations"]
                    if x["num_keypoints"] > 5 and not x["iscrowd"]
                }
                keep = set(sorted(visible)[:count])
            content["images"] = [x for x in content["images"] if x["id"] in keep]
            content["annotations"] = [x for x in content["annotations"] if x["image_id"] in keep]
            path = root / "coco" / "annotations" / file
            path.write_text(json.dumps(content))
            if name not in DatasetCatalog:
                register_coco_instances(
                    name, _get_builtin_metadata(builtin), str(path), str(root / "coco" / f"{split}2017")
                )
    return root


@pytest.fixture
def fresh_logging():
    """Take away the log handlers that a test's run adds, so that the next run sets up its own."""
    from detectron2.utils.logger import setup_logger

    loggers = [logging.getLogger(name) for name in ("detectron2", "fvcore", "nonlocal_det")]
    before = [(logger, logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    setup_logger.cache_clear()
    yield
    for logger, level, propagate, handlers in before:
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate
    setup_logger.cache_clear()
