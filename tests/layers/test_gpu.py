"""The forms on a CUDA device: parity with float64 on the CPU, memory, and the measured choice."""

import pytest
import torch
from non_local_reference import plain_matrix
from torch import nn

from nonlocal_det.layers import (
    FORMS,
    NonLocalBlock,
    concatenation,
    dot_product,
    evaluate_with,
    gaussian,
    settle_kernels,
)
from nonlocal_det.layers.forms import GaussianCase, settled_form

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Largest error relative to the largest exact value, of y and of the gradients.
TOLERANCE = {"fp32": 1e-4, "tf32": 1e-2, "fp16": 2e-2, "bf16": 1e-1}
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FUNCTIONS_AND_FORMS = [(name, form) for name, forms in FORMS.items() for form in forms]


@pytest.fixture(autouse=True)
def _restore_tf32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def evaluate(name, theta, phi, g, w_f):
    if name == "gaussian":
        return gaussian(theta, phi, g, theta.shape[1] ** -0.5)
    return dot_product(theta, phi, g) if name == "dot_product" else concatenation(theta, phi, g, w_f)


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize(("name", "form"), [*FUNCTIONS_AND_FORMS, *((name, None) for name in FORMS)])
def test_parity_with_float64(name, form, precision):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 64, 1500), (2, 64, 700), (2, 64, 700), (1, 128))
    inputs = [torch.randn(s, generator=generator) * 0.5 for s in shapes]
    direction = torch.randn(2, 64, 1500, generator=generator)
    # Rounded first: a type is not to blame for what its inputs cannot say.
    inputs = [t.to(DTYPES[precision]) for t in inputs]
    exact_inputs = [t.double().requires_grad_() for t in inputs]
    used = 4 if name == "concatenation" else 3
    y = plain_matrix(name, *exact_inputs, scale=64**-0.5)
    exact = [y, *torch.autograd.grad(y, exact_inputs[:used], direction.double())]

    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    inputs = [t.cuda().requires_grad_() for t in inputs]
    with evaluate_with(form, chunk_bytes=1_000_000, keep=0.0):
        y = evaluate(name, *inputs)
    actual = [y, *torch.autograd.grad(y, inputs[:used], direction.cuda().to(y.dtype))]
    for value, true in zip(actual, exact, strict=True):
        error = (value.double().cpu() - true).abs().max() / true.abs().max()
        assert error <= TOLERANCE[precision]


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pairwise", ["gaussian", "embedded_gaussian", "dot_product", "concatenation"])
def test_large_inputs_stay_finite_under_autocast(pairwise, half):
    torch.manual_seed(0)
    block = NonLocalBlock(1024, pairwise=pairwise, scale=False)
    nn.init.kaiming_normal_(block.w_z.weight)
    block.cuda()
    x = (torch.randn(1, 1024, 12, 16, device="cuda") + 9).requires_grad_()
    with torch.autocast("cuda", half):
        z = block(x)
    z.float().mean().backward()
    assert z.isfinite().all()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in block.parameters())


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("pairwise", ["gaussian", "embedded_gaussian", "dot_product", "concatenation"])
def test_res3_without_pooling_needs_no_matrix(pairwise, precision):
    """1x512x100x168: a matrix of 16800 x 16800 takes 1,077 MiB in float32; the plain form has three."""
    block = NonLocalBlock(512, pairwise=pairwise, pool="none").cuda()
    x = torch.randn(1, 512, 100, 168, device="cuda", requires_grad=True)

    def step():
        with torch.autocast("cuda", DTYPES[precision], enabled=precision != "fp32"):
            z = block(x)
        z.float().sum().backward()

    step()  # the first call measures, and loads libraries
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    assert torch.cuda.max_memory_allocated() - before < 1000 * 2**20


@pytest.mark.parametrize("pairwise", ["gaussian", "embedded_gaussian", "dot_product", "concatenation"])
def test_block_equals_the_cpu(pairwise):
    torch.manual_seed(0)
    block = NonLocalBlock(64, pairwise=pairwise).double()
    nn.init.kaiming_normal_(block.w_z.weight)
    x = torch.randn(2, 64, 31, 45, dtype=torch.float64)
    expected = block(x)
    torch.testing.assert_close(block.cuda()(x.cuda()).cpu(), expected)


@pytest.mark.parametrize(("pairwise", "compared"), [("gaussian", 66), ("embedded_gaussian", 33)])
def test_kernels_are_settled_before_a_forward_pass(pairwise, compared):
    block = NonLocalBlock(66, pairwise=pairwise, pool="none").cuda()
    settle_kernels(nn.Sequential(block), torch.float16)

    def measure(*_):
        pytest.fail("measured again")

    for dtype in (torch.float32, torch.float16):
        case = GaussianCase("cuda", dtype, compared, 33)
        assert settled_form(case, measure) in ("fused", "chunked")
