"""A ResNet that was exported to ONNX, by the shape of its graph: the names there mean nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nonlocal_det.checkpoint.convert.draft import Draft, Source
from nonlocal_det.checkpoint.report import CheckpointError

if TYPE_CHECKING:
    import onnx

# What Detectron2's batch norms add to the variance.
EPS = 1e-5


@dataclass
class _Conv:
    """A conv of the graph and the batch norm after it, if any."""

    node: onnx.NodeProto
    norm: onnx.NodeProto | None = None


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

    def trace(self, name: str) -> tuple[list[_Conv], onnx.NodeProto | None]:
        """Follow a tensor back: return the convs on the way, in order, and the node that they start at."""
        convs: list[_Conv] = []
        norm = None
        while (node := self.maker.get(name)) is not None:
            if node.op_type == "BatchNormalization":
                norm = node
            elif node.op_type == "Conv":
                convs.insert(0, _Conv(node, norm))
                norm = None
            elif node.op_type not in ("Relu", "Identity"):
                break
            name = node.input[0]
        return convs, node


def _prepare(
    tensors: dict[str, Any], rest: Mapping[str, Any], draft: Draft
) -> tuple[dict[str, Any], dict[str, str]]:
    graph = _Graph(rest["graph"])
    found: dict[str, Tensor] = {}
    origins: dict[str, str] = {}
    strides: set[bool] = set()
    stage, block = 2, -1
    start: onnx.NodeProto | None = None
    for node in graph.nodes:
        if node.op_type != "Add":
            continue
        (shortcut, root), (branch, other) = sorted(
            (graph.trace(name) for name in node.input), key=lambda traced: len(traced[0])
        )
        if root is None or root is not other or len(branch) not in (2, 3) or len(shortcut) > 1:
            continue
        if start is None:
            start = root
            _read_stem(graph, root, found, origins, draft)
        elif shortcut:
            stage, block = stage + 1, -1
        block += 1
        for number, conv in enumerate(branch, start=1):
            _read_conv(graph, conv, f"res{stage}.{block}.conv{number}", found, origins)
        for conv in shortcut:
            _read_conv(graph, conv, f"res{stage}.{block}.shortcut", found, origins)
        if len(branch) == 3:
            strides |= {
                conv is branch[0] for conv in branch if _attributes(conv.node).get("strides", [1])[0] > 1
            }
    if start is None:
        raise CheckpointError(
            "no residual block in the ONNX network: an Add of 2 or 3 convs and its own input"
        )
    if len(strides) > 1:
        raise CheckpointError(
            "the ONNX network has strides in 1x1 and in 3x3 convs; Detectron2 has one of the two"
        )
    draft.stride_in_1x1 = strides.pop() if strides else None
    for name in graph.consts.keys() - set(origins.values()):
        draft.skipped.setdefault(name, "not part of the ResNet")
    return found, origins


def _read_stem(
    graph: _Graph, pool: onnx.NodeProto, found: dict[str, Tensor], origins: dict[str, str], draft: Draft
) -> None:
    convs, _ = graph.trace(pool.input[0])
    if pool.op_type != "MaxPool" or len(convs) != 1:
        raise CheckpointError(
            "the ONNX network does not start with one conv and a max pool, as a ResNet's stem does"
        )
    _read_conv(graph, convs[0], "stem.conv1", found, origins)
    attributes = _attributes(pool)
    same_upper = attributes.get("auto_pad") == b"SAME_UPPER"
    draft.unpadded_pool = same_upper or not any(attributes.get("pads", [0])[:2])


def _read_conv(
    graph: _Graph, conv: _Conv, name: str, found: dict[str, Tensor], origins: dict[str, str]
) -> None:
    attributes = _attributes(conv.node)
    inputs = list(conv.node.input)
    weight = graph.consts.get(inputs[1])
    if weight is None:
        raise CheckpointError(
            f"the weight of the conv {conv.node.name} of the ONNX network is computed, not stored"
        )
    _check_padding(conv.node, weight, attributes)
    bias = graph.consts.get(inputs[2]) if len(inputs) > 2 else None
    made = {"weight": (weight, inputs[1])}
    if conv.norm is None:
        # The batch norm was multiplied into the conv before; ours then does nothing but add the bias.
        zeros = torch.zeros(weight.shape[0])
        made["norm.weight"] = zeros + 1, ""
        made["norm.bias"] = (bias, inputs[2]) if bias is not None else (zeros, "")
    else:
        parts = ("norm.weight", "norm.bias", "norm.running_mean", "norm.running_var")
        made |= {part: (graph.consts[key], key) for part, key in zip(parts, conv.norm.input[1:], strict=True)}
        variance, key = made["norm.running_var"]
        made["norm.running_var"] = variance + (_attributes(conv.norm).get("epsilon", EPS) - EPS), key
        if bias is not None:
            made["bias"] = bias, inputs[2]
    for part, (value, origin) in made.items():
        found[f"{name}.{part}"], origins[f"{name}.{part}"] = value, origin


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
    title="ONNX",
    marks=(r"(?!)",),  # known by its file, not by names
    rules={r".*": "{0}"},
    prepare=_prepare,
)
