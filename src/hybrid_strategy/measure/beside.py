"""What a dry run counted beside what ledger and bill say of the same rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from hybrid_strategy.measure.dry_run import Counted, DryRun, dry_run, kinds_of
from hybrid_strategy.measure.fake import PASSING
from hybrid_strategy.modules.language_model import LanguageModel
from hybrid_strategy.planning.communication import Windows, communication_bill
from hybrid_strategy.planning.memory import memory_ledger
from hybrid_strategy.planning.scenario import Scenario
from hybrid_strategy.registry import find
from hybrid_strategy.spec.training import LearningRateSpec, OptimizerSpec

_MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_TRUE = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}


@dataclass(frozen=True)
class Comparison:
    """One line: what, as it was counted and as it was forecast, both in bytes."""

    what: str
    counted: float
    forecast: float

    @property
    def error(self) -> float:
        """Forecast over counted, less 1."""
        if self.counted == self.forecast:
            return 0.0
        return self.forecast / self.counted - 1 if self.counted else 1.0


@dataclass(frozen=True)
class RankComparison:
    """All lines of one rank."""

    rank: int
    memory: tuple[Comparison, ...]
    sent: tuple[Comparison, ...]


def compare_ranks(
    scenario: Scenario, precision: str, optimizer: OptimizerSpec, ranks: Sequence[int], stage_cuts: Sequence[int] | None = None
) -> list[RankComparison]:
    """Plays a step of our language model as each of `ranks` and sets it beside the planner's arithmetic."""
    run = _run_of(scenario, precision, optimizer, stage_cuts)
    return [_compared(scenario, dry_run(run, rank)) for rank in ranks]


def _run_of(scenario: Scenario, precision: str, optimizer: OptimizerSpec, stage_cuts: Sequence[int] | None) -> DryRun:
    shape, layout = scenario.shape, scenario.layout
    rows = scenario.batch.rank_batch_size(layout.data_parallel_size)
    kind = _MIXED.get(precision)

    def make() -> LanguageModel:
        module = LanguageModel(shape, optimizer, LearningRateSpec(schedule="constant"))
        wide = torch.get_default_dtype()
        torch.set_default_dtype(_TRUE.get(precision, torch.float32))
        try:
            with torch.device("meta"):
                module.model = find("models", shape.family, "model.family").build(shape)
        finally:
            torch.set_default_dtype(wide)
        return module

    def context() -> AbstractContextManager[object]:
        return torch.autocast("cpu", kind) if kind is not None else nullcontext()

    return DryRun(
        layout=layout,
        make_module=make,
        make_optimizer=_optimizer,
        batch=dict.fromkeys(("input_ids", "labels"), (rows, shape.sequence_length)),
        num_microbatches=scenario.batch.num_microbatches,
        context=context,
        kind_of=kinds_of(shape, layout),
        stage_cuts=tuple(stage_cuts) if stage_cuts is not None else None,
    )


def _optimizer(module: torch.nn.Module) -> torch.optim.Optimizer:
    """The module's own; one parameter at a time, since the lists of `foreach` are no memory of the model's."""
    made: torch.optim.Optimizer = module._optimizer()  # type: ignore[operator]
    for group in made.param_groups:
        group["foreach"] = False
    return made


def _compared(scenario: Scenario, counted: Counted) -> RankComparison:
    stage = scenario.layout.coordinate(counted.rank).pipeline_parallel
    forecast = Counter(memory_ledger(scenario, stage).by_category)
    passing = sum(forecast.pop(name, 0.0) for name in ("activations", "logits", "buffers"))
    memory = [Comparison(name, counted.memory.get(name, 0), forecast[name]) for name in forecast if name != "reserve"]
    memory.append(Comparison(PASSING, counted.memory.get(PASSING, 0), passing))
    billed: Counter[tuple[str, str]] = Counter()
    for line in communication_bill(scenario, Windows(0.0, 0.0, 0.0, 0.0), stage).lines:
        billed[line.axis, line.collective] += line.calls * line.payload_bytes  # type: ignore[assignment]
    sent = counted.sent.payload_bytes
    keys = sorted(set(billed) | set(sent))
    return RankComparison(counted.rank, tuple(memory), tuple(Comparison(" ".join(key), sent[key], billed[key]) for key in keys))
