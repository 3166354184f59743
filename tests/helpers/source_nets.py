"""The nets whose weights are converted, from their published descriptions, in plain PyTorch.

A net here is a function of (its tensors by the source's own names, input); nothing of ours is used.
"""

import pickle
import struct

import torch
import torch.nn.functional as F

BLOCKS = (3, 4, 6, 3)  # residual blocks of ResNet-50
WIDTH = 4  # channels of the 3x3 convs of res2; 256 / 64 = 16 of the real one
STEM = 8
STATISTICS = ("weight", "bias", "running_mean", "running_var")


def random_tensor(generator, *shape):
    return torch.randn(*shape, generator=generator)


def random_conv(generator, outputs, inputs, *kernel):
    """He-normal, so that activations keep their size through a net."""
    fan_in = inputs * torch.tensor(kernel).prod().item()
    return random_tensor(generator, outputs, inputs, *kernel) * (2 / fan_in) ** 0.5


def random_norm(generator, channels, leaves):
    """Values under the names (factor, summand, mean, variance); statistics are left out for two names."""
    made = [1 + 0.1 * random_tensor(generator, channels), 0.1 * random_tensor(generator, channels)]
    if len(leaves) > 2:
        made.append(0.1 * random_tensor(generator, channels))
        made.append(1 + 0.2 * torch.rand(channels, generator=generator))
    return dict(zip(leaves, made, strict=True))


def normalise(x, factor, summand, mean=None, variance=None, eps=1e-5):
    shape = (1, -1, *[1] * (x.dim() - 2))
    if mean is not None:
        x = (x - mean.view(shape)) / (variance.view(shape) + eps).sqrt()
    return x * factor.view(shape) + summand.view(shape)


def convolve(x, weight, stride=1, bias=None):
    """A 2-D or 3-D conv with "same" padding: zeros in space; in time the first and last frame, so that a
    still clip stays still at its ends too."""
    space = weight.shape[-1] // 2
    if weight.dim() == 4:
        return F.conv2d(x, weight, bias, stride, space)
    time = weight.shape[2] // 2
    if time:
        x = F.pad(x, (0, 0, 0, 0, time, time), mode="replicate")
    return F.conv3d(x, weight, bias, (1, stride, stride), (0, space, space))


def max_pool(x, size, stride, padding=0):
    if x.dim() == 4:
        return F.max_pool2d(x, size, stride, padding)
    return F.max_pool3d(x, (1, size, size), (1, stride, stride), (0, padding, padding))


def non_local(x, theta, phi, g, out, *, form, pool, scale, project=None):
    """Equations 1 to 6 of the paper with the matrix of all pairs; theta to out are functions of maps.

    ``pool`` is "input", "embedding" or "none"; ``scale`` divides the logits of the softmax forms.
    """
    halve = (lambda y: max_pool(y, 2, 2)) if pool != "none" else (lambda y: y)
    source = halve(x) if pool == "input" else x
    keys, values = (source if form == "gaussian" else phi(source)), g(source)
    if pool == "embedding":
        keys, values = halve(keys), halve(values)
    queries = (x if form == "gaussian" else theta(x)).flatten(2)
    keys, values = keys.flatten(2), values.flatten(2)
    if form == "concatenation":
        count, total = keys.shape[2], queries.shape[2]
        pairs = torch.cat(
            [queries[:, :, :, None].expand(-1, -1, -1, count), keys[:, :, None, :].expand(-1, -1, total, -1)],
            1,
        )
        weights = torch.einsum("c,bcqk->bqk", project.flatten(), pairs).relu() / count
    else:
        weights = torch.einsum("bcq,bck->bqk", queries, keys)
        if form == "dot_product":
            weights = weights / keys.shape[2]
        else:
            weights = (weights * queries.shape[1] ** -0.5 if scale else weights).softmax(2)
    y = torch.einsum("bqk,bck->bcq", weights, values).unflatten(2, x.shape[2:])
    return x + out(y)


class ResNetNames:
    """How a source names the tensors of a ResNet, and how its net differs from others.

    Args:
        stem, norm, conv, shortcut: names of a weight, or stem and name of a norm, with {stage}, {i}, {n}.
        leaves: names of a norm's factor, summand, mean and variance.
        stride_in_1x1: whether conv1 or conv2 of a stage's first block has its stride.
        pool_padding: of the stem's max pool.
        time: (kernel of the stem, kernel of conv1) in time; None for 2-D.
    """

    def __init__(self, *, stem, conv, shortcut, leaves, stride_in_1x1=False, pool_padding=1, time=None):
        self.stem, self.conv, self.shortcut, self.leaves = stem, conv, shortcut, leaves
        self.stride_in_1x1, self.pool_padding, self.time = stride_in_1x1, pool_padding, time

    def _all(self):
        """(weight, norm, outputs, inputs, kernel size, kernel in time, stride) in order, by place."""
        stem_time, conv_time = self.time or (None, None)
        yield "stem", (*self.stem, STEM, 3, 7, stem_time, 2)
        inputs = STEM
        for stage, count in enumerate(BLOCKS, start=2):
            middle = WIDTH * 2 ** (stage - 2)
            for i in range(count):
                stride = 2 if i == 0 and stage > 2 else 1
                strides = (stride, 1, 1) if self.stride_in_1x1 else (1, stride, 1)
                shapes = [(middle, inputs, 1), (middle, middle, 3), (4 * middle, middle, 1)]
                for n, ((outs, ins, size), step) in enumerate(zip(shapes, strides, strict=True), start=1):
                    time = conv_time if n == 1 else self.time and 1
                    yield (stage, i, n), (*self.named(self.conv, stage, i, n), outs, ins, size, time, step)
                if i == 0:
                    names = self.named(self.shortcut, stage, i, 0)
                    yield (stage, i, 0), (*names, 4 * middle, inputs, 1, self.time and 1, stride)
                inputs = 4 * middle

    @staticmethod
    def named(patterns, stage, i, n):
        fields = {"stage": stage, "layer": stage - 1, "i": i, "n": n, "abc": "_abc"[n]}
        return tuple(pattern.format(**fields) for pattern in patterns)

    def random(self, generator):
        """Tensors of a whole ResNet by the source's names."""
        tensors = {}
        for place, (weight, norm, outs, ins, size, time, _) in self._all():
            tensors[weight] = random_conv(generator, outs, ins, *([time] if time else []), size, size)
            if place[-1] == 3:  # a branch adds little, so that maps keep their size over 16 of them
                tensors[weight] *= 0.3
            for leaf, value in random_norm(generator, outs, self.leaves).items():
                tensors[norm.format(leaf=leaf)] = value
        return tensors

    @torch.no_grad()
    def forward(self, tensors, x, after=None, in_branch=None):
        """{"res2": ..., "res5": ...} of normalised images or clips.

        ``after`` is called with (stage, block, x) after every residual block, ``in_branch`` with (stage,
        block, branch) before its sum; both return the map that goes on.
        """
        layers = dict(self._all())

        def layer(place, x):
            weight, norm, _, _, _, _, stride = layers[place]
            x = convolve(x, tensors[weight], stride)
            return normalise(x, *(tensors[norm.format(leaf=leaf)] for leaf in self.leaves))

        x = max_pool(layer("stem", x).relu(), 3, 2, self.pool_padding)
        outputs = {}
        for stage, count in enumerate(BLOCKS, start=2):
            for i in range(count):
                branch = layer((stage, i, 3), layer((stage, i, 2), layer((stage, i, 1), x).relu()).relu())
                if in_branch is not None:
                    branch = in_branch(stage, i, branch)
                x = (branch + (layer((stage, i, 0), x) if i == 0 else x)).relu()
                if after is not None:
                    x = after(stage, i, x)
            outputs[f"res{stage}"] = x
        return outputs


TORCHVISION = ResNetNames(
    stem=("conv1.weight", "bn1.{leaf}"),
    conv=("layer{layer}.{i}.conv{n}.weight", "layer{layer}.{i}.bn{n}.{{leaf}}"),
    shortcut=("layer{layer}.{i}.downsample.0.weight", "layer{layer}.{i}.downsample.1.{{leaf}}"),
    leaves=STATISTICS,
)


MMACTION2 = ResNetNames(
    stem=("backbone.conv1.conv.weight", "backbone.conv1.bn.{leaf}"),
    conv=("backbone.layer{layer}.{i}.conv{n}.conv.weight", "backbone.layer{layer}.{i}.conv{n}.bn.{{leaf}}"),
    shortcut=(
        "backbone.layer{layer}.{i}.downsample.conv.weight",
        "backbone.layer{layer}.{i}.downsample.bn.{{leaf}}",
    ),
    leaves=STATISTICS,
    time=(5, 3),
)
SLOWFAST = ResNetNames(
    stem=("s1.pathway0_stem.conv.weight", "s1.pathway0_stem.bn.{leaf}"),
    conv=(
        "s{stage}.pathway0_res{i}.branch2.{abc}.weight",
        "s{stage}.pathway0_res{i}.branch2.{abc}_bn.{{leaf}}",
    ),
    shortcut=("s{stage}.pathway0_res{i}.branch1.weight", "s{stage}.pathway0_res{i}.branch1_bn.{{leaf}}"),
    leaves=STATISTICS,
    time=(5, 3),
)
CAFFE2_CONV = ("res{stage}_{i}_branch2{abc}_w", "res{stage}_{i}_branch2{abc}_bn_{{leaf}}")
CAFFE2_SHORTCUT = ("res{stage}_{i}_branch1_w", "res{stage}_{i}_branch1_bn_{{leaf}}")


def caffe2(**options):
    return ResNetNames(
        stem=("conv1_w", "res_conv1_bn_{leaf}"), conv=CAFFE2_CONV, shortcut=CAFFE2_SHORTCUT, **options
    )


AUTHORS = {"theta": "theta", "phi": "phi", "g": "g", "out": "out", "norm": "norm"}


def authors_block_name(stage, block, part):
    """nonlocal_conv4_5_theta_w, nonlocal_conv4_5_bn_riv and so on."""
    module, leaf = part.split(".")
    if module == "norm":
        end = "bn_" + dict(zip(STATISTICS, ("s", "b", "rm", "riv"), strict=True))[leaf]
    else:
        end = f"{module}_{leaf[0]}"
    return f"nonlocal_conv{stage}_{block}_{end}"


MMCV = {
    "theta": "theta.conv",
    "phi": "phi.conv",
    "g": "g.conv",
    "out": "conv_out.conv",
    "norm": "conv_out.bn",
}


def mmdetection(tensors, blocks=None, style="pytorch", heads=None):
    saved = {f"backbone.{name}": value for name, value in tensors.items()}
    for prefix, block in (blocks or {}).items():
        saved |= {f"backbone.{prefix}.{name}": value for name, value in block.items()}
    saved |= heads or {"bbox_head.fc_cls.weight": torch.ones(1)}
    return {"meta": {"config": f"model = dict(backbone=dict(style='{style}'))"}, "state_dict": saved}


def random_block(generator, channels, modules, *, dims, norm=True, out_bias=True):
    """Tensors of a block of C channels and C // 2 inside, by modules (theta, phi, g, out, norm)."""
    tensors = {}
    for part in ("theta", "phi", "g", "out"):
        outs, ins = (channels, channels // 2) if part == "out" else (channels // 2, channels)
        weight = random_tensor(generator, outs, ins, *[1] * dims)
        tensors[modules[part] + ".weight"] = 0.4 * weight * channels**-0.5
        if part != "out" or out_bias:
            tensors[modules[part] + ".bias"] = 0.1 * random_tensor(generator, outs)
    if norm:
        made = random_norm(generator, channels, STATISTICS)
        tensors |= {f"{modules['norm']}.{leaf}": value for leaf, value in made.items()}
    return tensors


def images(generator, size=64):
    return random_tensor(generator, 2, 3, size, size + 4)


@torch.no_grad()
def outputs(backbone, x):
    return backbone(x)


def check(assert_same, backbone, x, theirs):
    ours = outputs(backbone, x)
    for stage, expected in theirs.items():
        assert_same(ours[stage], expected[:, :, 1] if expected.dim() == 5 else expected)


def python_2_pickle(value):
    """What Python 2's cPickle writes at protocol 2: strings are byte strings, and so is an array's data."""

    def encode(item):
        if isinstance(item, dict):
            return b"}(" + b"".join(encode(key) + encode(inner) for key, inner in item.items()) + b"u"
        if isinstance(item, str):
            return b"U" + bytes([len(item)]) + item.encode("latin1")
        if isinstance(item, bytes):
            return b"T" + struct.pack("<i", len(item)) + item
        if isinstance(item, bool) or item is None:
            return {True: b"\x88", False: b"\x89", None: b"N"}[item]
        if isinstance(item, int):
            return b"J" + struct.pack("<i", item)
        if isinstance(item, float):
            return b"G" + struct.pack(">d", item)
        if isinstance(item, tuple):
            return b"(" + b"".join(map(encode, item)) + b"t"
        array = item.numpy()
        dtype = b"cnumpy\ndtype\n" + encode((array.dtype.str[1:], 0, 1)) + b"R"
        dtype += encode((3, "<", None, None, None, -1, -1, 0)) + b"b"
        made = (
            b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n" + encode((0,)) + encode("b") + b"tR"
        )
        return (
            made
            + b"("
            + encode(1)
            + encode(array.shape)
            + dtype
            + encode(False)
            + encode(array.tobytes())
            + b"tb"
        )

    data = b"\x80\x02" + encode(value) + b"."
    pickle.loads(data, encoding="latin1")  # it is a pickle
    return data
