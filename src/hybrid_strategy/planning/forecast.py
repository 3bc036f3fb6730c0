"""Memory, communication and time of one scenario together, and what follows from them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from hybrid_strategy.planning.flops import FlopConvention, flops_utilization, training_flops_per_token
from hybrid_strategy.planning.memory import likely_peak_ledger
from hybrid_strategy.planning.roofline import peak_flops
from hybrid_strategy.planning.scenario import Scenario
from hybrid_strategy.planning.step_time import StepModel, StepTime
from hybrid_strategy.spec.bill import CommunicationBill
from hybrid_strategy.spec.ledger import MemoryLedger


@dataclass(frozen=True)
class Forecast:
    """What is expected of one scenario: `ledger` is that of the rank that holds most, `step` and `bill` of the busiest."""

    scenario: Scenario
    ledger: MemoryLedger
    step: StepTime
    bill: CommunicationBill

    @property
    def fits(self) -> bool:
        return self.ledger.fits

    @property
    def step_seconds(self) -> float:
        return self.step.step_seconds

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.scenario.step_tokens / self.step_seconds / self.scenario.layout.world_size

    @cached_property
    def mfu(self) -> float:
        """Model FLOPs over the peak of the type that products are computed in; full attention, no recomputation."""
        return self._utilisation(FlopConvention())

    @cached_property
    def hfu(self) -> float:
        """As `mfu`, with what is recomputed."""
        compute = self.step.compute_seconds
        return self.mfu * (compute + self.step.recompute_seconds) / compute

    def _utilisation(self, convention: FlopConvention) -> float:
        cluster = self.scenario.cluster
        eight_bit = self.scenario.numerics.fp8 and cluster.peak_fp8_flops > 0
        peak = cluster.peak_fp8_flops if eight_bit else peak_flops(self.scenario)
        flops = training_flops_per_token(self.scenario.shape, convention)
        return flops_utilization(flops, self.tokens_per_second_per_gpu, peak)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: what `train` prints beside the measured values."""
        return {
            "layout": asdict(self.scenario.layout),
            "batch": asdict(self.scenario.batch),
            "micro_batch_size": self.scenario.micro_batch_size,
            "step_seconds": self.step_seconds,
            "step": asdict(self.step),
            "bubble_fraction": self.step.bubble_fraction,
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "fits": self.fits,
            "memory": self.ledger.to_dict(),
            "bill": self.bill.to_dict(),
        }


def forecast(scenario: Scenario, play: bool = True) -> Forecast:
    """The forecast; with `play=False` the bubble is the schedule's own fraction instead of the played table's.

    >>> from hybrid_strategy.spec.batch import BatchSpec
    >>> from hybrid_strategy.spec.layout import Layout
    >>> from hybrid_strategy.spec.model_shape import ModelShape
    >>> shape = ModelShape(4096, 32, 32, 14336, 128256, 8192, num_key_value_heads=8)
    >>> layout = Layout(data_parallel_size=8, sharding="zero3", activation_checkpoint="full")
    >>> found = forecast(Scenario(shape, layout, BatchSpec(8)))
    >>> found.fits, abs(sum(found.ledger.by_category.values()) - found.ledger.total_bytes) < 1
    (True, True)
    """
    model = StepModel(scenario)
    step = model.step_time(play)
    return Forecast(scenario, likely_peak_ledger(scenario), step, _with_sends(model.bill, step.pipeline_send_seconds))


def _with_sends(bill: CommunicationBill, exposed: float) -> CommunicationBill:
    """The bill with what playing the schedule showed of the pipeline's messages."""
    lines = (
        replace(line, exposed_seconds=min(exposed, line.seconds)) if line.axis == "pipeline_parallel" else line
        for line in bill.lines
    )
    return CommunicationBill(tuple(lines))
