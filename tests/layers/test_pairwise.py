"""Every exact form of Eq. 1 against loops, and what the forms promise: memory, numerics, determinism."""

import math

import pytest
import torch
from non_local_reference import naive_pairwise, plain_matrix
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nonlocal_det.layers import (
    FORMS,
    concatenation,
    dot_product,
    evaluate_with,
    gaussian,
)

FUNCTIONS_AND_FORMS = [(name, form) for name, forms in FORMS.items() for form in forms]
BOUNDED = [("gaussian", "chunked"), ("dot_product", "rearranged"), ("concatenation", "sorted")]


def evaluate(name, theta, phi, g, w_f, scale=1.0):
    if name == "gaussian":
        return gaussian(theta, phi, g, scale)
    if name == "dot_product":
        return dot_product(theta, phi, g)
    return concatenation(theta, phi, g, w_f)


def make_inputs(queries, keys, compared=4, values=4, batch=1, dtype=torch.float64, seed=0, device="cpu"):
    """theta, phi, g, w_f with gradients."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, compared, queries), (batch, compared, keys), (batch, values, keys), (1, 2 * compared))
    drawn = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return [t.to(device, dtype).requires_grad_() for t in drawn]


def used(name, inputs):
    """The inputs that a function has."""
    return inputs if name == "concatenation" else inputs[:3]


def value_and_gradients(function, name, inputs, direction):
    y = function(name, *inputs)
    return [y.detach(), *torch.autograd.grad(y, used(name, inputs), direction.to(y.dtype))]


def direction_like(inputs, seed=9):
    generator = torch.Generator().manual_seed(seed)
    shape = (inputs[2].shape[0], inputs[2].shape[1], inputs[0].shape[2])
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(inputs[2].device)


def naive(name, theta, phi, g, w_f, scale=1.0):
    samples = zip(theta, phi, g, strict=True)
    return torch.stack([naive_pairwise(name, t.T, p.T, v.T, w_f, scale).T for t, p, v in samples])


@pytest.mark.parametrize(("name", "form"), FUNCTIONS_AND_FORMS)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (7, 3), (3, 8)])
def test_every_form_equals_the_loops(name, form, queries, keys):
    inputs = make_inputs(queries, keys, batch=2)
    direction = direction_like(inputs)
    with evaluate_with(form):
        actual = value_and_gradients(evaluate, name, inputs, direction)
    for value, wanted in zip(actual, value_and_gradients(naive, name, inputs, direction), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("name", "form"), BOUNDED)
@pytest.mark.parametrize("chunk_bytes", [1, 100_000, 10_000_000])
@pytest.mark.parametrize("keep", [0.0, 1.0, 1000.0])
@pytest.mark.parametrize("batch", [1, 3])
def test_chunks_do_not_change_the_result(name, form, chunk_bytes, keep, batch):
    inputs = make_inputs(301, 130, compared=13, values=15, batch=batch)
    direction = direction_like(inputs)
    with evaluate_with(form, chunk_bytes=chunk_bytes, keep=keep):
        actual = value_and_gradients(evaluate, name, inputs, direction)
    expected = value_and_gradients(plain_matrix, name, inputs, direction)
    for value, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("name", "form"), FUNCTIONS_AND_FORMS)
def test_numerical_gradients(name, form):
    inputs = make_inputs(5, 4, compared=3, values=3, batch=2)
    with evaluate_with(form):
        assert torch.autograd.gradcheck(lambda *t: evaluate(name, *t), inputs)


@pytest.mark.parametrize(("name", "form"), FUNCTIONS_AND_FORMS)
@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_inputs_without_gradient(name, form, frozen):
    inputs = make_inputs(6, 5)
    live = [t for i, t in enumerate(used(name, inputs)) if i != frozen]
    direction = direction_like(inputs)
    expected = torch.autograd.grad(plain_matrix(name, *inputs), live, direction)
    inputs[frozen] = inputs[frozen].detach()
    with evaluate_with(form):
        actual = torch.autograd.grad(evaluate(name, *inputs), live, direction)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(("name", "form"), [("gaussian", "chunked"), ("concatenation", "sorted")])
def test_second_derivative_is_refused(name, form):
    inputs = make_inputs(4, 3)
    with evaluate_with(form):
        (first,) = torch.autograd.grad(evaluate(name, *inputs).square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


class LargestTensor(TorchDispatchMode):
    """Records the element count of the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        # A view, such as an expanded index, takes no memory of its own.
        owned = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        sizes = [t.untyped_storage().nbytes() // t.element_size() for t in owned]
        self.elements = max([self.elements, *sizes])
        return result


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("backward", [False, True])
def test_the_matrix_is_not_built_above_the_budget(name, backward):
    queries, keys = 3000, 1500
    inputs = make_inputs(queries, keys, compared=8, values=8, dtype=torch.float32)
    with LargestTensor() as largest, torch.set_grad_enabled(backward):
        y = evaluate(name, *inputs)
        if backward:
            y.backward(torch.ones_like(y))
    assert largest.elements <= 8 * 2**20 / 4 < queries * keys
    with evaluate_with("matrix"), LargestTensor() as largest:
        evaluate(name, *inputs)
    assert largest.elements >= queries * keys  # the measure sees a matrix where there is one


@pytest.mark.parametrize("name", FORMS)
def test_small_maps_use_the_matrix(name):
    inputs = make_inputs(20, 10, compared=64, values=64)
    with LargestTensor() as free:
        actual = evaluate(name, *inputs)
    with evaluate_with("matrix"), LargestTensor() as forced:
        expected = evaluate(name, *inputs)
    assert torch.equal(actual, expected)
    assert free.elements == forced.elements


@pytest.mark.parametrize(("name", "form"), BOUNDED)
def test_same_bits_every_time(name, form):
    inputs = make_inputs(400, 300, compared=16, values=16, dtype=torch.float32)
    direction = direction_like(inputs)
    with evaluate_with(form, chunk_bytes=100_000):
        first, second = (value_and_gradients(evaluate, name, inputs, direction) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def errors(function, name, inputs, direction, exact):
    """Largest error of y and of each gradient, relative to the largest exact value if that is not 0."""
    values = value_and_gradients(function, name, inputs, direction)
    return [
        ((value.double() - true).abs().max() / (true.abs().max() if true.any() else 1)).item()
        for value, true in zip(values, exact, strict=True)
    ]


@pytest.mark.parametrize(("name", "form"), BOUNDED)
@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
def test_error_is_that_of_the_matrix_form(name, form, spread):
    inputs = make_inputs(900, 500, compared=32, values=32, batch=2)
    with torch.no_grad():
        for t in inputs[:2]:
            t.mul_(spread)
    direction = direction_like(inputs)
    exact = value_and_gradients(plain_matrix, name, inputs, direction)
    inputs = [t.detach().float().requires_grad_() for t in inputs]
    with evaluate_with(form, chunk_bytes=500_000):
        ours = errors(evaluate, name, inputs, direction, exact)
    plain = errors(plain_matrix, name, inputs, direction, exact)
    # eps: rounding of the inputs and of the result, which both forms share.
    assert all(a <= 2 * b + 2 * torch.finfo(torch.float32).eps for a, b in zip(ours, plain, strict=True))


class TestConcatenation:
    """a_i and b_j are given directly: with one channel and w_f = [1, 1], a = theta and b = phi."""

    w_f = torch.ones(1, 2)

    def compare(self, a, b, dtype=torch.float64, tolerance=1e-12):
        generator = torch.Generator().manual_seed(3)
        g = torch.randn(1, 6, b.numel(), generator=generator, dtype=torch.float64)
        inputs = [a.view(1, 1, -1), b.view(1, 1, -1), g, self.w_f]
        inputs = [t.to(torch.float64).requires_grad_() for t in inputs]
        direction = direction_like(inputs)
        exact = value_and_gradients(plain_matrix, "concatenation", inputs, direction)
        inputs = [t.detach().to(dtype).requires_grad_() for t in inputs]
        with evaluate_with("sorted"):
            error = errors(evaluate, "concatenation", inputs, direction, exact)
        plain = errors(plain_matrix, "concatenation", inputs, direction, exact)
        assert all(e <= max(tolerance, 2 * p) for e, p in zip(error, plain, strict=True)), (error, plain)

    def test_ties_are_off(self):
        values = torch.arange(-4.0, 5.0) / 2
        a, b = values.repeat(3), -values.repeat(2)  # every a_i has b_j = -a_i
        self.compare(a, b)
        self.compare(a, b, torch.float32, 1e-6)

    def test_ties_far_from_zero(self):
        values = 1000 + torch.arange(-4.0, 5.0) / 8
        self.compare(values.repeat(3), -values.repeat(2), torch.float32, 1e-6)

    @pytest.mark.parametrize("a_value", [-1.0, 0.0, 1.0])
    def test_thousands_of_equal_values(self, a_value):
        # The gradient of w_f adds 3000 equal numbers, whose rounding errors do not cancel.
        self.compare(torch.full((3000,), a_value), torch.full((2000,), 0.5), torch.float32, 5e-6)
        self.compare(torch.full((3000,), a_value), torch.full((2000,), -a_value), torch.float32, 5e-6)

    @pytest.mark.parametrize("offset", [0, 10, 100, 1000])
    def test_opposite_offsets(self, offset):
        generator = torch.Generator().manual_seed(4)
        # Multiples of 2^-10 are exact in float32 at every offset, so that only the sums can lose digits.
        a, b = (torch.randint(-3000, 3000, (n,), generator=generator) / 1024 for n in (2000, 1500))
        self.compare(a + offset, b - offset, torch.float32, 5e-7)
        self.compare(a - offset, b + offset, torch.float32, 5e-7)

    def test_all_off_and_all_on(self):
        b = torch.linspace(-1, 1, 50)
        with evaluate_with("sorted"):
            g = torch.ones(1, 2, 50)
            off = concatenation(torch.full((1, 1, 9), -1.0), b.view(1, 1, -1), g, self.w_f)
            assert not off.any()
        self.compare(torch.full((9,), 2.0), b)

    def test_not_finite_input_is_seen(self):
        a, b, g = torch.zeros(1, 1, 3), torch.zeros(1, 1, 4), torch.ones(1, 2, 4)
        b[0, 0, 2] = math.nan
        with evaluate_with("sorted"):
            assert concatenation(a, b, g, self.w_f).isnan().all()


def test_gaussian_with_extreme_logits_is_finite():
    inputs = make_inputs(300, 200, compared=16, dtype=torch.float32)
    with torch.no_grad():
        inputs[0].mul_(1e4)
        inputs[1].mul_(1e4)
    with evaluate_with("chunked", chunk_bytes=50_000):
        values = value_and_gradients(evaluate, "gaussian", inputs, direction_like(inputs))
    assert all(v.isfinite().all() for v in values)
    low, high = inputs[2].min(dim=2, keepdim=True).values, inputs[2].max(dim=2, keepdim=True).values
    assert ((values[0] >= low - 1e-5) & (values[0] <= high + 1e-5)).all()  # a mean of the values


def test_forced_form_ends_with_the_context():
    inputs = make_inputs(3, 3)
    outside = evaluate("gaussian", *inputs)
    with pytest.raises(KeyError), evaluate_with("chunked"):
        raise KeyError
    assert torch.equal(evaluate("gaussian", *inputs), outside)


def test_unknown_form():
    with pytest.raises(ValueError, match=r"form='flash'.*'chunked'.*'sorted'"), evaluate_with("flash"):
        pass
