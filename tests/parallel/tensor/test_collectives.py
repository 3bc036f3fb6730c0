"""Each collective and its backward are transposes of one another: <A x, y> summed over ranks equals <x, A' y>."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_strategy.errors import LayoutError
from hybrid_strategy.parallel.tensor import collectives as c
from hybrid_strategy.parallel.tensor.region import Region
from tests.support.collectives import CountCollectives
from tests.support.ranks import run_ranks

WIDTHS = {1: (5,), 2: (3, 2), 4: (2, 2, 1, 1)}


def rank_tensors(shape: tuple[int, ...]) -> list[Tensor]:
    """What each rank holds; every rank knows all of them. Not contiguous, as after a transpose."""
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(shape[::-1], generator=generator, dtype=torch.float64).permute(2, 1, 0) for _ in range(dist.get_world_size())
    ]


def check_forward() -> None:
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    x = rank_tensors((2, 4, 3))
    total, block = sum(x), slice(rank * 4 // size, (rank + 1) * 4 // size)
    same = {"rtol": 0, "atol": 1e-14}
    torch.testing.assert_close(c.copy_to_region(x[rank], group), x[rank], **same)
    torch.testing.assert_close(c.reduce_from_region(x[rank], group), total, **same)
    torch.testing.assert_close(c.gather_from_sequence(x[rank], group), torch.cat(x, 1), **same)
    torch.testing.assert_close(c.gather_from_sequence(x[rank], group, 0), torch.cat(x, 0), **same)
    torch.testing.assert_close(c.scatter_to_sequence(x[rank], group), total[:, block], **same)
    torch.testing.assert_close(c.scatter_to_sequence(x[rank].transpose(0, 1), group, 0), total.transpose(0, 1)[block], **same)
    widths = WIDTHS[size]
    columns = [torch.randn(2, width, generator=torch.Generator().manual_seed(width)) for width in widths]
    torch.testing.assert_close(c.gather_vocabulary(columns[rank], group, widths), torch.cat(columns, -1), **same)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_forward(size: int) -> None:
    run_ranks(check_forward, size)


def transposed(function: Callable[[Tensor], Tensor], whole_gradient: bool) -> None:
    """Compares the backward with what the definition of the gradient of a sum of losses over the ranks says.

    `whole_gradient`: the output is replicated and every rank's loss is the same one loss, so it counts once.
    """
    x = rank_tensors((2, 4, 3))[dist.get_rank()].clone().requires_grad_()
    generator = torch.Generator().manual_seed(0 if whole_gradient else dist.get_rank())
    y = function(x)
    weights = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    (y * weights).sum().backward()
    direction = rank_tensors((2, 4, 3))[-1 - dist.get_rank()]
    with torch.no_grad():
        change = (function(direction) * weights).sum()
    if not whole_gradient:
        dist.all_reduce(change)
    along = (x.grad * direction).sum()
    dist.all_reduce(along)
    torch.testing.assert_close(along, change)


def check_transposes() -> None:
    group, widths = dist.group.WORLD, (3,) * dist.get_world_size()
    transposed(lambda x: c.reduce_from_region(x, group), whole_gradient=True)
    transposed(lambda x: c.gather_vocabulary(x, group, widths), whole_gradient=True)
    transposed(lambda x: c.gather_from_sequence(x, group), whole_gradient=False)
    transposed(lambda x: c.scatter_to_sequence(x, group), whole_gradient=False)
    x, gradients = rank_tensors((2, 4, 3))[0].clone().requires_grad_(), rank_tensors((2, 4, 3))
    c.copy_to_region(x, group).backward(gradients[dist.get_rank()])
    torch.testing.assert_close(x.grad, sum(gradients))


@pytest.mark.parametrize("size", [2, 4])
def test_backward_is_the_transpose(size: int) -> None:
    run_ranks(check_transposes, size)


def count_alone() -> dict[str, int]:
    group, x = dist.group.WORLD, torch.ones(2, 4, 3, requires_grad=True)
    with CountCollectives() as called:
        for function in (c.copy_to_region, c.reduce_from_region, c.gather_from_sequence, c.scatter_to_sequence):
            assert function(x, group) is x
        assert c.gather_vocabulary(x, group, (3,)) is x
    return dict(called.counts)


def test_one_rank_does_nothing() -> None:
    assert run_ranks(count_alone, 1) == [{}]


def check_odd_length() -> None:
    region = Region(dist.group.WORLD, dist.get_rank(), 2, True)
    for function in (region.leave, region.own_part):
        with pytest.raises(LayoutError, match=r"2 does not divide 5. Pad the sequences or set sequence_parallel=False"):
            function(torch.ones(2, 5, 3))


def test_a_sequence_that_does_not_divide_is_refused_before_the_collective() -> None:
    run_ranks(check_odd_length, 2)
