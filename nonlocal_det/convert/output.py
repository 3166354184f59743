"""Writing a checkpoint and the YAML that goes with it: whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from nonlocal_det.errors import CheckpointError

__all__ = ["SUFFIXES", "config_text", "write_all"]

SUFFIXES = (".pth", ".safetensors")


def config_text(base: Path, values: Mapping[str, Any], title: str) -> str:
    """Return the YAML of a config that changes another.

    Args:
        base: the other.
        values: key -> value.
        title: first line, as a comment.
    """
    tree: dict[str, Any] = {"_BASE_": str(base)}
    for key, value in values.items():
        node = tree
        *parents, last = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = list(value) if isinstance(value, tuple) else value
    return f"# {title}\n{yaml.safe_dump(tree, sort_keys=False, default_flow_style=None)}"


def write_all(path: Path, tensors: Mapping[str, Tensor], author: str, config: str | None) -> list[str]:
    """Write a checkpoint and its config, each by renaming a finished file.

    Args:
        path: the checkpoint, .pth or .safetensors; the config gets the suffix .yaml.
        tensors: the weights.
        author: who made them.
        config: text of the config; None for none.

    Returns:
        The names of the files.

    Raises:
        CheckpointError: the package for safetensors is missing.
    """
    # Tensors that share their memory would be written with all of it.
    model = {name: value.contiguous().clone() for name, value in tensors.items()}

    def save(temporary: str) -> None:
        if path.suffix == ".pth":
            torch.save({"model": model, "__author__": author}, temporary)
            return
        try:
            from safetensors.torch import save_file
        except ImportError:
            raise CheckpointError(
                f"{path}: writing safetensors needs its package; run pip install safetensors, or write a .pth"
            ) from None
        save_file(model, temporary, metadata={"author": author})

    path.parent.mkdir(parents=True, exist_ok=True)
    files: dict[Path, Callable[[str], Any]] = {path: save}
    if config is not None:
        files[path.with_suffix(".yaml")] = lambda temporary: Path(temporary).write_text(
            config, encoding="utf-8"
        )
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        for target, write in files.items():
            write(os.path.join(folder, target.name))
        for target in files:
            os.replace(os.path.join(folder, target.name), target)
    return [str(target) for target in files]
