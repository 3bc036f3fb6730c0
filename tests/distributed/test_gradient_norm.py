"""The norm is one number for all ranks, whatever they own and in whatever precision."""

from __future__ import annotations

import math

import pytest
import torch

from hybrid_strategy.distributed.gradient_norm import clip_by_norm, total_norm
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
TYPES = (torch.float64, torch.float32, torch.bfloat16)


def _clipped(owned: list[torch.Tensor] | None, replica: torch.Tensor, norm_type: float) -> tuple[float, torch.Tensor]:
    norm = total_norm(owned or [], norm_type, CPU)
    clip_by_norm([replica], norm, 1.0)
    return norm.item(), replica


def _rank_clips(dtype: torch.dtype, norm_type: float) -> tuple[float, torch.Tensor]:
    import torch.distributed as dist

    gradient = torch.tensor([3.0, -4.0], dtype=dtype)
    return _clipped([gradient.clone()] if dist.get_rank() == 0 else None, gradient, norm_type)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("norm_type", "norm"), [(2.0, 5.0), (math.inf, 4.0), (1.0, 7.0)])
def test_a_rank_that_owns_nothing_takes_part_in_the_same_type(dtype: torch.dtype, norm_type: float, norm: float) -> None:
    results = run_ranks(_rank_clips, 2, dtype, norm_type)
    assert [each for each, _ in results] == [norm, norm]
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][1].dtype == dtype
    torch.testing.assert_close(results[0][1], torch.tensor([3.0, -4.0], dtype=dtype) / norm, rtol=1e-2, atol=0)


def test_gradients_of_several_types_are_clipped_by_one_factor() -> None:
    gradients = [torch.full((2,), 3.0, dtype=dtype) for dtype in TYPES]
    clip_by_norm(gradients, total_norm(gradients, 2.0, CPU), 1.0)
    for gradient in gradients:
        torch.testing.assert_close(gradient.double(), torch.full((2,), 1 / math.sqrt(6), dtype=torch.float64), rtol=1e-2, atol=0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_leaves_gradients_alone(value: float) -> None:
    gradient = torch.tensor([1.0, value])
    norm, after = _clipped([gradient], gradient.clone(), 2.0)
    assert not math.isfinite(norm)
    assert after[0] == 1.0
