"""Half precision under CPU autocast: finite, identity at start, and no worse than the plain form."""

import pytest
import torch
from non_local_reference import plain_matrix
from torch import nn

from nonlocal_det.layers import PAIRWISE_FUNCTIONS, NonLocalBlock, evaluate_with

HALVES = [torch.float16, torch.bfloat16]
FORMS = [("gaussian", "matrix"), ("gaussian", "chunked"), ("embedded_gaussian", "matrix")]
FORMS += [("embedded_gaussian", "chunked"), ("dot_product", "matrix"), ("dot_product", "rearranged")]
FORMS += [("concatenation", "matrix"), ("concatenation", "sorted")]


def make_block(pairwise, channels=64, seed=0, **options):
    torch.manual_seed(seed)
    block = NonLocalBlock(channels, pairwise=pairwise, **options)
    nn.init.kaiming_normal_(block.w_z.weight)
    return block


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(("pairwise", "form"), FORMS)
@pytest.mark.parametrize("half_input", [False, True])
@pytest.mark.parametrize("scale", [False, True])
def test_large_inputs_stay_finite(pairwise, form, half, half_input, scale):
    block = make_block(pairwise, channels=1024, scale=scale)
    x = (torch.randn(1, 1024, 6, 8) + 9).to(half if half_input else torch.float32).requires_grad_()
    logits = torch.einsum("bcn,bcm->bnm", x.flatten(2).float(), x.flatten(2).float())
    assert logits.max() > torch.finfo(torch.float16).max  # the case is what its name says
    with torch.autocast("cpu", half), evaluate_with(form):
        z = block(x)
    assert z.isfinite().all()
    z.float().mean().backward()
    assert x.grad.isfinite().all()
    for name, p in block.named_parameters():
        assert p.grad.isfinite().all(), name


def test_a_dot_product_overflows_without_care():
    """The case above is not vacuous: y itself is beyond float16."""
    block = make_block("dot_product", channels=1024)
    x = torch.randn(1, 1024, 6, 8) + 9
    theta, phi, g = (layer(x).flatten(2) for layer in (block.theta, block.phi, block.g))
    assert plain_matrix("dot_product", theta, phi, g).abs().max() > torch.finfo(torch.float16).max


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("norm", ["", "BN", "GN", "LN"])
@pytest.mark.parametrize("pairwise", PAIRWISE_FUNCTIONS)
def test_identity_at_start_where_float16_overflows(pairwise, norm, half):
    torch.manual_seed(0)
    block = NonLocalBlock(1024, pairwise=pairwise, norm=norm)
    for x in (torch.randn(2, 1024, 3, 4) + 9, (torch.randn(2, 1024, 3, 4) + 9).to(half)):
        with torch.autocast("cpu", half):
            assert torch.equal(block(x), x.to(block(x).dtype))


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("pairwise", PAIRWISE_FUNCTIONS)
def test_a_block_in_half_precision_keeps_its_type(pairwise, half):
    block = make_block(pairwise).to(half)
    x = torch.randn(1, 64, 4, 6, dtype=half)
    assert block(x).dtype == half


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(("pairwise", "form"), FORMS)
def test_error_is_at_most_twice_the_plain_forms(pairwise, form, half):
    """Of the whole block, against float64, with the plain matrix form under the same autocast."""
    block = make_block(pairwise)
    x = torch.randn(2, 64, 12, 14, generator=torch.Generator().manual_seed(1))

    def plain(x):
        hat = nn.functional.max_pool2d(x, 2)
        theta, phi = (x, hat) if block.theta is None else (block.theta(x), block.phi(hat))
        w_f = None if block.w_f is None else block.w_f.weight
        name = "gaussian" if "gaussian" in pairwise else pairwise
        parts = (theta.flatten(2), phi.flatten(2), block.g(hat).flatten(2))
        y = plain_matrix(name, *parts, w_f, block.logit_scale)
        return block.w_z(y.reshape(2, -1, 12, 14)) + x

    def run(function, cast):
        leaf = x.detach().clone().to(next(block.parameters()).dtype).requires_grad_()
        block.zero_grad()
        with torch.autocast("cpu", half, enabled=cast), evaluate_with(form, chunk_bytes=10_000):
            z = function(leaf)
        z.square().mean().backward()
        return [z.detach().double(), leaf.grad.double(), *(p.grad.double() for p in block.parameters())]

    ours, theirs = run(block, True), run(plain, True)
    block.double()
    exact = run(plain, False)
    names = ["z", "x", *(name for name, _ in block.named_parameters())]
    for name, a, b, true in zip(names, ours, theirs, exact, strict=True):
        if name == "phi.bias" and "gaussian" in pairwise:
            continue  # its gradient is zero by algebra: there is nothing but rounding
        size = true.norm()
        error, plain_error = ((a - true).norm() / size).item(), ((b - true).norm() / size).item()
        assert error <= 2 * plain_error + torch.finfo(half).eps / 8, (name, error, plain_error)


@pytest.mark.parametrize("pairwise", PAIRWISE_FUNCTIONS)
def test_attention_is_not_rounded_to_half(pairwise):
    block = make_block(pairwise)
    x = torch.randn(1, 64, 6, 8)
    queries = torch.tensor([[0, 0], [5, 7]])
    exact = block.attention(x, queries)
    with torch.autocast("cpu", torch.bfloat16):
        weights = block.attention(x, queries)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, exact, rtol=0.1, atol=0.1 * exact.abs().max().item())
