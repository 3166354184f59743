"""Reading weight files of any origin without running code that is in them.

Pickles, which PyTorch's and Caffe2's files are made of, name functions to call while they are loaded. Here
they get arrays, tensors and plain containers; a file that names anything else is refused.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import pickletools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch

from nonlocal_det.errors import CheckpointError

if TYPE_CHECKING:
    import onnx

_ZIP = b"PK\x03\x04"
# How files of torch.save began before PyTorch 1.6: a pickled magic number.
_LEGACY_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
# Kinds of number an array may hold: bool, integers, floats. Not objects, which are pointers.
_DTYPE = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248])")


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a weight file; nothing in it is run.

    What kind of file it is is told by its content: files of ``torch.save`` (zip and older), pickles of arrays
    (Detectron2's ``.pkl``, Caffe2's and Python 2's included) and safetensors.

    Returns:
        What the file holds, by name: tensors from PyTorch's and safetensors files, arrays from pickles,
        numbers, strings and containers of these.

    Raises:
        CheckpointError: the file names something that would run when it is loaded (the message says what),
            is damaged, is of no known kind, or does not hold a dict.
        OSError: the file cannot be opened.
    """
    path = Path(path)
    with open(path, "rb") as file:
        head = file.read(16)
    if not head:
        raise CheckpointError(f"weights {path}: an empty file; was it copied or downloaded to the end?")
    if head.startswith((_ZIP, _LEGACY_TORCH)):
        content = _read_torch(path)
    elif path.suffix == ".safetensors" or head[8:9] == b"{":
        content = _read_safetensors(path)
    elif path.suffix == ".onnx":
        raise CheckpointError(
            f"weights {path}: an ONNX network, not a checkpoint; "
            "convert it by python -m nonlocal_det.tools.convert_checkpoint"
        )
    else:
        content = _read_pickle(path)
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"weights {path}: it holds a {type(content).__name__}, not weights by name; save the state_dict()"
        )
    return dict(content)


def read_onnx(path: str | os.PathLike[str]) -> onnx.ModelProto:
    """Read an ONNX network. Weights that it keeps in other files are refused, as it could name any.

    Raises:
        CheckpointError: the onnx package is missing, the file is no ONNX network, or its weights are in
            another file.
        OSError: the file cannot be opened.
    """
    try:
        import onnx
    except ImportError:
        raise _lacking(path, "onnx") from None
    data = Path(path).read_bytes()
    try:
        model = onnx.load_model_from_string(data)
    except Exception as error:  # protobuf has its own DecodeError, in more than one place
        raise _damaged(path, error) from None
    if not model.graph.node:
        raise CheckpointError(f"weights {path}: no ONNX network; the file has no nodes")
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            raise CheckpointError(
                f"weights {path}: {tensor.name} is kept in another file; save the network as one file"
            )
    return model


def _read_torch(path: Path) -> Any:
    try:
        with _numpy_stand_ins():
            content = torch.load(path, map_location="cpu", weights_only=True)
        return _plain(content, set())
    except Exception as error:
        # "Unsupported global: GLOBAL os.system ..." or "Unsupported class os.system", by version.
        found = re.search(r"(?:GLOBAL|[Cc]lass|function|instantiate) `?([\w.]+\.[\w.]+)", str(error))
        if found and isinstance(error, pickle.UnpicklingError):
            raise _refused(path, found[1]) from None
        raise _damaged(path, error) from None


def _numpy_stand_ins() -> contextlib.AbstractContextManager[Any]:
    """Let ``torch.load`` read numpy's numbers, kept beside weights, as pickles are read."""
    allowed: list[Any] = [_Array, _Number, _DType]
    for package in ("numpy.core", "numpy._core"):  # before and from numpy 2
        for name, function in _globals().items():
            if name.startswith("numpy."):
                # PyTorch knows what it may call by the name that it has.
                module, _, function.__name__ = name.replace("numpy.core", package).rpartition(".")
                function.__module__, function.__qualname__ = module, function.__name__
                allowed.append(function)
    return torch.serialization.safe_globals(allowed)


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise _lacking(path, "safetensors") from None
    try:
        return load_file(path)
    except OSError:
        raise
    except Exception as error:  # SafetensorError, and KeyError for a type that PyTorch lacks
        raise _damaged(path, error) from None


def _read_pickle(path: Path) -> Any:
    with open(path, "rb") as file:
        try:
            _check_memo(file)
            file.seek(0)
            # latin1 takes Python 2's byte strings, which arrays are kept in, as they are.
            return _plain(_ArrayUnpickler(file, encoding="latin1").load(), set())
        except _Refused as refused:
            raise _refused(path, str(refused)) from None
        except Exception as error:
            # A pickle machine fed with something else raises nearly every type.
            raise _damaged(path, error) from None


def _check_memo(file: BinaryIO) -> None:
    """Refuse a place in the memo that no pickle of this length can have: room for it would be made."""
    for operation, argument, position in pickletools.genops(file):
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and argument > position:
            raise ValueError(f"a memo of {argument} places in {position} bytes")


class _Refused(Exception):  # noqa: N818
    """The argument is the global that a pickle asked for."""


class _ArrayUnpickler(pickle.Unpickler):
    """Makes stand-ins of what a pickle says of arrays; numpy's own loaders trust what they are told.

    The functions are made anew for every file, so that no file can change them for the next.
    """

    def find_class(self, module: str, name: str) -> Any:
        place = module.replace("numpy._core", "numpy.core").replace("__builtin__", "builtins")
        try:
            return _globals()[f"{place}.{name}"]
        except KeyError:
            raise _Refused(f"{module}.{name}") from None

    def persistent_load(self, pid: Any) -> Any:
        raise _Refused("an object outside of the file")


def _globals() -> dict[str, Any]:
    return {
        "numpy.core.multiarray._reconstruct": lambda *_: _Array(),
        "numpy.core.numeric._frombuffer": lambda data, kind, shape, order: _Array(
            shape, kind, order == "F", data
        ),
        "numpy.core.multiarray.scalar": lambda dtype, data: _Number((), dtype, False, data),
        "numpy.ndarray": lambda *_: _Array(),  # the first argument of _reconstruct
        "numpy.dtype": lambda kind, *_: _DType(kind),
        "collections.OrderedDict": lambda pairs=(): dict(pairs),
        "builtins.set": lambda items=(): list(items),
        "_codecs.encode": _encode,  # bytes in protocols before 3
        "builtins.bytearray": lambda text="", encoding="latin1": _encode(text, encoding),
        "builtins.bytes": lambda text="", encoding="latin1": _encode(text, encoding),
    }


def _encode(text: str | bytes, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"bytes in {encoding!r}")
    return text.encode("latin1") if isinstance(text, str) else bytes(text)


class _DType:
    def __init__(self, kind: str) -> None:
        self.kind, self.order = kind, "="

    def __setstate__(self, state: tuple) -> None:
        self.order = state[1]

    def dtype(self) -> np.dtype:
        text = str(self.order) + str(self.kind).lstrip("<>|=")
        if not _DTYPE.fullmatch(text):
            raise ValueError(f"an array of type {self.kind!r}; weights are numbers")
        return np.dtype(text)


class _Array:
    """An array as a pickle describes it: shape, type, order, bytes."""

    def __init__(self, *state: Any) -> None:
        self.state = state

    def __setstate__(self, state: tuple) -> None:
        self.state = state[-4:]  # newer pickles have a version before it

    def array(self) -> np.ndarray:
        shape, dtype, fortran, data = self.state
        known = isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape)
        if not (known and isinstance(dtype, _DType)):
            raise ValueError("an array without type or shape")
        if not isinstance(data, (bytes, bytearray, str)):
            raise ValueError("an array of objects; weights are numbers")
        data = data.encode("latin1") if isinstance(data, str) else bytes(data)
        kind = dtype.dtype()
        if math.prod(shape) * kind.itemsize != len(data):
            raise ValueError(f"an array of shape {shape} with {len(data)} bytes")
        array = np.frombuffer(data, kind).reshape(shape, order="F" if fortran else "C")
        return array.astype(kind.newbyteorder("="))  # a copy in this machine's order, which may be written to


class _Number(_Array):
    def array(self) -> float:
        return super().array().item()


def _plain(value: Any, seen: set[int]) -> Any:
    """Put arrays in the place of the stand-ins, inside containers too."""
    if isinstance(value, _Array):
        return value.array()
    if isinstance(value, tuple):
        return tuple(_plain(item, seen) for item in value)
    if isinstance(value, (dict, list)) and id(value) not in seen:
        seen.add(id(value))
        # An instance may have an attribute of its own under the name of a method.
        for key, item in list(dict.items(value) if isinstance(value, dict) else enumerate(value)):
            value[key] = _plain(item, seen)
    elif isinstance(value, _DType) or callable(value):
        raise ValueError("something that is not data")
    return value


def _lacking(path: str | os.PathLike[str], package: str) -> CheckpointError:
    return CheckpointError(
        f"weights {path}: reading it needs the {package} package; run pip install {package}"
    )


def _refused(path: str | os.PathLike[str], name: str) -> CheckpointError:
    name = _one_line(name)
    return CheckpointError(
        f"weights {path}: refused, as loading it would call {name}; weights are tensors in plain containers: "
        "if you trust the file, save the model's state_dict() alone with the program that made it"
    )


def _damaged(path: str | os.PathLike[str], error: Exception) -> CheckpointError:
    # Some explain themselves at length: the first sentence tells what failed.
    first = str(error).strip().partition("\n")[0].partition(". ")[0]
    what = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return CheckpointError(
        f"weights {path}: not a checkpoint, or damaged ({_one_line(what)}); "
        "give a .pth of PyTorch's, a .pkl of Detectron2's or Caffe2's, or a .safetensors file"
    )


def _one_line(text: str) -> str:
    """Return text that came out of a file so that it can be shown."""
    return "".join(char if char.isprintable() else "?" for char in text)[:200]
