"""The conversion of a weight file: read, sort, fit to a config's model, write."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nonlocal_det import get_config
from nonlocal_det.checkpoint.checkpointer import compile_pattern
from nonlocal_det.config.loading import find_config
from nonlocal_det.config.messages import get_value
from nonlocal_det.convert.conversion_report import ConversionReport
from nonlocal_det.convert.fitting import fit
from nonlocal_det.convert.output import SUFFIXES, config_text, write_all
from nonlocal_det.convert.placement import place_blocks
from nonlocal_det.convert.reading import drop_net, naming, over_base, read_weights
from nonlocal_det.convert.settings import check_architecture, decide_settings
from nonlocal_det.convert.sources import SOURCES
from nonlocal_det.convert.targets import to_baseline, to_mmcv
from nonlocal_det.engine.task import find_task
from nonlocal_det.errors import CheckpointError
from nonlocal_det.modeling.build import build_on_meta


@dataclass(frozen=True)
class Options:
    """What a conversion may be told."""

    source: str = "auto"  # whose weights they are, a key of ``SOURCES``; "auto" finds out
    #: "nonlocal_det"; "detectron2" for a baseline without blocks; "mmcv" for the blocks alone, with the names
    #: of mmcv's NonLocal2d
    target: str = "nonlocal_det"
    #: prefix of a block in the file -> its place, such as "res4.5". Blocks whose names do not say where they
    #: are go to the config's places in order, if there are as many.
    places: Mapping[str, str] = field(default_factory=dict)
    base: str | os.PathLike[str] = ""  # another weight file, which gives what this one lacks
    skip: str = ""  # regular expression; tensors of the file in whose names it is found are not needed
    blocks_only: bool = False  # take the non-local blocks alone
    #: regular expression; what is missing is allowed if it is found in the name of each
    allow_missing: str = ""
    #: make the config's stem that of the authors, see :mod:`nonlocal_det.modeling.stem`
    unpadded_pool: bool = False
    allow_moved: bool = False  # put blocks that work inside a residual branch after the residual block
    strip_trained: bool = False  # with target "detectron2", leave out blocks that do something
    overwrite: bool = False  # replace what is there


def convert_checkpoint(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    config_file: str | os.PathLike[str],
    opts: Sequence[Any] = (),
    **options: Any,
) -> ConversionReport:
    """Convert a weight file to a checkpoint for a config's model, and write the config that goes with it.

    Args:
        path: what is converted: ``.pth``, ``.pkl``, ``.safetensors`` or ``.onnx``.
        out: what is written: ``.pth`` or ``.safetensors``; the config gets the same name with ``.yaml``.
        config_file: the config that the weights are meant for, as for :func:`nonlocal_det.get_config`.
        opts: overrides of it.
        options: the fields of :class:`Options`.

    Returns:
        Where every tensor went, and what was set.

    Raises:
        CheckpointError: the file cannot be read safely, is not the source's, or does not fit the config.
        ConfigError: the config is wrong.
        OSError: a file cannot be read or written.
    """
    asked = Options(**options)
    path, out, config_file = Path(path), Path(out), find_config(config_file)
    _check([path, config_file, *([Path(asked.base)] if asked.base else [])], out, asked)
    allowed, skip = compile_pattern(asked.allow_missing), compile_pattern(asked.skip, "--skip")
    cfg = get_config(config_file, opts)
    find_task(cfg).release_data()
    draft = read_weights(path, asked.source, skip)
    title = draft.source.title
    if asked.blocks_only:
        drop_net(draft)
    with naming(path):
        if asked.base:
            draft = over_base(draft, read_weights(Path(asked.base), "auto", skip), Path(asked.base).name)
        check_architecture(cfg, draft)
        place_blocks(draft, cfg, asked.places, allow_moved=asked.allow_moved)
        settings, notes = decide_settings(cfg, draft, unpadded_pool=asked.unpadded_pool)
        found = [item for key, setting in settings.items() for item in (key, setting.value)]
        cfg = get_config(config_file, [*opts, *found])
        notes = [*draft.net.notes, *draft.notes, *notes]
        report = ConversionReport(str(path), title, settings=settings, notes=notes)
        model = build_on_meta(cfg)
        tensors = fit(draft, model, report, allowed)
        if asked.target == "mmcv":
            tensors = to_mmcv(tensors, model, cfg, report)
        elif asked.target == "detectron2":
            tensors = to_baseline(tensors, model, cfg, report, asked.strip_trained)
    author = f"nonlocal_det, from {title}"
    text = None
    if asked.target != "mmcv":
        values = {key: get_value(cfg, key) for key in opts[0::2]}
        values |= {key: setting.value for key, setting in report.settings.items()}
        values["MODEL.WEIGHTS"] = str(out.resolve())
        text = config_text(config_file.resolve(), values, f"What the weights {out.name} assume ({author}).")
    report.written = write_all(out, tensors, author, text)
    return report


def _check(inputs: list[Path], out: Path, asked: Options) -> None:
    if asked.source not in ("auto", *SOURCES):
        raise CheckpointError(f"--from {asked.source}: not known; write auto or one of {', '.join(SOURCES)}")
    if out.suffix not in SUFFIXES:
        raise CheckpointError(f"{out}: the suffix says what is written; give {' or '.join(SUFFIXES)}")
    for file in (out, out.with_suffix(".yaml")) if asked.target != "mmcv" else (out,):
        if not file.exists():
            continue
        if any(path.exists() and file.samefile(path) for path in inputs):
            raise CheckpointError(f"{file}: is read for the conversion; write to another")
        if file.is_dir() or not asked.overwrite:
            raise CheckpointError(f"{file}: exists; write to another, or add --overwrite")
