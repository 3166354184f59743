"""Blocks alone: every source's block, in all its variants, against ours with the converted weights."""

import itertools

import pytest
import torch
from source_nets import STATISTICS, convolve, non_local, normalise, random_norm, random_tensor

FORMS = ("embedded_gaussian", "gaussian", "dot_product", "concatenation")
C, INNER = 64, 32  # res4 of the small net


class Block:
    """A block's tensors by the source's names, and its output.

    Args:
        names: our part -> the source's module.
        dims: axes of the maps.
        norm: "", "bn" or "gn" after W_z; the conv before it may lack its bias.
    """

    def __init__(self, generator, names, *, form, dims=2, norm="", out_bias=True, prefix="", inner=INNER):
        self.form, self.norm = form, norm
        parts = ["g", "out"] + ([] if form == "gaussian" else ["theta", "phi"])
        self.names = {part: prefix + names[part] for part in parts}
        self.tensors = {}
        for part, name in self.names.items():
            outputs, inputs = (C, inner) if part == "out" else (inner, C)
            self.tensors[f"{name}.weight"] = random_tensor(generator, outputs, inputs, *[1] * dims) * C**-0.5
            if part != "out" or out_bias:
                self.tensors[f"{name}.bias"] = 0.1 * random_tensor(generator, outputs)
        if form == "concatenation":
            self.project = prefix + names["project"] + ".weight"
            self.tensors[self.project] = random_tensor(generator, 1, 2 * inner, 1, 1) * inner**-0.5
        if norm:
            self.norm_name = prefix + names["norm"]
            leaves = STATISTICS if norm == "bn" else STATISTICS[:2]
            made = random_norm(generator, C, leaves)
            self.tensors |= {f"{self.norm_name}.{leaf}": value for leaf, value in made.items()}
            if norm == "bn":
                self.tensors[f"{self.norm_name}.num_batches_tracked"] = torch.tensor(7)

    def _conv(self, part):
        name = self.names.get(part)
        return lambda x: convolve(x, self.tensors[f"{name}.weight"], bias=self.tensors.get(f"{name}.bias"))

    def _out(self, y):
        y = self._conv("out")(y)
        if self.norm == "gn":
            groups = 32
            y = torch.nn.functional.group_norm(
                y, groups, *(self.tensors[f"{self.norm_name}.{leaf}"] for leaf in STATISTICS[:2])
            )
        elif self.norm:
            y = normalise(y, *(self.tensors[f"{self.norm_name}.{leaf}"] for leaf in STATISTICS))
        return y

    @torch.no_grad()
    def __call__(self, x, *, pool, scale):
        project = self.tensors[self.project] if self.form == "concatenation" else None
        theta, phi, g = (self._conv(part) for part in ("theta", "phi", "g"))
        return non_local(x, theta, phi, g, self._out, form=self.form, pool=pool, scale=scale, project=project)


def mmcv_names(pooled):
    return {
        "theta": "theta.conv",
        "phi": "phi.0.conv" if pooled else "phi.conv",
        "g": "g.0.conv" if pooled else "g.conv",
        "out": "conv_out.conv",
        "project": "concat_project.conv",
    }


@torch.no_grad()
def run(block, x):
    return block(x)


@pytest.mark.parametrize(
    ("form", "pooled", "norm"), [*itertools.product(FORMS, (False, True), ("", "bn", "gn"))]
)
def test_mmcv(convert, generator, assert_same, form, pooled, norm):
    # Its conv before a norm has no bias.
    names = mmcv_names(pooled) | {"norm": f"conv_out.{norm}"}
    source = Block(generator, names, form=form, norm=norm, out_bias=not norm)
    scale = form == "embedded_gaussian"
    made = convert(
        source.tensors,
        *("MODEL.NONLOCAL.PAIRWISE", "dot_product" if form == "dot_product" else "embedded_gaussian"),
        *("MODEL.NONLOCAL.NORM", "GN" if norm == "gn" else ""),  # the file does not say how many groups
    )
    node = made.cfg.MODEL.NONLOCAL
    assert (form, "embedding" if pooled else "none", norm.upper()) == (node.PAIRWISE, node.POOL, node.NORM)
    assert made.report.source == "mmdetection and mmcv's NonLocal2d"
    x = random_tensor(generator, 2, C, 7, 6)
    pool = "embedding" if pooled else "none"
    assert_same(run(made.block("res4.non_local_5"), x), source(x, pool=pool, scale=scale))


def test_mmcv_without_scale(convert, generator, assert_same):
    source = Block(generator, mmcv_names(False), form="embedded_gaussian")
    made = convert(source.tensors, "MODEL.NONLOCAL.SCALE", False)
    x = random_tensor(generator, 1, C, 5, 4)
    assert_same(run(made.block("res4.non_local_5"), x), source(x, pool="none", scale=False))
    assert any("SCALE" in note for note in made.report.notes)  # the file cannot tell


@pytest.mark.parametrize(("form", "pooled", "norm"), [*itertools.product(FORMS, (False, True), ("", "bn"))])
def test_non_local_pytorch(convert, generator, assert_same, form, pooled, norm):
    end = ".0" if pooled else ""
    names = {
        "theta": "theta",
        "phi": f"phi{end}",
        "g": f"g{end}",
        "out": "W.0" if norm else "W",
        "norm": "W.1",
    }
    source = Block(generator, names | {"project": "concat_project.0"}, form=form, norm=norm, prefix="nl_1.")
    made = convert(
        source.tensors,
        "MODEL.NONLOCAL.PAIRWISE",
        "dot_product" if form == "dot_product" else "embedded_gaussian",
    )
    node = made.cfg.MODEL.NONLOCAL
    assert (form, norm.upper()) == (node.PAIRWISE, node.NORM)
    assert made.report.source == "Non-local_pytorch"
    x = random_tensor(generator, 2, C, 7, 6)
    pool = "embedding" if pooled else "none"
    assert_same(run(made.block("res4.non_local_5"), x), source(x, pool=pool, scale=False))


@pytest.mark.parametrize(
    ("form", "pool", "norm"),
    [*itertools.product(("embedded_gaussian", "dot_product"), ("input", "none"), ("bn", "norm"))],
)
def test_slowfast(convert, generator, assert_same, form, pool, norm):
    # "bn" and "norm" are the older and the newer name of its batch norm.
    names = {"theta": "conv_theta", "phi": "conv_phi", "g": "conv_g", "out": "conv_out", "norm": norm}
    source = Block(generator, names, form=form, dims=3, norm="bn")
    made = convert(source.tensors, "MODEL.NONLOCAL.PAIRWISE", form, "MODEL.NONLOCAL.POOL", pool)
    assert made.cfg.MODEL.NONLOCAL.NORM == "BN"
    assert made.report.source == "SlowFast"
    x = random_tensor(generator, 2, C, 7, 6)
    clip = x[:, :, None].expand(-1, -1, 3, -1, -1)  # the same frame three times
    assert_same(run(made.block("res4.non_local_5"), x), source(clip, pool=pool, scale=True)[:, :, 1])


@pytest.mark.parametrize(
    ("norm", "kept"), [("SyncBN", "SyncBN"), ("naiveSyncBN", "naiveSyncBN"), ("GN", "BN")]
)
def test_the_configs_kind_of_batch_norm_is_kept(convert, generator, norm, kept):
    source = Block(generator, mmcv_names(False) | {"norm": "conv_out.bn"}, form="dot_product", norm="bn")
    assert kept == convert(source.tensors, "MODEL.NONLOCAL.NORM", norm).cfg.MODEL.NONLOCAL.NORM


@pytest.mark.parametrize("reduction", [1, 4])
def test_the_reduction_is_read_from_the_shapes(convert, generator, assert_same, reduction):
    source = Block(generator, mmcv_names(False), form="concatenation", inner=C // reduction)
    made = convert(source.tensors)
    assert reduction == made.cfg.MODEL.NONLOCAL.REDUCTION
    x = random_tensor(generator, 1, C, 5, 4)
    assert_same(run(made.block("res4.non_local_5"), x), source(x, pool="none", scale=False))


def test_safetensors_of_a_block(convert, generator, assert_same):
    pytest.importorskip("safetensors")
    source = Block(generator, mmcv_names(True), form="embedded_gaussian")
    made = convert(source.tensors, out="out.safetensors")
    x = random_tensor(generator, 1, C, 6, 6)
    assert_same(run(made.block("res4.non_local_5"), x), source(x, pool="embedding", scale=True))
