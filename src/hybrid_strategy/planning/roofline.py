"""Seconds of a block, of the embedding and of the head on one rank, kernel by kernel.

A product of m x k by k x n takes its FLOPs over what large products reach, plus the bytes it must read and write over the rate
of the memory: small and thin products get slower by themselves. What lies between products is bytes only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil

from hybrid_strategy.planning.flops import attention_score_flops
from hybrid_strategy.planning.scenario import Scenario

_ATTENTION_BACKWARD = 2.5
"""FLOPs of fused attention's backward pass over its forward pass: five products for two (arXiv:2205.14135 section 3.1)."""

ODD_FRACTION = 0.4
"""Share of the usual rate of a 16-bit product that is left where the columns of its result are odd: rows of an operand are then
not aligned to the 4 bytes that an asynchronous copy takes at least (PTX ISA, cp.async). On an A100 a head of 50,257 columns runs
at 86 TFLOP/s, of a half, a quarter and an eighth of them at 165 to 220 (vTrain f8dda847, hidden sizes 1,024 and 2,048)."""

VOCABULARY_MULTIPLE = 128
"""Rows of a rank's part of the vocabulary are filled up to a multiple of this where a stack does so (Megatron-LM,
`--make-vocab-size-divisible-by`)."""

OPERATORS_FRACTION = 0.45
"""Share of the products that `selective` by operators repeats: every second one (torchtitan, per-op)."""


@dataclass(frozen=True)
class PassSeconds:
    """Forward pass, the two halves of the backward pass, and what recomputation adds to it."""

    forward: float
    input_gradient: float
    weight_gradient: float
    recompute: float = 0.0

    @property
    def backward(self) -> float:
        return self.input_gradient + self.weight_gradient + self.recompute

    def times(self, count: float) -> PassSeconds:
        return PassSeconds(*(count * each for each in (self.forward, self.input_gradient, self.weight_gradient, self.recompute)))

    def plus(self, other: PassSeconds) -> PassSeconds:
        return PassSeconds(
            self.forward + other.forward,
            self.input_gradient + other.input_gradient,
            self.weight_gradient + other.weight_gradient,
            self.recompute + other.recompute,
        )


NOTHING = PassSeconds(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Roofline:
    """The kernels of one scenario on one rank."""

    scenario: Scenario

    @cached_property
    def _matmul_rate(self) -> float:
        kernels = self.scenario.cluster.kernels
        return peak_flops(self.scenario) * kernels.matmul_efficiency * self.scenario.stack.efficiency

    @cached_property
    def _block_matmul_rate(self) -> float:
        """FLOP/s of the blocks' products, which may be computed in 8 bit."""
        cluster = self.scenario.cluster
        if not self._eight_bit:
            return self._matmul_rate
        return cluster.peak_fp8_flops * cluster.kernels.fp8_efficiency * self.scenario.stack.efficiency

    @property
    def _eight_bit(self) -> bool:
        return self.scenario.numerics.fp8 and self.scenario.cluster.peak_fp8_flops > 0

    @cached_property
    def _memory_rate(self) -> float:
        cluster = self.scenario.cluster
        return cluster.memory_bytes_per_second * cluster.kernels.memory_efficiency

    def stream_seconds(self, num_bytes: float) -> float:
        """Time to move `num_bytes` through the GPU's memory."""
        return num_bytes / self._memory_rate

    def matmul_seconds(self, rows: float, inner: float, columns: float, in_block: bool = True) -> float:
        """Time of one product of (rows, inner) by (inner, columns)."""
        small = in_block and self._eight_bit
        rate = self._block_matmul_rate if small else self._matmul_rate
        wide = self.scenario.numerics.compute_bytes
        if wide == 2 and columns % 2 == 1 and not self.scenario.cluster.synchronous:
            rate *= ODD_FRACTION
        operand = 1.0 if small else wide
        moved = (rows * inner + inner * columns) * operand + rows * columns * wide
        stack = self.scenario.stack
        cast = (rows * inner + (0.0 if stack.fused_casts else inner * columns)) * stack.fp8_cast_bytes if small else 0.0
        return 2.0 * rows * inner * columns / rate + self.stream_seconds(moved + cast)

    @cached_property
    def _products_forward(self) -> float:
        shape, split = self.scenario.shape, self.scenario.layout.tensor_parallel_size
        rows, h, f = self.scenario.tokens, shape.hidden_size, shape.intermediate_size / split
        q = shape.num_attention_heads * shape.head_size / split
        qkv = q + 2 * max(shape.kv_heads / split, 1) * shape.head_size
        up = self.matmul_seconds(rows, h, (2 if shape.gated_mlp else 1) * f)
        return self.matmul_seconds(rows, h, qkv) + self.matmul_seconds(rows, q, h) + up + self.matmul_seconds(rows, f, h)

    @cached_property
    def attention(self) -> tuple[float, float]:
        """Seconds of the scores, forward and backward."""
        scenario, stack = self.scenario, self.scenario.stack
        split = scenario.layout.tensor_parallel_size
        flops = attention_score_flops(scenario.shape, scenario.tokens) / split
        if stack.flash_attention:
            reached = scenario.cluster.kernels.attention_efficiency * head_efficiency(scenario.shape.head_size)
            rate = peak_flops(scenario) * reached * stack.efficiency
            return 0.5 * flops / rate, 0.5 * flops * _ATTENTION_BACKWARD / rate
        scores = scenario.tokens * scenario.shape.sequence_length * scenario.shape.num_attention_heads / split
        moved_forward, moved_backward = (13.0, 20.0) if stack.dropout else (8.0, 12.0)
        products = flops / self._matmul_rate
        return products + self.stream_seconds(scores * moved_forward), 2 * products + self.stream_seconds(scores * moved_backward)

    @cached_property
    def _between(self) -> tuple[float, float]:
        """Seconds of norms, residuals, dropout, activation function and copies, forward and backward."""
        scenario, shape = self.scenario, self.scenario.shape
        width = scenario.tokens * shape.hidden_size * scenario.numerics.compute_bytes
        whole, heads, mlp = _forward_passes(scenario)
        split = scenario.layout.tensor_parallel_size
        inner = heads + mlp * shape.intermediate_size / shape.hidden_size
        gathers = 4.0 if scenario.layout.sequence_parallel and split > 1 and scenario.stack.copies_gathered else 0.0
        moved = width * (whole / scenario.sequence_split + inner / split + gathers)
        return self.stream_seconds(moved), 2.0 * self.stream_seconds(moved)

    @cached_property
    def block(self) -> PassSeconds:
        """One block over one micro-batch, without communication."""
        products, (scores, scores_backward), (between, between_backward) = self._products_forward, self.attention, self._between
        return PassSeconds(
            products + scores + between,
            products + scores_backward + between_backward,
            products,
            self._recompute(products, scores, between),
        )

    def _recompute(self, products: float, scores: float, between: float) -> float:
        """What the backward pass repeats of a block's forward pass."""
        scenario, forward = self.scenario, products + scores + between
        kind = scenario.layout.activation_checkpoint
        if kind == "full":
            return forward
        if kind != "selective":
            return 0.0
        if scenario.recompute_fraction is not None:
            return scenario.recompute_fraction * forward
        kinds = {"attention": scores, "operators": OPERATORS_FRACTION * products + between, "products": between}
        return kinds[scenario.stack.selective]

    @cached_property
    def head(self) -> PassSeconds:
        """Final norm, output head and loss of one micro-batch."""
        scenario, shape = self.scenario, self.scenario.shape
        columns = float(shape.vocab_size // scenario.layout.tensor_parallel_size)
        if scenario.stack.pads_vocabulary:
            columns = ceil(columns / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        product = self.matmul_seconds(scenario.tokens, shape.hidden_size, columns, in_block=False)
        loss = self.stream_seconds(scenario.stack.loss_bytes * scenario.tokens * columns)
        return PassSeconds(product + loss / 3, product + loss * 2 / 3, product)

    @cached_property
    def embedding(self) -> PassSeconds:
        """Look-up of one micro-batch, and its gradient."""
        shape = self.scenario.shape
        width = self.scenario.tokens * shape.hidden_size * self.scenario.numerics.compute_bytes
        return PassSeconds(self.stream_seconds(3 * width), 0.0, self.stream_seconds(4 * width))

    def optimizer_seconds(self, parameters: float) -> float:
        """Clipping and update of `parameters` parameters."""
        numerics = self.scenario.numerics
        states = 2 * ((numerics.master_bytes or numerics.parameter_bytes) + numerics.moment_bytes)
        moved = states + 2 * numerics.gradient_bytes + (numerics.parameter_bytes if numerics.master_bytes else 0)
        return self.stream_seconds(parameters * moved * self.scenario.stack.optimizer_passes)


def peak_flops(scenario: Scenario) -> float:
    """Peak of the type that activations have, FLOP/s of one GPU."""
    cluster = scenario.cluster
    wide = scenario.numerics.compute_bytes >= 4
    return (cluster.peak_fp32_flops or cluster.peak_flops) if wide else cluster.peak_flops


def head_efficiency(head_size: int) -> float:
    """Share of the rate at a head of 128 that fused attention reaches: small heads spend more on the exponentials.

    FlashAttention-2 on A100 reaches about 190 TFLOP/s at 64 and 220 at 128 (arXiv:2307.08691 figure 5).

    >>> [round(head_efficiency(size), 2) for size in (64, 128, 256)]
    [0.86, 1.0, 1.09]
    """
    return head_size / (head_size + 24.0) / (128.0 / 152.0)


def _forward_passes(scenario: Scenario) -> tuple[float, float, float]:
    """Reads and writes of one block's forward pass: of the hidden size where it is whole, per head, and per MLP column."""
    stack, gated = scenario.stack, scenario.shape.gated_mlp
    norm = 2.0 if stack.fused_norms or not gated else 18.0
    residual = 3.5 if stack.dropout else (2.0 if stack.fused_activations else 3.0)
    rotary = (4.0 if stack.fused_activations else 12.0) if gated else 4.0
    activation = (3.0 if stack.fused_activations else 5.0) if gated else 2.0
    return 2 * norm + 2 * residual, rotary, activation
