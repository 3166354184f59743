"""The block against Eq. 1 to 6, its start, its inputs and its errors."""

import itertools

import pytest
import torch
from non_local_reference import naive_block, naive_max_pool, naive_pairwise
from torch import nn

from nonlocal_det.layers import INITS, NORMS, PAIRWISE_FUNCTIONS, POOLS, NonLocalBlock

SPATIAL = {1: (5,), 2: (3, 4), 3: (2, 2, 3)}
SOFTMAX = ("gaussian", "embedded_gaussian")


def randomise(block, seed=0):
    """Gives every parameter a value that matters, as after training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in block.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.7)
    return block


def make_x(ndim, channels=4, batch=2, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, channels, *SPATIAL[ndim], generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("pairwise", PAIRWISE_FUNCTIONS)
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_values_and_gradients_equal_the_equations(ndim, pairwise, pool, norm):
    options = {"pairwise": pairwise, "pool": pool, "norm": norm}
    for scale, init in itertools.product([True, False], INITS):
        torch.manual_seed(0)
        block = NonLocalBlock(4, 3, ndim=ndim, scale=scale, init=init, **options).double()
        if scale:  # otherwise as it starts: the gradients of an identity must be right as well
            randomise(block)
        x = make_x(ndim).requires_grad_()
        leaves = [x, *block.parameters()]
        z = block(x)
        expected = naive_block(block, x, scale=scale, **options)
        torch.testing.assert_close(z, expected, rtol=1e-9, atol=1e-9)
        direction = torch.randn(z.shape, generator=torch.Generator().manual_seed(2), dtype=z.dtype)
        actual_grads = torch.autograd.grad(z, leaves, direction)
        expected_grads = torch.autograd.grad(expected, leaves, direction)
        for actual, wanted in zip(actual_grads, expected_grads, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("pairwise", PAIRWISE_FUNCTIONS)
def test_starts_as_identity_with_exactly_one_zero(pairwise, init, norm):
    torch.manual_seed(0)
    block = NonLocalBlock(8, pairwise=pairwise, init=init, norm=norm)
    x = torch.randn(2, 8, 6, 7)
    for training in (True, False):
        assert torch.equal(block.train(training)(x), x)
    zero = [name for name, p in block.named_parameters() if name.endswith("weight") and not p.any()]
    assert zero == (["w_z.norm.weight"] if norm else ["w_z.weight"])
    assert all(not p.any() for name, p in block.named_parameters() if name.endswith("bias"))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("pairwise", PAIRWISE_FUNCTIONS)
def test_gradients_are_live_after_one_step(pairwise, pool, norm):
    torch.manual_seed(0)
    # 40 channels: "GN" has 8 groups of 5. In groups of one channel it would remove constants as a batch norm
    # does.
    block = NonLocalBlock(40, pairwise=pairwise, pool=pool, norm=norm).double()
    x, target = torch.randn(2, 2, 40, 6, 7, dtype=torch.float64).unbind()
    optimizer = torch.optim.SGD(block.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        ((block(x) - target) ** 2).mean().backward()
        optimizer.step()
    dead = {name for name, p in block.named_parameters() if p.grad.abs().max() < 1e-12}
    # Zero by algebra: a constant added to every logit cancels in the softmax; a batch norm removes a
    # constant.
    expected = {"phi.bias"} if pairwise == "embedded_gaussian" else set()
    if norm in ("BN", "SyncBN"):
        expected |= {"w_z.bias"} | ({"g.bias"} if pairwise in SOFTMAX else set())
    assert dead == expected


@pytest.mark.parametrize(("init", "fan_in_std"), [("msra", True), ("normal", False)])
def test_init_has_the_named_spread(init, fan_in_std):
    torch.manual_seed(0)
    block = NonLocalBlock(256, 128, pairwise="concatenation", norm="BN", init=init)
    fan_ins = {"theta": 256, "phi": 256, "g": 256, "w_z": 128, "w_f": 256}
    for name, fan_in in fan_ins.items():
        std = (2 / fan_in) ** 0.5 if fan_in_std else 0.01
        assert getattr(block, name).weight.std().item() == pytest.approx(std, rel=0.15)


@pytest.mark.parametrize("pairwise", PAIRWISE_FUNCTIONS)
def test_state_keys(pairwise):
    block = NonLocalBlock(8, pairwise=pairwise, norm="BN")
    convs = ["g"] if pairwise == "gaussian" else ["theta", "phi", "g"]
    expected = {f"{name}.{part}" for name in [*convs, "w_z"] for part in ("weight", "bias")}
    expected |= {"w_f.weight"} if pairwise == "concatenation" else set()
    expected |= {
        f"w_z.norm.{part}"
        for part in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }
    assert set(block.state_dict()) == expected
    assert block.w_z.weight.shape == (8, 4, 1, 1)
    if pairwise == "concatenation":
        assert isinstance(block.w_f, nn.Linear)
        assert block.w_f.weight.shape == (1, 8)


@pytest.mark.parametrize(("channels", "inter"), [(1, 1), (2, 1), (3, 1), (1024, 512)])
def test_default_inter_channels_is_half(channels, inter):
    assert NonLocalBlock(channels).inter_channels == inter


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("pairwise", PAIRWISE_FUNCTIONS)
@pytest.mark.parametrize("size", [(1, 1), (1, 7), (5, 1), (2, 3), (7, 9)])
def test_every_size_works(pairwise, pool, size):
    block = randomise(NonLocalBlock(4, pairwise=pairwise, pool=pool).double())
    x = torch.randn(1, 4, *size, dtype=torch.float64)
    expected = naive_block(block, x, pairwise=pairwise, pool=pool, scale=True, norm="")
    torch.testing.assert_close(block(x), expected)


@pytest.mark.parametrize("norm", ["", "BN", "GN"])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("pairwise", PAIRWISE_FUNCTIONS)
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_batch_of_zero(ndim, pairwise, pool, norm):
    block = NonLocalBlock(4, ndim=ndim, pairwise=pairwise, pool=pool, norm=norm)
    x = torch.zeros(0, 4, *SPATIAL[ndim], requires_grad=True)
    for training in (True, False):
        z = block.train(training)(x)
        assert z.shape == x.shape
    z.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in block.parameters())
    queries = torch.zeros(2, ndim, dtype=torch.long)
    assert block.attention(x, queries).shape[:2] == (0, 2)


def test_channels_last_gives_the_same():
    block = randomise(NonLocalBlock(4).double())
    x = make_x(2)
    torch.testing.assert_close(block(x.contiguous(memory_format=torch.channels_last)), block(x))


class TestAttention:
    @pytest.mark.parametrize("pool", POOLS)
    @pytest.mark.parametrize("pairwise", PAIRWISE_FUNCTIONS)
    @pytest.mark.parametrize("ndim", [1, 2, 3])
    def test_rows_of_the_equations(self, ndim, pairwise, pool):
        block = randomise(NonLocalBlock(4, 3, ndim=ndim, pairwise=pairwise, pool=pool).double())
        x = make_x(ndim)
        cells = torch.tensor(list(itertools.product(*map(range, SPATIAL[ndim]))))
        order = [0, len(cells) - 1, 2]
        queries = cells[order]
        actual = block.attention(x, queries)
        grid = naive_max_pool(x[0]).shape[1:] if pool != "none" else SPATIAL[ndim]
        assert actual.shape == (2, 3, *grid)
        assert not actual.requires_grad
        # f / C(x) is what Eq. 1 gives when g(x_j) is the j-th unit vector.
        keys = int(torch.tensor(grid).prod())
        for sample, weights in zip(x, actual, strict=True):
            theta, phi = self._embed(block, sample, pool, pairwise)
            w_f = block.w_f.weight if pairwise == "concatenation" else None
            unit = torch.eye(keys, dtype=torch.float64)
            rows = naive_pairwise(pairwise, theta, phi, unit, w_f, theta.shape[1] ** -0.5)
            torch.testing.assert_close(weights.flatten(1), rows[order])
        if pairwise in SOFTMAX:
            torch.testing.assert_close(actual.flatten(2).sum(2), torch.ones(2, 3, dtype=torch.float64))

    @staticmethod
    def _embed(block, sample, pool, pairwise):
        hat = naive_max_pool(sample) if pool == "input" else sample
        if pairwise == "gaussian":
            keys, theta = hat, sample.flatten(1).T
        else:
            theta = block.theta(sample[None])[0].flatten(1).T
            keys = block.phi(hat[None])[0]
        if pool == "embedding":
            keys = naive_max_pool(keys)
        return theta, keys.flatten(1).T

    def test_queries_of_each_sample(self):
        block = randomise(NonLocalBlock(4).double())
        x = make_x(2)
        queries = torch.tensor([[[0, 1], [2, 3]], [[1, 1], [0, 0]]])
        actual = block.attention(x, queries)
        for b in range(2):
            torch.testing.assert_close(actual[b], block.attention(x[b : b + 1], queries[b])[0])

    def test_no_queries(self):
        assert NonLocalBlock(4).attention(
            torch.zeros(2, 4, 4, 6), torch.zeros(0, 2, dtype=torch.long)
        ).shape == (
            2,
            0,
            2,
            3,
        )

    @pytest.mark.parametrize("query", [(-1, 0), (3, 0), (0, 4)])
    def test_outside_is_an_index_error(self, query):
        with pytest.raises(IndexError, match=rf"\[{query[0]}, {query[1]}\].*\[3, 4\]"):
            NonLocalBlock(4).attention(torch.zeros(1, 4, 3, 4), torch.tensor([query]))

    @pytest.mark.parametrize(
        "queries", [torch.zeros(2, 3).long(), torch.zeros(3, 2, 2).long(), torch.zeros(1, 2)]
    )
    def test_wrong_queries(self, queries):
        with pytest.raises(ValueError, match="queries"):
            NonLocalBlock(4).attention(torch.zeros(2, 4, 3, 4), queries)


class TestNorm:
    def test_callable_norm_gets_gamma_zero(self):
        block = NonLocalBlock(4, norm=lambda channels: nn.InstanceNorm2d(channels, affine=True))
        assert isinstance(block.w_z.norm, nn.InstanceNorm2d)
        assert not block.w_z.norm.weight.any()
        assert block.w_z.weight.any()

    @pytest.mark.parametrize(
        "norm", [lambda channels: None, lambda channels: nn.Identity(), nn.InstanceNorm2d]
    )
    def test_callable_without_gamma_gets_w_z_zero(self, norm):
        block = NonLocalBlock(4, norm=norm)
        assert not block.w_z.weight.any()
        x = torch.randn(1, 4, 3, 3)
        assert torch.equal(block(x), x)
        block(x).square().sum().backward()
        assert block.w_z.weight.grad.any()

    def test_frozen_batch_norm_is_refused(self):
        class FrozenNorm(nn.Module):
            def __init__(self, channels):
                super().__init__()
                self.register_buffer("weight", torch.ones(channels))

        with pytest.raises(ValueError, match=r"FrozenNorm.*buffer.*'BN'"):
            NonLocalBlock(4, norm=FrozenNorm)

    @pytest.mark.parametrize(
        ("norm", "ndim", "kind"),
        [
            ("BN", 1, nn.BatchNorm1d),
            ("BN", 2, nn.BatchNorm2d),
            ("BN", 3, nn.BatchNorm3d),
            ("SyncBN", 2, nn.SyncBatchNorm),
            ("GN", 2, nn.GroupNorm),
            ("LN", 2, nn.GroupNorm),
        ],
    )
    def test_kind(self, norm, ndim, kind):
        module = NonLocalBlock(48, ndim=ndim, norm=norm).w_z.norm
        assert type(module) is kind
        if norm == "GN":
            assert module.num_groups == 16
        if norm == "LN":
            assert module.num_groups == 1


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"pairwise": "softmax"}, r"pairwise='softmax'.*'embedded_gaussian'.*'concatenation'"),
        ({"pool": "output"}, r"pool='output'.*'input', 'embedding', 'none'"),
        ({"norm": "FrozenBN"}, r"norm='FrozenBN'.*'BN', 'SyncBN', 'GN', 'LN'"),
        ({"norm": None}, r"norm=None is unknown; use one of \['', 'BN'"),
        ({"init": "xavier"}, r"init='xavier'.*'msra', 'normal'"),
        ({"ndim": 4}, r"ndim=4.*\[1, 2, 3\]"),
        ({"inter_channels": 0}, r"inter_channels=0"),
        ({"in_channels": 0}, r"in_channels=0"),
    ],
)
def test_wrong_options(kwargs, message):
    with pytest.raises(ValueError, match=message):
        NonLocalBlock(**{"in_channels": 8, **kwargs})


def test_wrong_number_of_axes():
    with pytest.raises(ValueError, match=r"\[4, 8, 8\].*ndim=2.*4 axes"):
        NonLocalBlock(4)(torch.zeros(4, 8, 8))


@pytest.mark.parametrize("pairwise", PAIRWISE_FUNCTIONS)
def test_meta_device_gives_shapes(pairwise):
    with torch.device("meta"):
        block, x = NonLocalBlock(64, pairwise=pairwise), torch.empty(2, 64, 60, 70, requires_grad=True)
    block(x).sum().backward()
    assert x.grad.shape == x.shape
