"""A ResNet that was exported to ONNX, by the shape of its graph: the names there mean nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from nonlocal_det.convert.draft import EPS, NEUTRAL, Draft, Net, Prepared, Source, as_weight
from nonlocal_det.errors import CheckpointError

if TYPE_CHECKING:
    import onnx

#: Our name -> tensor and its name in the file; "" where the file has none.
_Parts = dict[str, tuple[Tensor, str]]


class _Conv(NamedTuple):
    node: onnx.NodeProto
    norm: onnx.NodeProto | None  # the batch norm after it


class _Path(NamedTuple):
    """What a tensor goes through: convs, from a node (None where that is not a ResNet's) on."""

    convs: list[_Conv]
    root: onnx.NodeProto | None
    relus: list[bool]  # whether there is one before the first conv, and after each


class _Graph:
    def __init__(self, graph: onnx.GraphProto) -> None:
        from onnx import numpy_helper

        self.nodes = list(graph.node)
        self.maker = {output: node for node in graph.node for output in node.output}
        self.consts = {
            tensor.name: torch.from_numpy(numpy_helper.to_array(tensor).copy())
            for tensor in graph.initializer
        }
        for node in graph.node:
            if node.op_type == "Constant" and (value := _attributes(node).get("value")) is not None:
                self.consts[node.output[0]] = torch.from_numpy(numpy_helper.to_array(value).copy())

    def trace(self, name: str) -> _Path:
        """Follow a tensor back through convs, their norms and ReLUs."""
        convs: list[_Conv] = []
        relus: list[bool] = []
        norm, relu = None, False
        while (node := self.maker.get(name)) is not None:
            if node.op_type == "BatchNormalization" and norm is None:
                norm = node
            elif node.op_type == "Conv":
                convs.insert(0, _Conv(node, norm))
                relus.insert(0, relu)
                norm, relu = None, False
            elif node.op_type == "Relu" and norm is None:
                relu = True
            elif node.op_type != "Identity":
                break
            name = node.input[0]
        # A norm that does not follow a conv is no ResNet's.
        return _Path(convs, None if norm is not None else node, [relu, *relus])

    def weight(self, name: str) -> tuple[Tensor, str]:
        """Return a stored tensor and its name."""
        while (node := self.maker.get(name)) is not None and node.op_type == "Identity":
            name = node.input[0]
        value = as_weight(name, self.consts[name]) if name in self.consts else None
        if value is None:
            raise CheckpointError(f"the weight {name} of the ONNX network is computed, not stored")
        return value, name


def _prepare(tensors: dict[str, Any], rest: Mapping[str, Any], draft: Draft) -> Prepared:
    graph = _Graph(rest["graph"])
    parts: _Parts = {}
    strides: set[bool] = set()
    stage, block = 2, -1
    for node in graph.nodes:
        if node.op_type != "Add":
            continue
        short, long = sorted(map(graph.trace, node.input), key=lambda path: len(path.convs))
        shortcut, branch, root = short.convs, long.convs, short.root
        if root is None or root is not long.root or len(branch) not in (2, 3) or len(shortcut) > 1:
            continue
        _check_relus(node, short, long)
        if not parts:
            parts |= _read_stem(graph, root, draft)
        elif shortcut:
            stage, block = stage + 1, -1
        block += 1
        name = f"res{stage}.{block}"
        for number, conv in enumerate(branch, start=1):
            parts |= _read_conv(graph, conv, f"{name}.conv{number}")
        for conv in shortcut:
            parts |= _read_conv(graph, conv, f"{name}.shortcut")
        steps = [max(_attributes(conv.node).get("strides", [1])) for conv in branch]
        if math.prod(steps) != (2 if block == 0 and stage > 2 else 1):
            raise CheckpointError(
                f"{name} of the ONNX network has strides {steps}; a ResNet's first block of each "
                "stage but res2 halves the map, and no other does"
            )
        if len(branch) == 3 and max(steps) > 1:
            strides.add(steps[0] > 1)
    if not parts:
        raise CheckpointError(
            "no residual block in the ONNX network: an Add of 2 or 3 convs and its own input"
        )
    if len(strides) > 1:
        raise CheckpointError(
            "the ONNX network has strides in 1x1 and in 3x3 convs; Detectron2 has one of the two"
        )
    draft.know(stride_in_1x1=strides.pop() if strides else None)
    origins = {name: origin for name, (_, origin) in parts.items()}
    used = set(origins.values())
    draft.skipped.update({name: "not part of the ResNet" for name in graph.consts if name not in used})
    return {name: value for name, (value, _) in parts.items()}, origins


def _check_relus(node: onnx.NodeProto, short: _Path, long: _Path) -> None:
    first = long.relus[0]
    if (
        not (first or long.root.op_type == "MaxPool")
        or long.relus != [first, *[True] * (len(long.convs) - 1), False]
        or short.relus != [first, *[False] * len(short.convs)]
    ):
        raise CheckpointError(
            f"the block of the ONNX network that ends in {node.name or node.output[0]} has its ReLUs not "
            "where a ResNet has them: after every conv but the last of the branch, and after the sum"
        )


def _read_stem(graph: _Graph, pool: onnx.NodeProto, draft: Draft) -> _Parts:
    convs = graph.trace(pool.input[0]).convs if pool.op_type == "MaxPool" else []
    if len(convs) != 1:
        raise CheckpointError(
            "the ONNX network does not start with one conv and a max pool, as a ResNet's stem does"
        )
    attributes = _attributes(pool)
    same_upper = attributes.get("auto_pad") == b"SAME_UPPER"
    draft.know(unpadded_pool=same_upper or not any(attributes.get("pads", [0])[:2]))
    return _read_conv(graph, convs[0], "stem.conv1")


def _read_conv(graph: _Graph, conv: _Conv, name: str) -> _Parts:
    inputs = list(conv.node.input)
    weight, origin = graph.weight(inputs[1])
    _check_padding(conv.node, weight, _attributes(conv.node))
    made = {"weight": (weight, origin)}
    bias = graph.weight(inputs[2]) if len(inputs) > 2 and inputs[2] else None
    if conv.norm is None:
        # The batch norm was multiplied into the conv before; ours then does nothing but add the bias.
        zeros = torch.zeros(weight.shape[0])
        made["norm.weight"] = zeros + 1, ""
        made["norm.bias"] = bias or (zeros, "")
        made |= {f"norm.{leaf}": (zeros + value, "") for leaf, value in NEUTRAL.items()}
    else:
        leaves = ("norm.weight", "norm.bias", "norm.running_mean", "norm.running_var")
        made |= {leaf: graph.weight(key) for leaf, key in zip(leaves, conv.norm.input[1:], strict=True)}
        variance, key = made["norm.running_var"]
        made["norm.running_var"] = variance + (_attributes(conv.norm).get("epsilon", EPS) - EPS), key
        if bias is not None:
            made["bias"] = bias
    return {f"{name}.{leaf}": part for leaf, part in made.items()}


def _check_padding(node: onnx.NodeProto, weight: Tensor, attributes: Mapping[str, Any]) -> None:
    size = weight.shape[-1]
    strided = max(attributes.get("strides", [1])) > 1
    pads = list(attributes.get("pads", [0] * 4))
    if attributes.get("auto_pad", b"NOTSET") in (b"SAME_UPPER", b"SAME_LOWER") and not strided:
        pads = [(size - 1) // 2] * 4
    if set(pads) != {(size - 1) // 2} or max(attributes.get("dilations", [1])) > 1:
        raise CheckpointError(
            f"the conv {node.name} of the ONNX network pads or dilates otherwise than Detectron2's does, "
            f"which pads {size}x{size} by {(size - 1) // 2} on every side"
        )


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    from onnx.helper import get_attribute_value

    return {attribute.name: get_attribute_value(attribute) for attribute in node.attribute}


ONNX = Source(
    name="onnx",
    net=Net(norm="BN"),
    prepare=_prepare,
)
