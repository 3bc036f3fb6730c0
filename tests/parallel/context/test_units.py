"""A user's model, which knows nothing of context parallelism, is right under it or refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid_strategy import ParallelPlan
from hybrid_strategy.distributed.groups import build_groups
from hybrid_strategy.parallelize import parallelize
from hybrid_strategy.planning.layouts import resolve_layout
from tests.support.context_models import (
    LENGTH,
    VOCAB,
    Holder,
    Loss,
    Nano,
    Outcome,
    PlannedNano,
    TorchEncoder,
    one_step,
    plain,
    tokens,
)
from tests.support.ranks import RankFailedError, run_ranks


def next_token(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids)[:, :-1]
    return F.cross_entropy(logits.reshape(-1, VOCAB), ids[:, 1:].reshape(-1))


def as_hugging_face(model: nn.Module, ids: Tensor) -> Tensor:
    labels = F.pad(ids, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(model(ids).float().view(-1, VOCAB), labels.view(-1), ignore_index=-100, label_smoothing=0.1)


def many_terms(model: nn.Module, ids: Tensor) -> Tensor:
    """A weighted loss, a z-loss, log-probabilities, a penalty on the weights, a mean over positions."""
    logits = model(ids)
    losses = F.cross_entropy(logits.transpose(1, 2), ids.roll(-1, 1), reduction="none")
    weights = (ids % 3).float()
    chosen = logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    penalty = torch.stack([each.square().sum() for each in model.parameters()]).sum()
    pooled = logits.mean(1).square().mean()
    return (
        (losses * weights).sum() / weights.sum() + 0.01 * logits.logsumexp(-1).square().mean() - chosen.mean() + penalty + pooled
    )


RIGHT: dict[str, tuple[Callable[[], nn.Module], Loss, dict[str, Any]]] = {
    "no plan": (Nano, next_token, {}),
    "plan": (PlannedNano, next_token, {}),
    "recomputed": (Nano, next_token, {"activation_checkpoint": "full"}),
    "zero3": (PlannedNano, next_token, {"sharding": "zero3"}),
    "attention both ways": (partial(Nano, "both"), next_token, {}),
    "masks": (partial(Nano, "mask"), next_token, {}),
    "as Hugging Face": (PlannedNano, as_hugging_face, {}),
    "many terms": (PlannedNano, many_terms, {}),
    "many terms outside": (Nano, many_terms, {}),
    "torch's encoder": (TorchEncoder, next_token, {}),
}


def all_here(size: int) -> dict[str, Outcome]:
    return {name: one_step(build, loss, size, **layout) for name, (build, loss, layout) in RIGHT.items()}


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Outcome]]:
    """One process, then two ranks."""
    return [*run_ranks(all_here, 1, 1), *run_ranks(all_here, 2, 2)]


@pytest.mark.parametrize("name", RIGHT)
def test_same_numbers_as_one_process(name: str, outcomes: list[dict[str, Outcome]]) -> None:
    wanted, *ranks = (each[name] for each in outcomes)
    scale = max(each.abs().max().item() for each in wanted.gradients.values())
    pieces = {key: [rank.gradients[key] for rank in ranks] for key in wanted.gradients}
    for rank in ranks:
        assert rank.loss == pytest.approx(wanted.loss, rel=1e-6)
        torch.testing.assert_close(rank.logits, wanted.logits, rtol=1e-5, atol=1e-5)
    for key, value in wanted.gradients.items():
        for held in [torch.cat(pieces[key])] if "zero3" in name else pieces[key]:
            torch.testing.assert_close(held, value, rtol=0, atol=1e-5 * scale)


WRONG = {
    "written out": r"blocks.0 \(Block\) does not give the same on parts of a sequence as on the whole of it",
    "own positions": r"blocks.0 \(Block\) does not give the same on parts",
    "convolution": r"blocks.0 \(Block\) does not give the same on parts",
    "own mask": r"an attention mask must be of this rank's queries and of all keys. Its shape is \(8, 8\)",
}


def refused_here(kind: str) -> str:
    try:
        one_step(partial(Nano, kind), next_token, 2)
    except Exception as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize("kind", WRONG)
def test_what_a_part_cannot_bear_is_refused_on_every_rank(kind: str) -> None:
    for answer in run_ranks(refused_here, 2, kind):
        assert re.search(WRONG[kind], answer), answer


class Pair(nn.Module):
    """Two layers by name: nothing tells in which order they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.tokens(ids))


def test_a_model_without_units_is_refused() -> None:
    with pytest.raises(RankFailedError, match="Pair does not say between which modules sequences may be cut"):
        run_ranks(one_step, 2, Pair, next_token, 2)


class Noise(nn.Module):
    """Dropout of ones, in the blocks and between them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.between, self.blocks = nn.Dropout(0.5), nn.ModuleList([nn.Dropout(0.5)])

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.ones(*ids.shape, 32) * self.scale
        return self.between(x), self.blocks[0](x)


def noise_here() -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)
    groups = build_groups(resolve_layout(world_size=2, context_parallel_size=2), torch.device("cpu"))
    holder = Holder(Noise())
    parallelize(holder, "model", ParallelPlan(units=("blocks.*",)), groups, torch.device("cpu"))
    between, inside = holder.model(tokens())
    return between.detach(), plain(inside).detach()


def test_masks_differ_over_parts_and_agree_on_the_whole() -> None:
    (between, inside), (other_between, other_inside) = run_ranks(noise_here, 2)
    assert torch.equal(between, other_between)
    assert torch.equal(inside, other_inside)  # gathered: both ranks see both parts
    chunk = LENGTH // 4
    first, second = inside[:, :chunk], inside[:, chunk : 2 * chunk]
    assert not torch.equal(first, second)
