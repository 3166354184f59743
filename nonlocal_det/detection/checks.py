"""What can be wrong with a detector's settings, with its parts, and with data sets for it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.catalog import Metadata
from detectron2.modeling import (
    ANCHOR_GENERATOR_REGISTRY,
    BACKBONE_REGISTRY,
    META_ARCH_REGISTRY,
    PROPOSAL_GENERATOR_REGISTRY,
    ROI_BOX_HEAD_REGISTRY,
    ROI_HEADS_REGISTRY,
    ROI_KEYPOINT_HEAD_REGISTRY,
    ROI_MASK_HEAD_REGISTRY,
    RPN_HEAD_REGISTRY,
)

from nonlocal_det.config.messages import check_choice, check_least, config_error
from nonlocal_det.data.cache import is_made_on_first_use
from nonlocal_det.detection.annotations.checked_file import CheckedFile
from nonlocal_det.detection.annotations.checks.findings import Finding, check_file
from nonlocal_det.detection.annotations.checks.table import ERROR
from nonlocal_det.detection.annotations.coco_file import CocoFile
from nonlocal_det.detection.annotations.documents import keep_file
from nonlocal_det.detection.config import KEYPOINT_HEAD, detector_key, detector_node
from nonlocal_det.detection.registration import named, summarize
from nonlocal_det.errors import ConfigError, DatasetError
from nonlocal_det.upstream import COCO_SPLITS

logger = logging.getLogger(__name__)

#: How many pictures of a data set are opened before training.
SAMPLED_PICTURES = 50

# Detectron2's own data sets are known to it; to read COCO's training set again would take half a minute.
_KNOWN = {name for splits in COCO_SPLITS.values() for name in splits}

_REGISTRIES = {
    "MODEL.META_ARCHITECTURE": META_ARCH_REGISTRY,
    "MODEL.BACKBONE.NAME": BACKBONE_REGISTRY,
    "MODEL.ANCHOR_GENERATOR.NAME": ANCHOR_GENERATOR_REGISTRY,
}
_REGISTRIES_OF_RCNN = {
    "MODEL.PROPOSAL_GENERATOR.NAME": PROPOSAL_GENERATOR_REGISTRY,
    "MODEL.RPN.HEAD_NAME": RPN_HEAD_REGISTRY,
    "MODEL.ROI_HEADS.NAME": ROI_HEADS_REGISTRY,
    "MODEL.ROI_BOX_HEAD.NAME": ROI_BOX_HEAD_REGISTRY,
    "MODEL.ROI_MASK_HEAD.NAME": ROI_MASK_HEAD_REGISTRY,
    "MODEL.ROI_KEYPOINT_HEAD.NAME": ROI_KEYPOINT_HEAD_REGISTRY,
}
# Names that are in no registry: C4's ROI heads have no box head.
_UNREGISTERED = {"MODEL.PROPOSAL_GENERATOR.NAME": ["PrecomputedProposals"], "MODEL.ROI_BOX_HEAD.NAME": [""]}
# What Detectron2 takes, without the weighted samplers: our loader knows no order for them. Other values it
# finds late, or takes for "none".
_CHOICES_IN_TRAINING = {
    "DATALOADER.SAMPLER_TRAIN": (
        "TrainingSampler",
        "RepeatFactorTrainingSampler",
        "RandomSubsetTrainingSampler",
    ),
    "INPUT.RANDOM_FLIP": ("horizontal", "vertical", "none"),
    "INPUT.MIN_SIZE_TRAIN_SAMPLING": ("choice", "range"),
    "INPUT.CROP.TYPE": ("relative_range", "relative", "absolute", "absolute_range"),
    "INPUT.MASK_FORMAT": ("polygon", "bitmask"),
}


def check_settings(cfg: CfgNode) -> None:
    """Refuse settings that are wrong, or that Detectron2 would silently ignore.

    Raises:
        ConfigError: the first thing found.
    """
    _check_keypoint_head(cfg)
    if cfg.TEST.AUG.ENABLED and (cfg.MODEL.KEYPOINT_ON or cfg.MODEL.META_ARCHITECTURE != "GeneralizedRCNN"):
        what = "keypoints" if cfg.MODEL.KEYPOINT_ON else cfg.MODEL.META_ARCHITECTURE
        raise config_error(
            "TEST.AUG.ENABLED", True, f"Detectron2 has no test-time augmentation for {what}; write False"
        )


def _check_keypoint_head(cfg: CfgNode) -> None:
    key, head = "MODEL.NONLOCAL.KEYPOINT_HEAD", cfg.MODEL.ROI_KEYPOINT_HEAD
    every, block = cfg.MODEL.NONLOCAL.KEYPOINT_HEAD, cfg.MODEL.NONLOCAL.BLOCK
    check_least(cfg, key, 0, "must be 0 (none) or more; the paper's is 2")
    if every and block == "residual":
        what = f"the keypoint head has no residual blocks to take after, and {key} is {every}"
        raise config_error("MODEL.NONLOCAL.BLOCK", block, f'{what}; write "non_local", or 0 there')
    if every and not cfg.MODEL.KEYPOINT_ON:
        what = "would be ignored, as MODEL.KEYPOINT_ON is False; write MODEL.KEYPOINT_ON True, or 0 here"
        raise config_error(key, every, what)
    if every and head.NAME != KEYPOINT_HEAD:
        what = f'would be ignored, as MODEL.ROI_KEYPOINT_HEAD.NAME is "{head.NAME}"'
        raise config_error(key, every, f'{what}; write "{KEYPOINT_HEAD}" there')
    if not (cfg.MODEL.KEYPOINT_ON and head.NAME == KEYPOINT_HEAD):
        return
    if not every:
        what = f"no block would be inserted into {KEYPOINT_HEAD}; write 2 (a block after every 2 convs), or "
        raise config_error(key, every, f'{what}MODEL.ROI_KEYPOINT_HEAD.NAME "KRCNNConvDeconvUpsampleHead"')
    if every > len(head.CONV_DIMS):
        what = f"no block would be inserted, as the head has {len(head.CONV_DIMS)} convs"
        mend = "(MODEL.ROI_KEYPOINT_HEAD.CONV_DIMS); write that number or less, such as 2"
        raise config_error(key, every, f"{what} {mend}")


def check_parts(cfg: CfgNode, *, training: bool) -> None:
    """Check the names of what a detector is made of, and in training the choices of its loader.

    Raises:
        ConfigError: one is not known.
    """
    of_rcnn = cfg.MODEL.META_ARCHITECTURE == "GeneralizedRCNN"
    for key, registry in {**_REGISTRIES, **(_REGISTRIES_OF_RCNN if of_rcnn else {})}.items():
        check_choice(cfg, key, [*sorted(name for name, _ in registry), *_UNREGISTERED.get(key, [])])
    for key, right in _CHOICES_IN_TRAINING.items() if training else ():
        check_choice(cfg, key, right)


def check_classes(cfg: CfgNode, key: str, name: str) -> None:
    """Check what a data set is known for against the model, which would fail in its first loss.

    Raises:
        ConfigError: it has more classes than the model, or no keypoints where the model has.
    """
    metadata = MetadataCatalog.get(name)
    classes = metadata.get("thing_classes")
    head, count = f"{detector_key(cfg)}.NUM_CLASSES", detector_node(cfg).NUM_CLASSES
    if classes and count < len(classes):
        raise ConfigError(
            f"{head} is {count}: {key} names {name!r} with {len(classes)} classes; write {len(classes)}"
        )
    if cfg.MODEL.KEYPOINT_ON and classes and not metadata.get("keypoint_names"):
        raise ConfigError(
            f"{key} names {name!r}: it has no keypoints, and MODEL.KEYPOINT_ON is True; write one that has, "
            'such as "keypoints_coco_2017_train"'
        )


def check_data(cfg: CfgNode, *, training: bool) -> None:
    """Check the annotation files of a config's data sets, but for Detectron2's own and the built-in ones.

    What is found goes to the log, and what DATASETS.REGISTER has taken from the files. Of the pictures a
    sample is opened; everything else is checked whole. DATASETS.TRAIN counts in ``training`` alone.

    Raises:
        ConfigError: a data set has errors; the message has the first one.
    """
    train = cfg.DATASETS.TRAIN if training else ()
    first: CocoFile | None = None
    for name in dict.fromkeys((*train, *cfg.DATASETS.TEST)):
        metadata = MetadataCatalog.get(name) if name in DatasetCatalog else Metadata()
        path = metadata.get("json_file")
        known = name in _KNOWN or is_made_on_first_use(name)
        if known or metadata.get("evaluator_type") != "coco" or not isinstance(path, str):
            continue
        try:
            file = keep_file(path)
        except DatasetError as error:
            raise ConfigError(f"data set {name!r}: {error}") from None
        findings = check_file(
            CheckedFile(
                file,
                masks=cfg.MODEL.MASK_ON,
                keypoints=cfg.MODEL.KEYPOINT_ON,
                training=name in train,
                folder=metadata.get("image_root"),
                sample=SAMPLED_PICTURES,
                other=first,
                allow_outside=cfg.DATASETS.ALLOW_OUTSIDE_IMAGE_ROOT,
                # The evaluation needs them all.
                max_bad_fraction=None if name in cfg.DATASETS.TEST else cfg.DATALOADER.MAX_BAD_FRACTION,
            )
        )
        first = first or file
        _report(name, path, findings)
        if name in (entry[0] for entry in cfg.DATASETS.REGISTER):
            logger.info("%s", _describe(cfg, name, file))


def _describe(cfg: CfgNode, name: str, file: CocoFile) -> str:
    """Say in one line what a data set's file has decided."""
    summary = summarize(file.path)
    classes, points = summary.classes, summary.keypoints
    parts = [f"{named(classes, 'class', 'classes')}: {detector_key(cfg)}.NUM_CLASSES {len(classes)}"]
    if cfg.MODEL.KEYPOINT_ON and points:
        pairs = len(MetadataCatalog.get(name).get("keypoint_flip_map", ()))
        parts.append(
            f"{named(points, 'keypoint')}, {pairs} left and right: MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS "
            f"{len(points)}"
        )
    if cfg.MODEL.MASK_ON:
        masks = "some as RLE" if summary.has_rle else "as polygons"
        parts.append(f"masks {masks}: INPUT.MASK_FORMAT {cfg.INPUT.MASK_FORMAT}")
    return f"{name}: {file.path} has {'; '.join(parts)}"


def _report(name: str, path: str, findings: Sequence[Finding]) -> None:
    for finding in findings:
        logger.log(logging.ERROR if finding.severity == ERROR else logging.WARNING, "%s: %s", name, finding)
    errors = [str(finding) for finding in findings if finding.severity == ERROR]
    if errors:
        more = f" (and {len(errors) - 1} more, see the log)" if len(errors) > 1 else ""
        raise ConfigError(f"data set {name!r} ({path}): {errors[0].removeprefix('error: ')}{more}")
