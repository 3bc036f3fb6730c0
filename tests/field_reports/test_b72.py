"""B72, kind of fault: the gradient norm depends on how gradients are divided, or overflows, in 16 bits.

It is summed in fp64 from norms in fp32, over any number of ranks and pieces.
"""

from __future__ import annotations

import pytest
import torch

from hybrid_strategy.distributed.gradient_norm import clip_by_norm, total_norm
from tests.support.ranks import run_ranks

CASES = {"bfloat16": (torch.bfloat16, 1.0), "float16": (torch.float16, 300.0), "float32": (torch.float32, 1e-3)}


def _gradients(kind: str) -> list[torch.Tensor]:
    dtype, scale = CASES[kind]
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(size, generator=generator) * scale).to(dtype) for size in (4000, 33, 1, 5000, 128, 7)]


def _norms(kind: str, infinite: bool) -> tuple[float, float]:
    import torch.distributed as dist

    mine = _gradients(kind)[dist.get_rank() :: dist.get_world_size()]
    norm = total_norm(mine, float("inf") if infinite else 2.0, torch.device("cpu"))
    clip_by_norm(mine, norm, 1.0)
    return float(norm), float(sum(each.double().square().sum() for each in mine))


@pytest.mark.parametrize("kind", CASES)
def test_the_norm_is_the_same_however_gradients_are_divided(kind: str) -> None:
    exact = torch.cat([each.double() for each in _gradients(kind)])
    for world_size in (1, 2, 4):
        ranks = run_ranks(_norms, world_size, kind, False)
        assert all(norm == pytest.approx(float(exact.norm()), rel=1e-6) for norm, _ in ranks)
        clipped = min(1.0, float(exact.norm()))
        assert sum(square for _, square in ranks) ** 0.5 == pytest.approx(clipped, rel=2e-3)
        assert all(
            norm == pytest.approx(float(exact.abs().max()), rel=1e-6) for norm, _ in run_ranks(_norms, world_size, kind, True)
        )
