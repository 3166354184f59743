"""What leans on private names of Detectron2 or PyTorch, and the filters for warnings of theirs.

What is imported under a private name is an attribute of this module, loaded when it is first used. What is
read, set or overridden in their classes is listed in :data:`PRIVATE_MEMBERS`. A test goes through both lists,
and fails by name when upstream moves one.

Exactly the warnings that are named here, which users of this package can do nothing about, are filtered.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any

#: Name here -> module and private name there.
PRIVATE_NAMES = {
    "apply_exif_orientation": ("detectron2.data.detection_utils", "_apply_exif_orientation"),
    "COCO_SPLITS": ("detectron2.data.datasets.builtin", "_PREDEFINED_SPLITS_COCO"),
    "BatchNormBase": ("torch.nn.modules.batchnorm", "_NormBase"),
    "global_gloo_group": ("detectron2.utils.comm", "_get_global_gloo_group"),
    "DropoutBase": ("torch.nn.modules.dropout", "_DropoutNd"),
}

#: Class or other object -> private members that this package reads, sets or overrides.
PRIVATE_MEMBERS = {
    "detectron2.checkpoint.DetectionCheckpointer": (
        *("_load_file", "_load_model", "_parsed_url_during_load", "_torch_load"),
    ),
    "fvcore.common.checkpoint.Checkpointer": ("_log_incompatible_keys",),
    "detectron2.data.samplers.TrainingSampler": ("_shuffle",),
    "detectron2.data.samplers.RandomSubsetTrainingSampler": ("_shuffle", "_size_subset"),
    "detectron2.data.samplers.RepeatFactorTrainingSampler": ("_int_part", "_frac_part", "_shuffle"),
    "detectron2.engine.hooks.BestCheckpointer": ("_best_checking", "_val_metric"),
    "detectron2.engine.hooks.EvalHook": ("_do_eval", "_period"),
    "detectron2.engine.hooks.PeriodicWriter": ("_writers",),
    "detectron2.engine.hooks.PreciseBN": ("_data_iter", "_data_loader", "_disabled"),
    "detectron2.engine.train_loop.TrainerBase": ("_hooks",),
    "detectron2.evaluation.COCOEvaluator": (
        *("_coco_api", "_derive_coco_results", "_do_evaluation", "_eval_predictions", "_kpt_oks_sigmas"),
        *("_max_dets_per_image", "_metadata", "_output_dir", "_results", "_tasks", "_tasks_from_predictions"),
        "_use_fast_impl",
    ),
    "detectron2.utils.events.CommonMetricPrinter": ("_get_eta", "_window_size"),
    "detectron2.utils.events.EventStorage": ("_history",),
    "detectron2.utils.visualizer.Visualizer": ("_default_font_size",),
    # Of nonlocal_det.layers, which imports nothing but PyTorch.
    "torch.nn.Conv1d": ("_conv_forward",),
    "torch.nn.Conv2d": ("_conv_forward",),
    "torch.nn.Conv3d": ("_conv_forward",),
    "torch.ops.aten": ("_softmax_backward_data",),
}

#: Modules that open annotation files by a class named COCO, which :func:`annotation_files_from` replaces.
COCO_MODULES = ("pycocotools.coco", "detectron2.evaluation.coco_evaluation")


@contextmanager
def annotation_files_from(read: Callable[[str], dict[str, Any]]) -> Iterator[None]:
    """Let Detectron2's ``load_coco_json`` and ``COCOEvaluator`` take files from a function, not from disk.

    Args:
        read: returns the content of the annotation file at a path, which may be changed.
    """
    modules = [import_module(name) for name in COCO_MODULES]
    theirs = [module.COCO for module in modules]

    class Given(theirs[0]):
        def __init__(self, annotation_file: str | None = None) -> None:
            super().__init__()
            if annotation_file is not None:
                self.dataset = read(annotation_file)
                self.createIndex()

    try:
        for module in modules:
            module.COCO = Given
        yield
    finally:
        for module, own in zip(modules, theirs, strict=True):
            module.COCO = own


def __getattr__(name: str) -> Any:
    if name not in PRIVATE_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, private = PRIVATE_NAMES[name]
    return getattr(import_module(module), private)


#: The open pictures, by the names of their files, that Detectron2's read_image takes.
_OPEN_PICTURES: ContextVar[dict[str, Any] | None] = ContextVar("open_pictures", default=None)


@contextmanager
def read_image_takes(file_name: str, picture: Any) -> Iterator[None]:
    """Let Detectron2's ``read_image`` take an open picture, once, instead of opening its file.

    Args:
        file_name: what ``read_image`` will be asked for. It reads other files as ever.
        picture: that file, opened by Pillow and not decoded.
    """
    _replace_read_image()
    token = _OPEN_PICTURES.set({file_name: picture})
    try:
        yield
    finally:
        _OPEN_PICTURES.reset(token)


@functools.cache
def _replace_read_image() -> None:
    from detectron2.data import detection_utils as utils

    original = utils.read_image

    @functools.wraps(original)
    def read_image(file_name: str, format: str | None = None) -> Any:
        picture = (_OPEN_PICTURES.get() or {}).pop(file_name, None)
        if picture is None:
            return original(file_name, format)
        try:
            return utils.convert_PIL_to_numpy(utils._apply_exif_orientation(picture), format)
        finally:
            picture.close()  # its memory serves what comes next, which is faster than new memory

    utils.read_image = read_image


# (action, message, category, module): what warnings.filterwarnings takes; message and module are regular
# expressions that match from the start. None has a colon, at which pytest splits its own form of them.
UPSTREAM_WARNINGS: tuple[tuple[str, str, type[Warning], str], ...] = (
    # fvcore/nn/focal_loss.py and detectron2/modeling/box_regression.py script functions while they are
    # imported. PyTorch gives its own module as the place, whoever calls, so this hides it from all callers.
    (
        "ignore",
        r"`torch\.jit\.script` is deprecated\. Please switch to `torch\.compile` or `torch\.export`",
        FutureWarning,
        r"torch\.jit\._script$",
    ),
    # detectron2/modeling/anchor_generator.py calls meshgrid without `indexing`. PyTorch warns once a process,
    # and gives its own module here too.
    (
        "ignore",
        r"torch\.meshgrid. in an upcoming release, it will be required to pass the indexing argument",
        UserWarning,
        r"torch\.functional$",
    ),
    # Keypoints, made from the list of arrays that detectron2/data/detection_utils.py collects.
    (
        "ignore",
        r"Creating a tensor from a list of numpy\.ndarrays is extremely slow",
        UserWarning,
        r"detectron2\.structures\.keypoints$",
    ),
    # create_ddp_model; the name that replaces broadcast_buffers is not in older PyTorch releases.
    (
        "ignore",
        r"`broadcast_buffers` is deprecated\. Use `forward_sync_buffers` instead",
        FutureWarning,
        r"detectron2\.engine\.defaults$",
    ),
)


class _FxTracingFilter(logging.Filter):
    """Drop the log record that ``torch.fx`` writes at the first call of ``ROIPooler.forward``."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether ``record`` is to be logged."""
        return not record.getMessage().startswith("is_fx_tracing will return true for both fx.symbolic_trace")


_FX_TRACING_FILTER = _FxTracingFilter()


def filter_upstream_warnings() -> None:
    """Hide the known upstream warnings. Some come while ``detectron2`` is imported: call it before."""
    for action, message, category, module in UPSTREAM_WARNINGS:
        warnings.filterwarnings(action, message, category, module)
    logging.getLogger("torch.fx._symbolic_trace").addFilter(_FX_TRACING_FILTER)
