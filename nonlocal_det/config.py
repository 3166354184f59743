"""The configuration of non-local blocks, and the one place where wrong settings are found."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from detectron2.config import CfgNode, get_cfg
from detectron2.modeling import BACKBONE_REGISTRY

from nonlocal_det.data.registration import DatasetError, apply_datasets

__all__ = ["CONFIG_ROOT", "ConfigError", "add_nonlocal_config", "check_config", "get_config"]

#: Folder of the configs: inside the package once installed, beside it in a source checkout.
CONFIG_ROOT = next(
    folder
    for folder in (Path(__file__).parent / "configs", Path(__file__).parent.parent / "configs")
    if folder.is_dir()
)

WRAPPER = "build_nonlocal_backbone"
KEYPOINT_HEAD = "NonLocalKeypointHead"
STAGES = ("RES2", "RES3", "RES4", "RES5")
BLOCK = ("non_local", "residual")
PAIRWISE = ("embedded_gaussian", "gaussian", "dot_product", "concatenation")
POOL = ("input", "embedding", "none")
NORM = ("", "BN", "SyncBN", "naiveSyncBN", "GN", "LN")
INIT = ("msra", "normal")
#: Right values for the messages, where the default would not show what is meant.
EXAMPLES = {**{f"MODEL.NONLOCAL.{stage}": [-1] for stage in STAGES}, "MODEL.NONLOCAL.KEYPOINT_HEAD": 2}


#: Keys of Detectron2's whose wrong values it would find late, in a traceback.
CHOICES = {
    "MODEL.RESNETS.DEPTH": (18, 34, 50, 101, 152),
    "MODEL.RESNETS.NORM": (
        "FrozenBN",
        "BN",
        "SyncBN",
        "nnSyncBN",
        "naiveSyncBN",
        "naiveSyncBN_N",
        "GN",
        "LN",
        "",
    ),
    "INPUT.FORMAT": ("BGR", "RGB", "L", "YUV-BT.601"),
}


class ConfigError(ValueError):
    """A wrong setting. The message is one line with the key, the value and a right one."""


def add_nonlocal_config(cfg: CfgNode) -> None:
    """Add MODEL.NONLOCAL and DATASETS.REGISTER to a config. A second call changes nothing.

    Args:
        cfg: a Detectron2 config, changed in place.
    """
    if "NONLOCAL" in cfg.MODEL:
        return
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
    # A block after every k convs of the keypoint head; 0 is none. Needs
    # MODEL.ROI_KEYPOINT_HEAD.NAME "NonLocalKeypointHead".
    node.KEYPOINT_HEAD = 0

    # Data sets of your own in COCO's format: [[name, annotation file, image folder], ...]. Relative paths are
    # looked up from the config file, then from the working directory. Number of classes and keypoints, OKS
    # sigmas and INPUT.MASK_FORMAT come from the files, unless you set them.
    cfg.DATASETS.REGISTER = []
    # Whether annotation files may name pictures outside their image folder, by "..", an absolute path, an
    # address or a symbolic link.
    cfg.DATASETS.ALLOW_OUTSIDE_IMAGE_ROOT = False

    # Steps of a run that may be skipped because a loss is infinite or NaN; one more stops the run. The file
    # OUTPUT_DIR/nonfinite_*.pth has the batch of each.
    cfg.SOLVER.SKIP_NONFINITE_STEPS = 0
    # Training ends when this many evaluations in turn have brought no better score than the best before them
    # (the one that model_best.pth is chosen by). 0 trains to the end.
    cfg.SOLVER.EARLY_STOP_PATIENCE = 0
    # Fraction of the training images that may turn out to be of no use, as the file cannot be read or an
    # annotation is impossible. Others take their places. One more stops the run.
    cfg.DATALOADER.MAX_BAD_FRACTION = 0.01
    # At each evaluation while training, also compute the losses on DATASETS.TEST (val/total_loss, ...).
    cfg.TEST.VAL_LOSS = False


def get_config(config_file: str | os.PathLike[str], opts: Sequence[Any] = ()) -> CfgNode:
    """Load a config with everything that this project needs, and check it.

    YAML is loaded safely: a file cannot run code. MODEL.DEVICE becomes "cpu" where there is no CUDA device
    and neither the files nor ``opts`` set it. The data sets of DATASETS.REGISTER are registered, and what
    their files decide, such as the number of classes, is set.

    Args:
        config_file: a path, or else a name under ``configs/`` such as
            ``COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml``.
        opts: overrides, ``[KEY, VALUE, KEY, VALUE, ...]``; a value is a Python object or its text.

    Returns:
        The config, not frozen.

    Raises:
        ConfigError: the file or a setting is wrong; the message says how to mend it.
    """
    path = _find_config(config_file)
    cfg = get_cfg()
    add_nonlocal_config(cfg)
    opts = list(opts)
    set_keys = _merge_file(cfg, path)
    _merge_opts(cfg, opts)
    set_keys.update(opts[0::2])
    _refuse_none(cfg)
    for node, key in ((cfg.MODEL, "WEIGHTS"), (cfg, "OUTPUT_DIR")):
        node[key] = os.path.expanduser(node[key])
    if "MODEL.DEVICE" not in set_keys and not torch.cuda.is_available():
        cfg.MODEL.DEVICE = "cpu"
    chain = _own_files(path)
    user_keys = {key for values in chain.values() for key, _ in _flatten(values)}.union(opts[0::2])
    try:
        apply_datasets(cfg, [file.parent for file in chain], user_keys)
    except DatasetError as error:
        key = "" if re.search(r"\b(DATASETS|MODEL|INPUT|TEST)\.", str(error)) else "DATASETS.REGISTER: "
        raise ConfigError(f"{key}{error}") from None
    check_config(cfg)
    return cfg


def _refuse_none(cfg: CfgNode) -> None:
    """Refuse null: yacs lets it take the place of a value of any type."""
    values = dict(_flatten(cfg))
    for key, right in _defaults().items():
        if right is not None and values.get(key, right) is None:
            right = EXAMPLES.get(key, right)
            raise _error(key, None, f"must be a {type(right).__name__}, such as {right!r}")


def check_config(cfg: CfgNode) -> None:
    """Refuse settings that are wrong, or that Detectron2 would silently ignore, before anything is built.

    What depends on the built net (a position outside its stage, a backbone without a ResNet) is checked
    where the net is built.

    Args:
        cfg: a config with MODEL.NONLOCAL.

    Raises:
        ConfigError: the first thing found.
    """
    _check_device(cfg)
    check_block_options(cfg)
    check_backbone(cfg)
    _check_keypoint_head(cfg)
    _check_engine(cfg)


def _check_device(cfg: CfgNode) -> None:
    device = cfg.MODEL.DEVICE
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise _error("MODEL.DEVICE", device, 'not a device; write "cuda" or "cpu"') from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise _error(
            "MODEL.DEVICE", device, 'PyTorch sees no CUDA device here; write "cpu" or leave the key out'
        )


def check_block_options(cfg: CfgNode) -> None:
    """Check the keys of MODEL.NONLOCAL one by one.

    Raises:
        ConfigError: a value is not known.
    """
    node = cfg.MODEL.NONLOCAL
    if node.NORM == "FrozenBN":
        raise _error(
            "MODEL.NONLOCAL.NORM",
            node.NORM,
            "its gamma starts at 0 and cannot be trained, so the block would be dead for ever; "
            'write "" (no norm, the frozen-BN recipe) or one of ' + _names(NORM[1:]),
        )
    choices = (
        ("BLOCK", BLOCK),
        ("PAIRWISE", PAIRWISE),
        ("POOL", POOL),
        ("NORM", NORM),
        ("INIT", INIT),
    )
    for key, right in choices:
        if node[key] not in right:
            raise _error(f"MODEL.NONLOCAL.{key}", node[key], "not known; write one of " + _names(right))
    if node.REDUCTION < 1:
        raise _error("MODEL.NONLOCAL.REDUCTION", node.REDUCTION, "must be 1 or more; the paper's is 2")
    if node.KEYPOINT_HEAD < 0:
        raise _error(
            "MODEL.NONLOCAL.KEYPOINT_HEAD", node.KEYPOINT_HEAD, "must be 0 (none) or more; the paper's is 2"
        )
    if node.BLOCK == "residual":
        _check_residual(node)
    for stage in STAGES:
        positions = node[stage] if isinstance(node[stage], (list, tuple)) else [None]
        for position in positions:
            if isinstance(position, bool) or not isinstance(position, int):
                raise _error(
                    f"MODEL.NONLOCAL.{stage}", node[stage], "must be a list of whole numbers, such as [-1]"
                )


def _check_residual(node: CfgNode) -> None:
    """Refuse options that a residual block does not have."""
    if node.KEYPOINT_HEAD:
        raise _error(
            "MODEL.NONLOCAL.BLOCK",
            node.BLOCK,
            "the keypoint head has no residual blocks to take after, and MODEL.NONLOCAL.KEYPOINT_HEAD is "
            f'{node.KEYPOINT_HEAD}; write "non_local", or 0 there',
        )
    for key in ("PAIRWISE", "REDUCTION", "POOL", "SCALE", "INIT"):
        default = _defaults()[f"MODEL.NONLOCAL.{key}"]
        if node[key] != default:
            raise _error(
                f"MODEL.NONLOCAL.{key}",
                node[key],
                f'would be ignored, as MODEL.NONLOCAL.BLOCK is "residual"; leave it at {default!r}, or write '
                '"non_local" there',
            )


def check_backbone(cfg: CfgNode) -> None:
    """Check that blocks asked for in the backbone have a backbone that takes them, and the reverse.

    Raises:
        ConfigError: no block would be inserted, or the builder to wrap is not one.
    """
    node = cfg.MODEL.NONLOCAL
    asked = {f"MODEL.NONLOCAL.{stage}": node[stage] for stage in STAGES if len(node[stage])}
    name = cfg.MODEL.BACKBONE.NAME
    if name == WRAPPER:
        if not asked:
            raise _error(
                "MODEL.BACKBONE.NAME",
                name,
                "no block would be inserted, as RES2 to RES5 of MODEL.NONLOCAL are all empty; "
                f'write MODEL.NONLOCAL.RES4 [-1], or MODEL.BACKBONE.NAME "{node.BACKBONE}"',
            )
        if node.BACKBONE == WRAPPER:
            raise _error(
                "MODEL.NONLOCAL.BACKBONE",
                node.BACKBONE,
                'the wrapper cannot wrap itself; write a builder, such as "build_resnet_fpn_backbone"',
            )
        if node.BACKBONE not in BACKBONE_REGISTRY:
            known = sorted(key for key, _ in BACKBONE_REGISTRY if key != WRAPPER)
            raise _error(
                "MODEL.NONLOCAL.BACKBONE", node.BACKBONE, "not registered; write one of " + _names(known)
            )
    elif asked:
        key, value = next(iter(asked.items()))
        raise _error(
            key,
            list(value),
            f'would be ignored, as MODEL.BACKBONE.NAME is "{name}"; write MODEL.BACKBONE.NAME "{WRAPPER}" '
            f'and MODEL.NONLOCAL.BACKBONE "{name}"',
        )


def _check_keypoint_head(cfg: CfgNode) -> None:
    node = cfg.MODEL.NONLOCAL
    head = cfg.MODEL.ROI_KEYPOINT_HEAD
    every = node.KEYPOINT_HEAD
    if every and not cfg.MODEL.KEYPOINT_ON:
        raise _error(
            "MODEL.NONLOCAL.KEYPOINT_HEAD",
            every,
            "would be ignored, as MODEL.KEYPOINT_ON is False; write MODEL.KEYPOINT_ON True, or 0 here",
        )
    if every and head.NAME != KEYPOINT_HEAD:
        raise _error(
            "MODEL.NONLOCAL.KEYPOINT_HEAD",
            every,
            f'would be ignored, as MODEL.ROI_KEYPOINT_HEAD.NAME is "{head.NAME}"; '
            f'write "{KEYPOINT_HEAD}" there',
        )
    if cfg.MODEL.KEYPOINT_ON and head.NAME == KEYPOINT_HEAD:
        if not every:
            raise _error(
                "MODEL.NONLOCAL.KEYPOINT_HEAD",
                every,
                f"no block would be inserted into {KEYPOINT_HEAD}; write 2 (a block after every 2 convs), or "
                'MODEL.ROI_KEYPOINT_HEAD.NAME "KRCNNConvDeconvUpsampleHead"',
            )
        if every > len(head.CONV_DIMS):
            raise _error(
                "MODEL.NONLOCAL.KEYPOINT_HEAD",
                every,
                f"no block would be inserted, as the head has {len(head.CONV_DIMS)} convs "
                "(MODEL.ROI_KEYPOINT_HEAD.CONV_DIMS); write that number or less, such as 2",
            )


def check_choice(cfg: CfgNode, key: str, right: Sequence[Any]) -> None:
    """Check that a key has one of the values that are right.

    Raises:
        ConfigError: it has another one.
    """
    value = cfg
    for part in key.split("."):
        value = value[part]
    if value not in right:
        raise _error(key, value, f"not known; write one of {', '.join(map(repr, right))}")


def _check_engine(cfg: CfgNode) -> None:
    names = {cfg.MODEL.BACKBONE.NAME, cfg.MODEL.NONLOCAL.BACKBONE}
    for key, right in CHOICES.items():
        of_resnet = key.startswith("MODEL.RESNETS.")
        if not of_resnet or any("resnet" in name for name in names):
            check_choice(cfg, key, right)
    if cfg.TEST.AUG.ENABLED and (cfg.MODEL.KEYPOINT_ON or cfg.MODEL.META_ARCHITECTURE != "GeneralizedRCNN"):
        what = "keypoints" if cfg.MODEL.KEYPOINT_ON else cfg.MODEL.META_ARCHITECTURE
        raise _error(
            "TEST.AUG.ENABLED",
            True,
            f"Detectron2 has no test-time augmentation for {what}; write False",
        )
    if cfg.SOLVER.SKIP_NONFINITE_STEPS < 0:
        raise _error(
            "SOLVER.SKIP_NONFINITE_STEPS",
            cfg.SOLVER.SKIP_NONFINITE_STEPS,
            "must be 0 (stop at the first) or more",
        )
    patience = cfg.SOLVER.EARLY_STOP_PATIENCE
    if patience < 0:
        raise _error(
            "SOLVER.EARLY_STOP_PATIENCE", patience, "must be 0 (train to the end) or more, such as 5"
        )
    if patience and cfg.TEST.EVAL_PERIOD < 1:
        raise _error(
            "SOLVER.EARLY_STOP_PATIENCE",
            patience,
            f"it counts evaluations, and TEST.EVAL_PERIOD {cfg.TEST.EVAL_PERIOD} makes none while training; "
            "write a number of iterations there, or 0 here",
        )
    for key, value in (("SOLVER.EARLY_STOP_PATIENCE", patience), ("TEST.VAL_LOSS", cfg.TEST.VAL_LOSS)):
        if value and not cfg.DATASETS.TEST:
            raise _error(
                key, value, "would be ignored, as DATASETS.TEST is (); name a data set there, or leave it out"
            )
    if not 0 <= cfg.DATALOADER.MAX_BAD_FRACTION <= 1:
        raise _error(
            "DATALOADER.MAX_BAD_FRACTION",
            cfg.DATALOADER.MAX_BAD_FRACTION,
            "must be from 0 to 1, such as 0.01",
        )
    reference, batch = cfg.SOLVER.REFERENCE_WORLD_SIZE, cfg.SOLVER.IMS_PER_BATCH
    if reference and batch % reference:
        raise _error(
            "SOLVER.IMS_PER_BATCH",
            batch,
            f"it counts the images of {reference} GPUs (SOLVER.REFERENCE_WORLD_SIZE) and is scaled to those "
            f"in use, so it must be a multiple of {reference}; to train with {batch} as it stands, write "
            "SOLVER.REFERENCE_WORLD_SIZE 0",
        )


def _find_config(config_file: str | os.PathLike[str]) -> Path:
    name = os.fspath(config_file)
    if not name:
        raise ConfigError(
            "no config file: name one, such as COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml"
        )
    for path in (Path(name).expanduser(), CONFIG_ROOT / name):
        if os.path.isfile(path):  # unlike Path.is_file, it takes a name of any length
            return path
    known = sorted(path.relative_to(CONFIG_ROOT).as_posix() for path in CONFIG_ROOT.rglob("*.yaml"))
    raise ConfigError(
        f"config file {name}: no such file, and no such name under {CONFIG_ROOT}{_did_you_mean(name, known)}"
    )


def _merge_file(cfg: CfgNode, path: Path) -> set[str]:
    """Merge the file and its bases; return the keys that they set."""
    try:
        chain = CfgNode.load_yaml_with_base(str(path), allow_unsafe=False)
    except yaml.constructor.ConstructorError as error:
        tag = re.search(r"tag '[^']*?(python[^']*)'", str(error))
        what = f"the tag !!{tag.group(1)} is refused" if tag else " ".join(str(error).split())
        raise ConfigError(
            f"config file {_where(error, path)}: {what}, as it could run code; write the plain value instead"
        ) from None
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ConfigError(f"config file {_where(error, path)}: not valid YAML: {problem}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"config file {path}: not a text file; write YAML in UTF-8") from None
    except OSError as error:
        raise ConfigError(
            f"config file {path}: cannot read {error.filename or path}: {error.strerror or error}; _BASE_ is "
            "looked up beside the file that names it"
        ) from None
    except (AssertionError, AttributeError, TypeError):  # a list, a lone word or nothing at all
        chain = None
    except RecursionError:
        raise ConfigError(f"config file {path}: it is its own _BASE_, by itself or through others") from None
    if not isinstance(chain, dict):
        raise ConfigError(
            f"config file {path}: it, or its _BASE_, is not made of KEY: value lines; write such lines"
        )
    if dotted := _dotted_key(chain):
        raise ConfigError(
            f"config file {path}: {dotted} is written in one word; in a file each part stands on a line "
            "of its own, indented below the one before"
        )
    values = dict(_flatten(chain))
    try:
        cfg.merge_from_file(str(path), allow_unsafe=False)
    except (KeyError, ValueError, AssertionError, TypeError, AttributeError) as error:
        raise ConfigError(f"config file {path}: {_explain(error, values=values)}") from None
    return set(values)


def _dotted_key(node: Mapping[str, Any]) -> str | None:
    for key, value in node.items():
        found = key if "." in str(key) else _dotted_key(value) if isinstance(value, Mapping) else None
        if found:
            return found
    return None


def _own_files(path: Path) -> dict[Path, dict[str, Any]]:
    """Return a config file and its bases with what each one holds, without the project's own files."""
    if path.resolve().is_relative_to(CONFIG_ROOT.resolve()):
        return {}
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    bases = values.pop("_BASE_", [])
    files = {path: values}
    for base in bases if isinstance(bases, list) else [bases]:
        if "://" not in base:
            files.update(_own_files(path.parent / Path(base).expanduser()))
    return files


def _merge_opts(cfg: CfgNode, opts: list[Any]) -> None:
    if len(opts) % 2:
        raise ConfigError(
            f"overrides come as KEY VALUE pairs, but {opts[-1]!r} stands alone at the end of {opts}"
        )
    for key, value in zip(opts[0::2], opts[1::2], strict=True):
        try:
            cfg.merge_from_list([key, value])
        except (KeyError, ValueError, AssertionError, TypeError, AttributeError) as error:
            raise ConfigError(f"override {key} {value!r}: {_explain(error, key)}") from None


def _explain(error: Exception, key: str | None = None, values: Mapping[str, Any] | None = None) -> str:
    """Turn what yacs raises into one line with the key, the value of ``values``, and what would be right."""
    text = " ".join(str(error.args[0] if error.args else error).split())
    if key is None:
        found = re.search(r"(?:config key|[Nn]on-existent(?: config)? key): (\S+)", text)
        key = found.group(1) if found else None
    known = _defaults()
    inside = [name for name in known if key is not None and name.startswith(key + ".")]
    if key in known:
        right = EXAMPLES.get(key, known[key])
        value = f" ({values[key]!r})" if values and key in values else ""
        return (
            f"{key} has a value of the wrong type{value}; write a {type(right).__name__}, such as {right!r}"
        )
    if inside:
        return f"{key} is a group of keys; write one of them, such as {inside[0]}"
    if "xistent" in text:
        return f"no such key: {key}{_did_you_mean(key or '', list(known))}"
    if isinstance(error, (TypeError, AttributeError)):
        return "a group of keys, such as MODEL, has a plain value; write its keys below it, indented"
    return text or type(error).__name__


def _defaults() -> dict[str, Any]:
    """Return every key that a config has, with its default."""
    cfg = get_cfg()
    add_nonlocal_config(cfg)
    return dict(_flatten(cfg))


def _flatten(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _where(error: yaml.YAMLError, path: Path) -> str:
    mark = getattr(error, "problem_mark", None)
    return f"{mark.name}, line {mark.line + 1}" if mark is not None else str(path)


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    def last(path: str) -> str:
        return re.split(r"[./]", path.removesuffix(".yaml"))[-1]

    close = [other for other in known if last(other) == last(name)] or difflib.get_close_matches(name, known)
    return f"; did you mean {close[0]}?" if close else ""


def _names(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _error(key: str, value: Any, why: str) -> ConfigError:
    return ConfigError(f"{key} is {value!r}: {why}")
