"""The memory ledger of a rank: every term with its formula filled in and its source; the lines sum to the whole.

States: arXiv:1910.02054 section 3 and 5. Activations: arXiv:2205.05198. In flight: the schedule's own count. What no formula
holds (driver, communication library, fragmentation) is a line too, from the cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from hybrid_strategy.planning.activations import BlockActivations, block_activations, head_split_bytes, split_pass_bytes
from hybrid_strategy.planning.numerics import Numerics
from hybrid_strategy.planning.scenario import Scenario
from hybrid_strategy.planning.split_work import SplitWork, passing_bytes, split_work
from hybrid_strategy.spec.ledger import LedgerLine, MemoryLedger, largest

_ZERO = "arXiv:1910.02054 section 5"
_ACTIVATIONS = "arXiv:2205.05198 equations 1-4, table 2"
_MEASURED = "measured: torchtune bd2a0fc7 README, torchtitan benchmarks (peaks with and without chunked loss)"

BUCKET_BYTES = 32 * 2**20
"""One message of the gradient reduction (`distributed.coalesced`); one is filled while another travels."""


OWN_LOGITS_BYTES = {(4.0, 4.0): (12.0, 8.0), (2.0, 4.0): (12.0, 10.0), (2.0, 2.0): (6.0, 10.0)}
"""Bytes held per element of the logits by this package's engine, the vocabulary whole or split, in fp32, under autocast and in
16 bit: counted (`hybrid plan --dry-run`)."""


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
    """Makes the ledgers of one scenario."""

    scenario: Scenario

    @cached_property
    def activations(self) -> BlockActivations:
        """What one block keeps of one micro-batch."""
        return block_activations(self.scenario)

    @cached_property
    def width(self) -> float:
        """Elements of one activation of the hidden size."""
        return self.scenario.tokens * self.scenario.shape.hidden_size

    @cached_property
    def _end_parameters(self) -> tuple[float, ...]:
        """Of every stage; those between the first and the last have none."""
        last = self.scenario.layout.num_stages - 1
        ends = tuple(self.scenario.end_parameters(stage) for stage in sorted({0, last}))
        return (ends[0], *(0.0,) * (last - 1), *ends[1:])

    def in_flight(self, rank: int) -> int:
        """Forward passes of a stage that pipeline rank `rank` holds at once."""
        layout, m = self.scenario.layout, self.scenario.batch.num_microbatches
        sizes = (layout.pipeline_parallel_size, layout.stages_per_rank)
        return layout.stages_per_rank if sizes[0] == 1 else self.scenario.schedule.max_in_flight(rank, *sizes, m)

    def ledger(self, rank: int) -> MemoryLedger:
        """The ledger of pipeline rank `rank`, fragmentation included, against the memory of one GPU."""
        cluster = self.scenario.cluster
        lines = [*self._states(rank), *self._activations(rank), *self._passing(rank), *self._messages(rank)]
        lost = cluster.allocator_fraction * sum(line.bytes for line in lines)
        source = f"cluster {cluster.name}"
        formula = f"{cluster.allocator_fraction:.0%} of what is allocated"
        lines.append(LedgerLine("driver and communication library", "reserve", cluster.reserve_bytes, "", source))
        lines.append(LedgerLine("fragmentation", "reserve", lost, formula, source))
        return MemoryLedger(rank, self.scenario.stages_of_rank[rank], tuple(lines), cluster.memory_bytes)

    def _states(self, rank: int) -> tuple[LedgerLine, ...]:
        scenario, layout = self.scenario, self.scenario.layout
        shares = state_shares(layout.sharding, layout.shard_size * layout.context_parallel_size)
        if scenario.stack.plain_sharding and layout.sharding != "zero3":
            shares = replace(shares, gradients=1)
        blocks = scenario.blocks_of(rank) * scenario.block_parameters
        ends = sum(self._end_parameters[stage] for stage in scenario.stages_of_rank[rank])
        lines = _state_lines(scenario.numerics, shares, blocks, ends)
        return (*lines, *self._casts(rank))

    def _casts(self, rank: int) -> Iterator[LedgerLine]:
        """16-bit images of weights that products take: kept with the activations of each micro-batch, or for the whole step."""
        scenario, each = self.scenario, self.scenario.numerics.cast_bytes
        if not each:
            return
        head = _vocabulary(scenario) if self._has_head(rank) else 0.0
        stages = len(scenario.stages_of_rank[rank])
        split = self._split(rank) is not None  # products are cast again in the backward pass
        count = scenario.blocks_of(rank) * scenario.block_parameters / (stages if split else 1) + head
        times = self.in_flight(rank) / stages if scenario.layout.activation_checkpoint == "none" and not split else 1.0
        formula = f"{each:g} B x {count:,.0f} parameters of products x {times:g} micro-batches"
        yield LedgerLine("casts for products", "copies", each * count * times, formula, "torch.autocast, a cast a forward pass")

    def _activations(self, rank: int) -> Iterator[LedgerLine]:
        """Held from the forward to the backward pass, as often as micro-batches are in flight."""
        scenario, layout, width, in_flight = self.scenario, self.scenario.layout, self.width, self.in_flight(rank)
        stages, wide, split = scenario.stages_of_rank[rank], scenario.numerics.stream_bytes, scenario.sequence_split
        per_stage = scenario.blocks_of(rank) / len(stages)
        kept, halves = self.activations.kept, self._split(rank)
        if halves is not None:
            in_flight, waiting, heads = halves.in_flight, halves.waiting, halves.heads
            held = split_pass_bytes(scenario) * per_stage * waiting + head_split_bytes(scenario) * heads
            formula = f"products' inputs, gradients of outputs: {per_stage:g} blocks x {waiting} waiting, {heads} heads"
            yield LedgerLine("kept for weight passes", "activations", held, formula, "arXiv:2401.10241 section 2; counted")
        formula = (
            f"{kept / width:.2f} B x {scenario.tokens:,.0f} tokens x {scenario.shape.hidden_size} "
            f"x {per_stage:g} blocks a stage x {in_flight} in flight"
        )
        yield LedgerLine("kept, blocks", "activations", kept * per_stage * in_flight, formula, _ACTIVATIONS)
        if scenario.stack.dropout and 0 in stages:
            held = width / split * min(in_flight, scenario.layout.pipeline_parallel_size)
            yield LedgerLine("embedding dropout", "activations", held, "1 B x T h p", "arXiv:2205.05198 section 4.3")
        if scenario.layout.num_stages > 1 and not scenario.stack.scatter_sends:
            source = "torch.distributed.pipelining keeps a stage's output until its backward pass"
            formula = f"{wide:g} B x T h x {in_flight} in flight"
            yield LedgerLine("stage outputs", "activations", width * wide / split * in_flight, formula, source)
        if scenario.stack.plain_sharding and not scenario.shape.learned_positions and layout.num_stages > 1:
            rows = scenario.shape.sequence_length / layout.context_parallel_size
            held = 2 * scenario.numerics.stream_bytes * rows * scenario.shape.head_size * in_flight
            formula = (
                f"{2 * scenario.numerics.stream_bytes:g} B x {rows:,.0f} x {scenario.shape.head_size} x {in_flight} in flight"
            )
            yield LedgerLine("rotary tables", "activations", held, formula, "arXiv:2104.09864, made once a stage")
        if self._has_head(rank):
            each = 8.0 + scenario.numerics.compute_bytes if scenario.stack.plain_sharding else 2 * wide
            source = "arXiv:2205.05198 section 4.3"
            yield LedgerLine("final norm and head input", "activations", each * width / split, f"{each:g} B x T h", source)

    def _split(self, rank: int) -> SplitWork | None:
        """Under a split backward pass, the worst moment."""
        return split_work(self.scenario, rank, self.activations.kept, self._logits(rank), self._work(rank))

    def _work(self, rank: int) -> float:
        """Bytes of what a backward pass makes of one block and gives up again."""
        scenario, stack, split = self.scenario, self.scenario.stack, self.scenario.layout.tensor_parallel_size
        at_once = 1.0 if stack.plain_sharding else 2.0  # counted of our own, estimated of others
        gradients = at_once * (scenario.shape.intermediate_size / split + at_once / 2 * scenario.shape.hidden_size)
        gradients *= scenario.tokens * scenario.numerics.compute_bytes
        if stack.plain_sharding and scenario.schedule.uses_weight_pass and scenario.layout.pipeline_parallel_size > 1:
            gradients = passing_bytes(scenario, rank)
        if stack.plain_sharding and split > 1:  # an input made whole for split products, and a partial sum of their outputs
            gradients += self.width * (scenario.numerics.stream_bytes + scenario.numerics.compute_bytes)
        return self.activations.whole - self.activations.kept + gradients

    def _passing(self, rank: int) -> Iterator[LedgerLine]:
        """What comes and goes: the loss at the end of the forward pass, one block's work in the backward pass."""
        scenario, stack, logits = self.scenario, self.scenario.stack, self._logits(rank)
        split = scenario.layout.tensor_parallel_size
        halves, work = self._split(rank), self._work(rank)
        if halves is not None:
            logits, work = logits if halves.at_loss else 0.0, work if halves.at_work else 0.0
        if logits:
            columns = scenario.shape.vocab_size / split
            formula = f"{logits / scenario.tokens / columns:g} B x {scenario.tokens:,.0f} tokens x {columns:,.0f} words"
            yield LedgerLine("logits and loss", "logits", logits, formula, _MEASURED)
        formula = f"recomputed block and gradients of its MLP, {work:,.0f} B, beyond the loss, which is gone by then"
        yield LedgerLine("work of one block", "activations", max(0.0, work - logits), formula, "arXiv:2205.05198 section 5")
        if stack.plain_sharding and scenario.layout.sharding != "zero3":
            yield from self._vocabulary_gradient(rank, max(work, logits))

    def _vocabulary_gradient(self, rank: int, other: float) -> Iterator[LedgerLine]:
        """Gradients of the head's and the embedding's weights before they are added to `.grad`: counted (`--dry-run`).

        The head's are made beside all that blocks keep, the embedding's when blocks of that micro-batch have gone.

        Args:
            rank: pipeline rank.
            other: what the loss or a block needs at another moment.
        """
        scenario, numerics, weights = self.scenario, self.scenario.numerics, _vocabulary(self.scenario)
        size, count = numerics.parameter_bytes, 1
        head = embedding = 0.0
        if self._has_head(rank):  # a 16-bit product's is made in 16 bit, then cast; else beside the gradient of the logits
            columns = scenario.shape.vocab_size / scenario.layout.tensor_parallel_size
            logits = 0.0 if numerics.cast_bytes else numerics.compute_bytes * scenario.tokens * columns
            gathered = self.width * numerics.stream_bytes * (1.0 - 1.0 / scenario.sequence_split)
            head = (size + numerics.cast_bytes) * weights + logits + gathered
        if 0 in scenario.stages_of_rank[rank]:
            count = 3 if self._has_head(rank) and scenario.shape.tied_embeddings else 1  # of both uses, and their sum
            blocks = scenario.blocks_of(rank) / len(scenario.stages_of_rank[rank])
            embedding = count * size * weights - self.activations.kept * blocks
        formula = f"{weights:,.0f} weights: {size + numerics.cast_bytes:g} B the head's, {count * size:g} B the embedding's"
        held = max(head, embedding) - other
        if held > 0:
            yield LedgerLine(
                "gradient of the vocabulary", "activations", held, f"{formula}, beyond the loss", "autograd, counted"
            )

    def _messages(self, rank: int) -> Iterator[LedgerLine]:
        """Whole units under `zero3`, and what is on the way to other ranks."""
        scenario, layout, numerics = self.scenario, self.scenario.layout, self.scenario.numerics
        block = scenario.block_parameters
        if scenario.stack.plain_sharding:
            yield from self._packed(rank)
        elif layout.sharding == "zero3" and layout.state_shards > 1:
            ends = max(self._end_parameters[stage] for stage in scenario.stages_of_rank[rank])
            units = 2 * block + ends
            held = units * numerics.gather_bytes + max(block, ends) * numerics.reduce_bytes
            formula = f"{numerics.gather_bytes:g} B x {units:,.0f} weights of two blocks and the ends, gradients of one unit"
            yield LedgerLine("gathered units", "gathered", held, formula, "arXiv:2304.11277 section 4")
        if layout.world_size > 1 and not scenario.stack.plain_sharding:
            held = 2.0 * min(BUCKET_BYTES, scenario.blocks_of(rank) * block * numerics.reduce_bytes)
            yield LedgerLine("two reduction buckets", "buffers", held, "2 x 32 MiB", "distributed.coalesced")

    def _packed(self, rank: int) -> Iterator[LedgerLine]:
        """One unit at a time under `zero3`: whole, packed for its gather, and its gradient. Other packing waits until activations
        have gone, which are larger."""
        scenario, layout, numerics = self.scenario, self.scenario.layout, self.scenario.numerics
        if layout.sharding != "zero3" or layout.shard_size == 1:
            return
        ends = [self._end_parameters[stage] for stage in scenario.stages_of_rank[rank]]
        unit = (
            max(scenario.block_parameters, *ends)
            if layout.num_stages > 1
            else max(scenario.block_parameters, _vocabulary(scenario))
        )
        source = "parallel.sharding.zero3"
        formula = f"x {unit:,.0f} weights of the largest unit"
        yield LedgerLine(
            "gathered unit", "gathered", unit * numerics.gather_bytes, f"{numerics.gather_bytes:g} B {formula}", source
        )
        yield LedgerLine(
            "gradient of one unit",
            "gradients",
            unit * numerics.gradient_bytes,
            f"{numerics.gradient_bytes:g} B {formula}",
            source,
        )
        packed = max(0.0, 2 * unit * numerics.gather_bytes - self._logits(rank))
        formula = f"2 x {numerics.gather_bytes:g} B {formula}, beyond the loss"
        yield LedgerLine("packed unit", "buffers", packed, formula, source)

    def _logits(self, rank: int) -> float:
        """Bytes of the logits and of what the loss makes of them, on the rank that has them."""
        scenario, stack, split = self.scenario, self.scenario.stack, self.scenario.layout.tensor_parallel_size
        if not self._has_head(rank):
            return 0.0
        each = stack.logits_bytes + (stack.split_logits_bytes if split > 1 else 0.0)
        if stack.plain_sharding:
            each = OWN_LOGITS_BYTES[scenario.numerics.compute_bytes, scenario.numerics.stream_bytes][split > 1]
        return each * scenario.tokens * scenario.shape.vocab_size / split

    def _has_head(self, rank: int) -> bool:
        return self.scenario.layout.num_stages - 1 in self.scenario.stages_of_rank[rank]


def _vocabulary(scenario: Scenario) -> float:
    """Weights of the embedding, and of the head as well."""
    shape = scenario.shape
    return shape.vocab_size * shape.hidden_size / scenario.layout.tensor_parallel_size


@lru_cache(maxsize=4096)
def _state_lines(numerics: Numerics, shares: StateShares, blocks: float, ends: float) -> tuple[LedgerLine, ...]:
    """Weights, gradients, optimizer states and copies of `blocks` and `ends` parameters."""
    kinds = (
        ("weights", "parameters", numerics.parameter_bytes, shares.parameters),
        ("gradients", "gradients", numerics.gradient_bytes, shares.gradients),
        ("optimizer states", "optimizer", numerics.moment_bytes, shares.optimizer),
        ("fp32 masters", "copies", numerics.master_bytes, shares.optimizer),
    )
    lines = []
    for what, category, each, share in kinds:
        for where, count in (("blocks", blocks), ("embedding and head", ends)):
            if each and count:
                formula = f"{each:g} B x {count:,.0f} parameters / {share} ranks"
                lines.append(LedgerLine(f"{what}, {where}", category, each * count / share, formula, _ZERO))
    return tuple(lines)


def memory_ledger(scenario: Scenario, rank: int) -> MemoryLedger:
    """The ledger of pipeline rank `rank`."""
    return LedgerMaker(scenario).ledger(rank)


def memory_ledgers(scenario: Scenario) -> tuple[MemoryLedger, ...]:
    """The ledgers of all pipeline ranks."""
    maker = LedgerMaker(scenario)
    return tuple(maker.ledger(rank) for rank in range(scenario.layout.pipeline_parallel_size))


def peak_ledger(scenario: Scenario) -> MemoryLedger:
    """The ledger of the pipeline rank that holds most."""
    return largest(memory_ledgers(scenario))


def likely_peak_ledger(scenario: Scenario, stop_above: bool = False) -> MemoryLedger:
    """As `peak_ledger`, looking only where the peak is: the first two ranks (most in flight) and the last (the logits).

    Args:
        stop_above: the first rank that does not fit is answer enough.
    """
    maker, last = LedgerMaker(scenario), scenario.layout.pipeline_parallel_size - 1
    ledgers = []
    for rank in sorted({0, min(1, last), last}):
        ledgers.append(maker.ledger(rank))
        if stop_above and not ledgers[-1].fits:
            return ledgers[-1]
    return largest(ledgers)
