"""Writing a checkpoint and the YAML that goes with it: whole or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from nonlocal_det.errors import CheckpointError
from nonlocal_det.files import whole_file

SUFFIXES = (".pth", ".safetensors")


def config_text(base: Path, values: Mapping[str, Any], title: str) -> str:
    """Return the YAML of a config that sets keys of another; the title is a comment in its first line."""
    tree: dict[str, Any] = {"_BASE_": str(base)}
    for key, value in values.items():
        node = tree
        *parents, last = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = list(value) if isinstance(value, tuple) else value
    return f"# {title}\n{yaml.safe_dump(tree, sort_keys=False, default_flow_style=None)}"


def write_all(path: Path, tensors: Mapping[str, Tensor], author: str, config: str | None) -> list[str]:
    """Write a checkpoint, .pth or .safetensors, and the text of its config, if there is one, as .yaml.

    ``author`` is written into the checkpoint. Return the names of the files.
    """
    files = [path] if config is None else [path, path.with_suffix(".yaml")]
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        partial = {file: stack.enter_context(whole_file(file)) for file in reversed(files)}
        _save(path, partial[path], tensors, author)
        if config is not None:
            partial[files[1]].write_text(config, encoding="utf-8")
    return [str(file) for file in files]


def _save(path: Path, partial: Path, tensors: Mapping[str, Tensor], author: str) -> None:
    # Tensors that share their memory would be written with all of it.
    model = {name: value.contiguous().clone() for name, value in tensors.items()}
    if path.suffix == ".pth":
        torch.save({"model": model, "__author__": author}, partial)
        return
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise CheckpointError(
            f"{path}: writing safetensors needs its package; run pip install safetensors, or write a .pth"
        ) from None
    save_file(model, partial, metadata={"author": author})
