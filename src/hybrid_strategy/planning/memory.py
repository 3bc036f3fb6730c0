"""The memory ledger of a rank: every term with its formula filled in and its source; the lines sum to the whole.

States: arXiv:1910.02054 section 3 and 5. Activations: arXiv:2205.05198. In flight: the schedule's own count. What no formula
holds (driver, communication library, fragmentation) is a line too, from the cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from hybrid_strategy.planning.activations import BlockActivations, block_activations
from hybrid_strategy.planning.numerics import Numerics
from hybrid_strategy.planning.scenario import Scenario
from hybrid_strategy.spec.ledger import LedgerLine, MemoryLedger, largest

_ZERO = "arXiv:1910.02054 section 5"
_ACTIVATIONS = "arXiv:2205.05198 equations 1-4, table 2"
_MEASURED = "measured: torchtune bd2a0fc7 README, torchtitan benchmarks (peaks with and without chunked loss)"

BUCKET_BYTES = 32 * 2**20
"""One message of the gradient reduction (`distributed.coalesced`); one is filled while another travels."""


@dataclass(frozen=True)
class StateShares:
    """Over how many data-parallel (and context-parallel) ranks each kind of state is split."""

    parameters: int
    gradients: int
    optimizer: int


def state_shares(sharding: str, shard_size: int) -> StateShares:
    """The three stages of ZeRO: optimizer states, then gradients, then parameters."""
    level = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}[sharding]
    return StateShares(*(shard_size if level >= stage else 1 for stage in (3, 2, 1)))


def states_bytes_per_parameter(numerics: Numerics, sharding: str, shard_size: int) -> float:
    """Bytes of weight, gradient and optimizer states that a rank holds per parameter.

    7.5B parameters on 64 ranks (arXiv:1910.02054 figure 1) are 120, 31.4, 16.6 and 1.9 GB:

    >>> from hybrid_strategy.planning.numerics import NUMERICS
    >>> [round(7.5 * states_bytes_per_parameter(NUMERICS["mixed"], s, 64), 1) for s in ("ddp", "zero1", "zero2", "zero3")]
    [120.0, 31.4, 16.6, 1.9]
    """
    shares = state_shares(sharding, shard_size)
    weights = numerics.parameter_bytes / shares.parameters + numerics.gradient_bytes / shares.gradients
    return weights + (numerics.master_bytes + numerics.moment_bytes) / shares.optimizer


@dataclass(frozen=True)
class LedgerMaker:
    """Makes the lines of pipeline rank `rank`."""

    scenario: Scenario
    rank: int

    @cached_property
    def activations(self) -> BlockActivations:
        return block_activations(self.scenario)

    @cached_property
    def shares(self) -> StateShares:
        layout = self.scenario.layout
        return state_shares(layout.sharding, layout.shard_size * layout.context_parallel_size)

    @property
    def stages(self) -> tuple[int, ...]:
        return self.scenario.stages_of_rank[self.rank]

    @property
    def has_head(self) -> bool:
        return self.scenario.layout.num_stages - 1 in self.stages

    @cached_property
    def in_flight(self) -> int:
        """Forward passes of a stage held at once by the rank."""
        layout, m = self.scenario.layout, self.scenario.batch.num_microbatches
        sizes = (layout.pipeline_parallel_size, layout.stages_per_rank)
        if sizes[0] == 1:
            return layout.stages_per_rank
        return self.scenario.schedule.max_in_flight(self.rank, *sizes, m)

    def lines(self) -> Iterator[LedgerLine]:
        """All lines, in the order of `LEDGER_CATEGORIES`."""
        yield from self._states()
        yield from self._activations()
        yield from self._passing()
        yield from self._outside()

    # -- states ---------------------------------------------------------------------------------------------------------

    def _states(self) -> Iterator[LedgerLine]:
        scenario, numerics, shares = self.scenario, self.scenario.numerics, self.shares
        blocks = self.scenario.blocks_of(self.rank) * scenario.block_parameters
        ends = scenario.rank_parameters(self.rank) - blocks
        kinds = (
            ("weights", "parameters", numerics.parameter_bytes, shares.parameters),
            ("gradients", "gradients", numerics.gradient_bytes, shares.gradients),
            ("optimizer states", "optimizer", numerics.moment_bytes, shares.optimizer),
            ("fp32 masters", "copies", numerics.master_bytes, shares.optimizer),
            ("casts for products", "copies", numerics.cast_bytes, shares.parameters),
        )
        for what, category, each, share in kinds:
            for where, count in (("blocks", blocks), ("embedding and head", ends)):
                if each and count:
                    formula = f"{each:g} B x {count:,.0f} parameters / {share} data-parallel ranks"
                    yield LedgerLine(f"{what}, {where}", category, each * count / share, formula, _ZERO)

    # -- activations ----------------------------------------------------------------------------------------------------

    def _activations(self) -> Iterator[LedgerLine]:
        scenario = self.scenario
        width = scenario.tokens * scenario.shape.hidden_size
        per_stage = self.scenario.blocks_of(self.rank) / len(self.stages)
        kept = self.activations.kept
        formula = (
            f"{kept / width:.2f} B x {scenario.tokens:,.0f} tokens x {scenario.shape.hidden_size} "
            f"x {per_stage:g} blocks a stage x {self.in_flight} in flight"
        )
        yield LedgerLine("kept, blocks", "activations", kept * per_stage * self.in_flight, formula, _ACTIVATIONS)
        if scenario.stack.dropout and 0 in self.stages:
            held = width / scenario.sequence_split * min(self.in_flight, scenario.layout.pipeline_parallel_size)
            yield LedgerLine("embedding dropout", "activations", held, "1 B x T h p", "arXiv:2205.05198 section 4.3")
        if scenario.layout.num_stages > 1 and not scenario.stack.scatter_sends:
            held = width * scenario.numerics.compute_bytes / scenario.sequence_split * self.in_flight
            source = "torch.distributed.pipelining keeps a stage's output until its backward pass"
            yield LedgerLine("stage outputs", "activations", held, f"2 B x T h x {self.in_flight} in flight", source)
        if self.has_head:
            held = 2 * width * scenario.numerics.compute_bytes / scenario.sequence_split
            yield LedgerLine("final norm and head input", "activations", held, "4 B x T h", "arXiv:2205.05198 section 4.3")

    def _passing(self) -> Iterator[LedgerLine]:
        """What comes and goes: the loss at the end of the forward pass, one block's work in the backward pass."""
        scenario, stack = self.scenario, self.scenario.stack
        logits = 0.0
        if self.has_head:
            columns = scenario.shape.vocab_size / scenario.layout.tensor_parallel_size
            each = stack.logits_bytes
            if scenario.layout.tensor_parallel_size > 1:
                each += stack.split_logits_bytes
            logits = each * scenario.tokens * columns
            formula = f"{each:g} B x {scenario.tokens:,.0f} tokens x {columns:,.0f} words"
            yield LedgerLine("logits and loss", "logits", logits, formula, _MEASURED)
        work = self.activations.whole - self.activations.kept + self._block_gradients()
        beyond = max(0.0, work - logits)
        formula = f"recomputed block and its gradients, {work:,.0f} B, beyond the loss, which is gone by then"
        yield LedgerLine("work of one block", "activations", beyond, formula, "arXiv:2205.05198 section 5")

    def _block_gradients(self) -> float:
        """Gradients of the activations of one MLP, the widest part of a block: 2 f + 2 h a token."""
        shape, scenario = self.scenario.shape, self.scenario
        wide = 2 * shape.intermediate_size / scenario.layout.tensor_parallel_size + 2 * shape.hidden_size
        return scenario.tokens * wide * scenario.numerics.compute_bytes

    # -- communication and what lies outside ----------------------------------------------------------------------------

    def _outside(self) -> Iterator[LedgerLine]:
        scenario, cluster = self.scenario, self.scenario.cluster
        gathered = self._gathered()
        if gathered is not None:
            yield gathered
        if scenario.layout.world_size > 1:
            held = 2 * min(BUCKET_BYTES, scenario.rank_parameters(self.rank) * scenario.numerics.reduce_bytes)
            yield LedgerLine("two reduction buckets", "buffers", held, "2 x 32 MiB", "distributed.coalesced")
        yield LedgerLine("driver and communication library", "reserve", cluster.reserve_bytes, "", f"cluster {cluster.name}")

    def _gathered(self) -> LedgerLine | None:
        """Whole weights of two units and whole gradients of one, under `zero3`."""
        scenario, layout, numerics = self.scenario, self.scenario.layout, self.scenario.numerics
        if layout.sharding != "zero3" or layout.shard_size == 1:
            return None
        ends = max(scenario.end_parameters(stage) for stage in self.stages)
        units = 2 * scenario.block_parameters + ends
        held = units * numerics.gather_bytes + max(scenario.block_parameters, ends) * numerics.reduce_bytes
        formula = f"{numerics.gather_bytes:g} B x {units:,.0f} weights of two blocks and the ends, gradients of one unit"
        return LedgerLine("gathered units", "gathered", held, formula, "arXiv:2304.11277 section 4")


def memory_ledger(scenario: Scenario, rank: int) -> MemoryLedger:
    """The ledger of pipeline rank `rank`, fragmentation included, against the memory of one GPU."""
    maker = LedgerMaker(scenario, rank)
    lines = list(maker.lines())
    cluster = scenario.cluster
    lost = cluster.allocator_fraction * sum(line.bytes for line in lines if line.category != "reserve")
    formula = f"{cluster.allocator_fraction:.0%} of what is allocated"
    lines.append(LedgerLine("fragmentation", "reserve", lost, formula, f"cluster {cluster.name}"))
    return MemoryLedger(rank, maker.stages, tuple(lines), cluster.memory_bytes)


def memory_ledgers(scenario: Scenario) -> tuple[MemoryLedger, ...]:
    """The ledgers of all pipeline ranks."""
    return tuple(memory_ledger(scenario, rank) for rank in range(scenario.layout.pipeline_parallel_size))


def peak_ledger(scenario: Scenario) -> MemoryLedger:
    """The ledger of the pipeline rank that holds most."""
    return largest(memory_ledgers(scenario))
