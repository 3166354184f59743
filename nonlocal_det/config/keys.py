"""The keys that this package adds to Detectron2's, whatever the task, with their comments and choices."""

from __future__ import annotations

from detectron2.config import CfgNode

WRAPPER = "build_nonlocal_backbone"
STAGES = ("RES2", "RES3", "RES4", "RES5")
#: The choices of keys of MODEL.NONLOCAL. Those of the block itself are the layers' own.
BLOCKS = ("non_local", "residual")
NORMS = ("", "BN", "SyncBN", "naiveSyncBN", "GN", "LN")
#: Right values for the messages, where the default would not show what is meant.
EXAMPLES = {**{f"MODEL.NONLOCAL.{stage}": [-1] for stage in STAGES}, "MODEL.NONLOCAL.KEYPOINT_HEAD": 2}


def add_keys(cfg: CfgNode) -> None:
    """Add MODEL.NONLOCAL, DATASETS.REGISTER, and the keys of the engine.

    Args:
        cfg: a Detectron2 config, changed in place.
    """
    node = cfg.MODEL.NONLOCAL = CfgNode()
    # The registered builder of the backbone that blocks are put into, where MODEL.BACKBONE.NAME is
    # "build_nonlocal_backbone". It must make a ResNet: FPN, C4, DC5 and RetinaNet's builders do.
    node.BACKBONE = "build_resnet_fpn_backbone"
    # Where: i means before residual block i of the stage, counted from 0; -1 is the last block, and the
    # number of blocks means after the last. "[-1]" in res4 is the paper's choice for COCO.
    node.RES2 = []
    node.RES3 = []
    node.RES4 = []
    node.RES5 = []
    # What is inserted: "non_local" blocks, or ordinary "residual" blocks of the stage's own kind for
    # comparison. Of the keys below, residual blocks follow NORM alone.
    node.BLOCK = "non_local"
    # f of Eq. 1: "embedded_gaussian" (Eq. 3), "gaussian" (Eq. 2), "dot_product" (Eq. 4) or
    # "concatenation" (Eq. 5).
    node.PAIRWISE = "embedded_gaussian"
    # Channels inside the block are max(1, C // REDUCTION).
    node.REDUCTION = 2
    # What the 2x2 max pool of Sec. 3.3 is applied to: the block's "input" (the authors' code), the
    # "embedding"s phi and g (the paper's text), or "none".
    node.POOL = "input"
    # Divide the logits of the two softmax forms by the square root of the vectors' length.
    node.SCALE = True
    # Norm after W_z: "", "BN", "SyncBN", "naiveSyncBN", "GN" or "LN". "" starts with W_z = 0, a norm with
    # gamma = 0, so the block is an identity at the start either way (Sec. 4.1).
    node.NORM = ""
    # "msra" (He et al. 2015) or "normal" (standard deviation 0.01).
    node.INIT = "msra"
    # Data sets of your own in COCO's format: [[name, annotation file, image folder], ...]. Relative paths are
    # looked up from the config file, then from the working directory. Number of classes and keypoints, OKS
    # sigmas and INPUT.MASK_FORMAT come from the files, unless you set them.
    cfg.DATASETS.REGISTER = []
    # Steps of a run that may be skipped because a loss is infinite or NaN; one more stops the run. The file
    # OUTPUT_DIR/nonfinite_*.pth has the batch of each.
    cfg.SOLVER.SKIP_NONFINITE_STEPS = 0
    # Training ends when this many evaluations in turn have not beaten the best score before them (the one by
    # which model_best.pth is chosen). 0 trains to the end.
    cfg.SOLVER.EARLY_STOP_PATIENCE = 0
    # Fraction of the training images that may be unusable, as the file cannot be read or an annotation is
    # impossible. Others take their places. One more stops the run.
    cfg.DATALOADER.MAX_BAD_FRACTION = 0.01
    # At each evaluation while training, also compute the losses on DATASETS.TEST (val/total_loss, ...).
    cfg.TEST.VAL_LOSS = False
