"""The communication bill of one step: what each axis moves, how long it takes, and how much of that nothing hides.

Volumes a micro-batch of T = b s / c tokens and hidden size h (arXiv:2205.05198 section 4.2, arXiv:2104.04473 section 3,
arXiv:1910.02054 section 7):

- tensor parallel: 2 all-reduces a block forward and 2 backward of T h elements, 2 more under full recomputation; under sequence
  parallelism each is an all-gather and a reduce-scatter of the same volume;
- pipeline: T h a boundary and way;
- context parallel: keys and values gathered forward and backward, their gradients scattered;
- data parallel, once a step: an all-reduce of the gradients, or as much as reduce-scatter and all-gather (ZeRO 1, 2); ZeRO 3
  gathers weights twice and scatters gradients once a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hybrid_strategy.planning.links import GroupLink, sent_bytes
from hybrid_strategy.planning.placement import Placement
from hybrid_strategy.planning.scenario import Scenario
from hybrid_strategy.spec.bill import BillLine, CommunicationBill

OVERLAP_COST = 0.18
"""Share of a hidden message's time that it still costs: it takes processors and memory from the kernels beside it."""


@dataclass(frozen=True)
class Windows:
    """Seconds of computation of one rank in one step, behind which messages may hide."""

    forward: float
    backward: float
    first_forward: float
    last_backward: float
    attention: float = 0.0


@dataclass(frozen=True)
class Purpose:
    """Why something is sent: the axis, what it is, how its volume is counted and where that is from."""

    axis: str
    what: str
    formula: str
    source: str


@dataclass(frozen=True)
class Messages:
    """Makes the lines of one scenario; `rank` is the pipeline rank whose messages are counted."""

    scenario: Scenario
    rank: int = 0

    @property
    def placement(self) -> Placement:
        return Placement(self.scenario.layout, self.scenario.cluster)

    @property
    def calls(self) -> int:
        """Micro-batches of an optimizer step."""
        return self.scenario.batch.num_microbatches * self.scenario.batch.accumulate_grad_batches

    @property
    def layers(self) -> int:
        return self.scenario.blocks_of(self.rank)

    @property
    def width_bytes(self) -> float:
        """One activation of the hidden size over one micro-batch."""
        return self.scenario.tokens * self.scenario.shape.hidden_size * self.scenario.numerics.compute_bytes

    def line(self, purpose: Purpose, collective: str, link: GroupLink, calls: float, payload: float) -> BillLine:
        """One line, exposed in full until something hides it."""
        seconds = calls * link.seconds(collective, payload)
        return BillLine(
            axis=purpose.axis,
            what=purpose.what,
            collective=collective,
            group_size=link.size,
            level=link.level,
            calls=calls,
            payload_bytes=payload,
            sent_bytes=calls * sent_bytes(collective, payload, link.size),
            seconds=seconds,
            exposed_seconds=seconds,
            formula=purpose.formula,
            source=purpose.source,
        )

    # -- inside a micro-batch -------------------------------------------------------------------------------------------

    def tensor_parallel(self) -> list[BillLine]:
        """Messages of the blocks, the embedding's and the head's, the loss's; gradients of norms under sequence parallelism."""
        scenario, link = self.scenario, self.placement.link("tensor_parallel")
        if link.size == 1:
            return []
        kinds = ("all_gather", "reduce_scatter") if scenario.layout.sequence_parallel else ("all_reduce",)
        formula = f"(4 + 2 if recomputed) L m {' and '.join(kind.replace('_', '-') + 's' for kind in kinds)} of b s h elements"
        purpose = Purpose("tensor_parallel", "activations", formula, "arXiv:2205.05198 section 4.2")
        lines = []
        for kind in kinds:
            wide, narrow = self._tensor_calls(kind)
            elements = wide * scenario.numerics.stream_bytes + narrow * scenario.numerics.compute_bytes
            mean = elements / (wide + narrow) / scenario.numerics.compute_bytes * self.width_bytes
            lines.append(self.line(purpose, kind, link, self.calls * (wide + narrow), mean))
        return [*lines, *self._tensor_extras(link)]

    def _tensor_calls(self, kind: str) -> tuple[float, float]:
        """Messages a micro-batch: what enters products (as wide as what is between blocks), and what leaves them."""
        scenario = self.scenario
        ends = sum(stage in (0, scenario.layout.num_stages - 1) for stage in set(scenario.stages_of_rank[self.rank]))
        ends += 1 if scenario.layout.num_stages == 1 else 0
        early = scenario.stack.plain_sharding  # torch's checkpoint ends before the last message, which nothing waits for
        again = {"full": (2, 1 if early else 2), "selective": (2 if early else 0, 0)}.get(
            scenario.layout.activation_checkpoint, (0, 0)
        )
        enters, leaves = (2 + again[0], 2) if kind == "all_gather" else (2, 2 + again[1])
        return enters * self.layers + ends, leaves * self.layers

    def _tensor_extras(self, link: GroupLink) -> list[BillLine]:
        """Small messages: the soft-max over a split vocabulary, and gradients of what sequence parallelism holds whole."""
        scenario, lines = self.scenario, []
        if not scenario.stack.plain_sharding:
            return []
        if scenario.layout.num_stages - 1 in scenario.stages_of_rank[self.rank]:
            purpose = Purpose(
                "tensor_parallel", "soft-max statistics", "8 B a token and rank, m times", "arXiv:1909.08053 section 3"
            )
            lines.append(self.line(purpose, "all_gather", link, self.calls, 8 * link.size * scenario.tokens))
        if scenario.layout.sequence_parallel:
            norms = self.layers * scenario.shape.hidden_size * (6 if scenario.shape.bias else 2)
            if scenario.layout.num_stages - 1 in scenario.stages_of_rank[self.rank]:
                norms += scenario.shape.hidden_size * (2 if scenario.shape.bias else 1)
            purpose = Purpose(
                "tensor_parallel", "gradients of norms", "g N of what is held whole", "arXiv:2205.05198 section 4.2.2"
            )
            lines.append(self.line(purpose, "all_reduce", link, 1, norms * scenario.numerics.reduce_bytes))
        return lines

    def context_parallel(self) -> list[BillLine]:
        """Keys and values gathered in both passes, their gradients scattered."""
        scenario, link = self.scenario, self.placement.link("context_parallel")
        if link.size == 1:
            return []
        shape, split = scenario.shape, scenario.layout.tensor_parallel_size
        pair = 2 * shape.kv_heads * shape.head_size / split * scenario.tokens * link.size * scenario.numerics.compute_bytes
        formula, source = "keys and values of s tokens, L m times", "arXiv:2407.21783 section 3.3.2"
        forward = Purpose("context_parallel", "keys and values", formula, source)
        backward = Purpose("context_parallel", "gradients of keys and values", formula, source)
        calls = self.calls * self.layers
        return [
            self.line(forward, "all_gather", link, calls * 2, pair),
            self.line(backward, "reduce_scatter", link, calls, pair),
        ]

    def pipeline_parallel(self) -> list[BillLine]:
        """One message a stage boundary, micro-batch and way."""
        scenario, link = self.scenario, self.placement.link("pipeline_parallel")
        if link.size == 1:
            return []
        formula = "m messages a stage boundary and way of b s h elements (/t under sequence parallelism)"
        purpose = Purpose("pipeline_parallel", "activations and gradients", formula, "arXiv:2104.04473 section 3.2")
        scattered = scenario.layout.tensor_parallel_size if scenario.stack.scatter_sends else 1
        wide = self.width_bytes * scenario.numerics.stream_bytes / scenario.numerics.compute_bytes
        line = self.line(purpose, "send", link, self.calls * self._sends(), wide / max(scenario.sequence_split, scattered))
        return [replace(line, exposed_seconds=0.0)]

    def _sends(self) -> int:
        """Messages of this rank a micro-batch: forward from each of its stages but the last, backward from each but the first."""
        scenario = self.scenario
        owner = {stage: rank for rank, stages in enumerate(scenario.stages_of_rank) for stage in stages}
        mine = scenario.stages_of_rank[self.rank]
        return sum(owner.get(stage + way, self.rank) != self.rank for stage in mine for way in (1, -1))

    # -- once a step, or gathered with each micro-batch -----------------------------------------------------------------

    def data_parallel(self) -> list[BillLine]:
        """The gradient reduction and, under ZeRO, the weights."""
        placed, numerics = self.placement, self.scenario.numerics
        parameters = self.scenario.rank_parameters(self.rank)
        lines = self._sharded(parameters) if placed.shards.size > 1 else []
        if placed.replicas.size > 1:
            axis = "data_parallel_replicate" if placed.shards.size > 1 else "data_parallel"
            payload = parameters * numerics.reduce_bytes / placed.shards.size
            source = "arXiv:1910.02054 section 7.1, arXiv:2304.11277 section 3.2.2"
            purpose = Purpose(axis, "gradients", "2 (n-1)/n g N", source)
            lines.append(self.line(purpose, "all_reduce", placed.replicas, 1, payload))
        return lines

    def _sharded(self, parameters: float) -> list[BillLine]:
        numerics, link, axis = self.scenario.numerics, self.placement.shards, "data_parallel_shard"
        third = self.scenario.layout.sharding == "zero3"
        units = self.layers + 1 if third else 1
        times = self.calls * units if third else 1
        weights, gradients = parameters * numerics.gather_bytes / units, parameters * numerics.reduce_bytes / units
        source = "arXiv:1910.02054 section 7.2"
        gather = Purpose(axis, "weights", f"(n-1)/n w N{', twice a micro-batch' if third else ''}", source)
        scatter = Purpose(axis, "gradients", f"(n-1)/n g N{', once a micro-batch' if third else ''}", source)
        return [
            self.line(gather, "all_gather", link, times * (2 if third else 1), weights),
            self.line(scatter, "reduce_scatter", link, times, gradients),
        ]


def hidden_behind(line: BillLine, window: float) -> BillLine:
    """The line with what does not fit into `window` seconds of computation exposed, and the cost of the overlap."""
    hidden = min(line.seconds, window)
    return replace(line, exposed_seconds=line.seconds - hidden + OVERLAP_COST * hidden)


def communication_bill(scenario: Scenario, windows: Windows, rank: int = 0) -> CommunicationBill:
    """All lines of one rank of pipeline rank `rank`, with what the stack overlaps hidden behind `windows`."""
    messages = Messages(scenario, rank)
    shown = 1.0 - scenario.stack.tensor_overlap_fraction if scenario.layout.sequence_parallel else 1.0
    lines = [replace(line, exposed_seconds=line.seconds * shown) for line in messages.tensor_parallel()]
    lines += [hidden_behind(line, windows.attention / 2) for line in messages.context_parallel()]
    lines += messages.pipeline_parallel()
    third = scenario.layout.sharding == "zero3"
    for line in messages.data_parallel():
        if third and scenario.stack.overlap_gather and line.axis == "data_parallel_shard":
            room = windows.forward + windows.backward / 2 if line.collective == "all_gather" else windows.backward / 2
            line = hidden_behind(line, room)
        elif (third and scenario.stack.overlap_gather) or scenario.stack.overlap_reduce:
            line = hidden_behind(line, windows.first_forward if line.collective == "all_gather" else windows.last_backward)
        lines.append(line)
    return CommunicationBill(tuple(lines))
