"""B19, kind of fault: parameter groups are decided on the part of the model that a rank holds.

Groups are those of the whole model on every rank, in the user's order and with the user's settings; a group of which a rank holds
nothing is an empty one there; a name that matches nothing is the user's own error, the same on all ranks.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.gate import gate
from tests.support.ranks import RankFailedError, run_ranks
from tests.support.training import Case, TinyLM, Tokens, train_here

PIPELINE = {"pipeline_parallel_size": 2, "num_microbatches": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, PIPELINE),
    "pp2_zero_bubble": (2, {**PIPELINE, "schedule": "ZBVZeroBubble"}),
    "dp2_zero3": (2, {"sharding": "zero3"}),
    "tp2_sequence": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "dp2_pp2_zero2": (4, {**PIPELINE, "sharding": "zero2"}),
    "tp2_pp2": (4, {**PIPELINE, "tensor_parallel_size": 2}),
}
PATTERNS = ("embed_tokens", "norm", "lm_head", "")


class Grouped(TinyLM):
    """Groups by name, the embedding first; by the number of dimensions, which slices and shards must not change."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        rest = dict(self.named_parameters())
        groups = []
        for index, pattern in enumerate(PATTERNS):
            chosen = [rest.pop(name) for name in list(rest) if pattern in name]
            if not chosen:
                raise ValueError(f"{pattern!r} matches no parameter")
            decay = 0.1 if all(each.ndim >= 2 for each in chosen) else 0.0
            groups.append({"params": chosen, "lr": 1e-3 / (index + 1), "weight_decay": decay, "name": pattern or "rest"})
        return torch.optim.AdamW(groups)


class Misspelt(Grouped):
    """Asks for a layer that there is not."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if not any("embed_token_s" in name for name, _ in self.named_parameters()):
            raise ValueError("'embed_token_s' matches no parameter")
        return super().configure_optimizers()


@pytest.mark.parametrize("name", LAYOUTS)
def test_groups_are_those_of_the_whole_model(name: str) -> None:
    devices, strategy = LAYOUTS[name]
    report = gate(Grouped, DataLoader(Tokens(32), batch_size=4), strategy, devices=devices, steps=3)
    assert report.same, str(report)


class _Groups(pl.Callback):
    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        groups = trainer.optimizers[0].param_groups
        self.seen = [(each["name"], each["lr"], each["weight_decay"]) for each in groups]
        self.sizes = [len(each["params"]) for each in groups]


def _groups(strategy: dict[str, Any], module: Any) -> tuple[Any, Any]:
    recorder = _Groups()
    train_here(Case(strategy=strategy, trainer={"callbacks": [recorder]}, steps=1, module=module))
    return recorder.seen, recorder.sizes


def test_every_rank_has_every_group_with_its_settings() -> None:
    wanted = [("embed_tokens", 1e-3, 0.1), ("norm", 5e-4, 0.0), ("lm_head", 1e-3 / 3, 0.1), ("rest", 2.5e-4, 0.1)]
    found = run_ranks(_groups, 2, PIPELINE, Grouped, process_group=False)
    assert [seen for seen, _ in found] == [wanted, wanted]
    sizes = [each for _, each in found]
    assert min(each[0] for each in sizes) == 0, "the second stage has no embedding"


@pytest.mark.parametrize("name", ["pp2", "dp2_zero3"])
def test_a_name_that_matches_nothing_is_an_error_on_all_ranks(name: str) -> None:
    devices, strategy = LAYOUTS[name]
    with pytest.raises(RankFailedError) as caught:
        run_ranks(_groups, devices, strategy, Misspelt, process_group=False, timeout=60)
    assert all(f"rank {rank}:" in str(caught.value) for rank in range(devices))
    assert "matches no parameter" in str(caught.value)
