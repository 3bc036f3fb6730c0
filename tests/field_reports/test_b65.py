"""B65, kind of fault: a pipeline keeps activations and outputs longer than its schedule needs them.

However many micro-batches a step has, a rank holds as many of them as the schedule's formula says, and the last stage holds no
logits of micro-batches whose backward is over.
"""

from __future__ import annotations

import gc

import pytest
from torch import Tensor
from torch.utils.data import DataLoader

from tests.contract.layouts import ContractLayout
from tests.contract.models import LENGTH, VOCAB, Module, Rows, make_trainer, quiet
from tests.support.ranks import run_ranks


class Watching(Module):
    """Counts the logits that are alive when a micro-batch begins."""

    alive: list[int]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        shape = (len(batch["ids"]), LENGTH, VOCAB)
        self.alive.append(sum(isinstance(each, Tensor) and tuple(each.shape) == shape for each in gc.get_objects()))
        return self.loss(batch)


def _run(schedule: str, microbatches: int) -> tuple[int, int]:
    strategy = {"pipeline_parallel_size": 2, "num_microbatches": microbatches, "schedule": schedule}
    layout, module = ContractLayout("pp2", 2, 1, strategy), Watching()
    module.alive = []
    with quiet():
        trainer = make_trainer(layout, max_steps=1)
        trainer.fit(module, DataLoader(Rows(2 * microbatches), batch_size=2 * microbatches))
    return trainer.strategy.engine.player.peak_in_flight, max(module.alive)


@pytest.mark.parametrize("microbatches", [4, 16, 64])
def test_the_schedule_says_how_much_is_held(microbatches: int) -> None:
    first, last = run_ranks(_run, 2, "1F1B", microbatches, process_group=False)
    assert (first[0], last[0]) == (2, 1)
    assert last[1] <= 1
    if microbatches == 16:
        gpipe = run_ranks(_run, 2, "GPipe", microbatches, process_group=False)
        assert [peak for peak, _ in gpipe] == [microbatches, microbatches]
