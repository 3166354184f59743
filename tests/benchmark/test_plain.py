import pytest
import torch
from torch import nn

from nonlocal_det.benchmark.plain import plain_block
from nonlocal_det.layers import PAIRWISE_FUNCTIONS, NonLocalBlock


def test_one_pixel_pair_by_hand():
    """C = C' = 1, two positions, x = (1, 2), all weights 1: softmax weights are e^(x_i x_j)."""
    block = NonLocalBlock(1, 1, pairwise="embedded_gaussian", pool="none", scale=False)
    for layer in (block.theta, block.phi, block.g, block.w_z):
        nn.init.ones_(layer.weight)
    x = torch.tensor([[[[1.0, 2.0]]]])
    e = torch.exp(torch.tensor([[1.0, 2.0], [2.0, 4.0]]))
    expected = torch.tensor([1.0, 2.0]) + (e[:, 0] + 2 * e[:, 1]) / e.sum(dim=1)
    torch.testing.assert_close(plain_block(block, x).flatten(), expected)


@pytest.mark.parametrize("pool", ["input", "embedding", "none"])
@pytest.mark.parametrize("pairwise", PAIRWISE_FUNCTIONS)
def test_is_the_block(pairwise, pool):
    torch.manual_seed(0)
    block = NonLocalBlock(6, pairwise=pairwise, pool=pool).double()
    nn.init.normal_(block.w_z.weight)
    for parameter in block.parameters():
        parameter.data += 0.1  # no bias is zero
    x = torch.randn(2, 6, 7, 8, dtype=torch.float64, requires_grad=True)
    dz = torch.randn_like(x)
    expected, plain = block(x), plain_block(block, x)
    torch.testing.assert_close(plain, expected)
    leaves = [x, *block.parameters()]
    for ours, theirs in zip(
        torch.autograd.grad(plain, leaves, dz), torch.autograd.grad(expected, leaves, dz), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
