"""Bytes that one block keeps from its forward pass for its backward pass, for one micro-batch on one rank.

Everything is counted in elements a token and hidden unit, of T = b s / c tokens. A plain block with dropout and written scores
is the one of arXiv:2205.05198 (equations 1-4): 10 whole, 24 split over tensor-parallel ranks, 5 a s / h of scores, in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_strategy.planning.scenario import Scenario


@dataclass(frozen=True)
class BlockActivations:
    """Bytes of one block.

    Attributes:
        whole: kept if nothing is recomputed.
        kept: kept under the layout's activation checkpoint.
    """

    whole: float
    kept: float


def block_activations(scenario: Scenario) -> BlockActivations:
    """What one block keeps.

    GPT-3 175B on 8 tensor-parallel ranks, one sequence of 2,048 (arXiv:2205.05198 table 2), in units of b s h bytes: nothing
    saved 34 + 80, tensor parallel 10 + 24/8 + 80/8, with sequence parallelism 114/8, with selective recomputation 34/8, full 2.

    >>> from dataclasses import replace
    >>> from hybrid_strategy.planning.stacks import FUSED
    >>> from hybrid_strategy.spec.batch import BatchSpec
    >>> from hybrid_strategy.spec.layout import Layout
    >>> from hybrid_strategy.spec.model_shape import ModelShape
    >>> gpt3 = ModelShape(12288, 96, 96, 49152, 51200, 2048, gated_mlp=False)
    >>> def units(**layout):
    ...     found = block_activations(Scenario(gpt3, Layout(**layout), BatchSpec(1), stack=FUSED.classic()))
    ...     return round(found.kept / (2048 * 12288), 3)
    >>> units(), units(tensor_parallel_size=8), units(tensor_parallel_size=8, sequence_parallel=True)
    (114.0, 23.0, 14.25)
    >>> units(tensor_parallel_size=8, sequence_parallel=True, activation_checkpoint="selective")
    4.25
    >>> units(activation_checkpoint="full")
    2.0
    """
    width = scenario.tokens * scenario.shape.hidden_size
    whole, scores = _everything(scenario), _scores(scenario)
    kind = scenario.layout.activation_checkpoint
    kept = whole + scores
    if kind == "full":
        kept = _block_input(scenario)
    elif kind == "selective":
        kept = _selective(scenario, whole, scores)
    return BlockActivations(width * (whole + scores), width * min(kept, whole + scores))


def _block_input(scenario: Scenario) -> float:
    return scenario.numerics.stream_bytes / scenario.sequence_split


def _everything(scenario: Scenario) -> float:
    """Inputs of norms and products, queries, keys, values, activation function, dropout masks; without the scores."""
    shape, stack, wide = scenario.shape, scenario.stack, scenario.numerics.compute_bytes
    split, sequence = scenario.layout.tensor_parallel_size, scenario.sequence_split
    q, kv, f = _ratios(scenario)
    gathered = 1 if stack.copies_gathered and sequence > 1 else sequence
    masks = 2.0 if stack.dropout else 0.0
    outside = 2 * scenario.numerics.stream_bytes + masks + (0.0 if stack.fused_norms or not shape.gated_mlp else 8.0)
    if stack.plain_sharding and shape.gated_mlp:
        outside = 16.0  # counted: a norm keeps its input and what it makes of it in fp32, whatever the type of the stream
    inputs = _product_inputs(scenario)
    columns = 2
    if shape.gated_mlp:
        columns += 0 if stack.recomputes_cheap else 1 if stack.fused_activations else 2
    inside = wide * (2 * q + 2 * kv + columns * f)
    return outside / sequence + inputs / gathered + inside / split


def split_pass_bytes(scenario: Scenario) -> float:
    """What one block keeps of a micro-batch between the halves of a split backward pass: of each product its input and the
    gradient of its output (arXiv:2401.10241 section 2)."""
    shape, wide, split = scenario.shape, scenario.numerics.compute_bytes, scenario.layout.tensor_parallel_size
    q, kv, f = _ratios(scenario)
    gathered = 1 if scenario.stack.copies_gathered and scenario.sequence_split > 1 else scenario.sequence_split
    inputs = _product_inputs(scenario) / gathered + wide * (q + f) / split
    gradients = wide * ((q + 2 * kv + (2 if shape.gated_mlp else 1) * f) / split + 2)
    return scenario.tokens * shape.hidden_size * (inputs + gradients)


def head_split_bytes(scenario: Scenario) -> float:
    """What the output head keeps of a micro-batch between those halves: its input and the gradient of the logits."""
    shape, split = scenario.shape, scenario.layout.tensor_parallel_size
    gathered = 1 if scenario.stack.copies_gathered and scenario.sequence_split > 1 else scenario.sequence_split
    return scenario.tokens * scenario.numerics.compute_bytes * (shape.hidden_size / gathered + shape.vocab_size / split)


def _product_inputs(scenario: Scenario) -> float:
    """Inputs of a block's two groups of products: one each, or a cast for every product where they are cast on the spot."""
    wide = scenario.numerics.compute_bytes
    if scenario.numerics.stream_bytes == wide:
        return 2 * wide
    return (3 + (2 if scenario.shape.gated_mlp else 1)) * wide


def _scores(scenario: Scenario) -> float:
    """Soft-max and dropout of the scores, s each a token and head; fused attention keeps four bytes a token and head."""
    shape, stack = scenario.shape, scenario.stack
    heads = shape.num_attention_heads / scenario.layout.tensor_parallel_size / shape.hidden_size
    if stack.flash_attention:
        return 4.0 * heads
    wide = scenario.numerics.compute_bytes
    return heads * shape.sequence_length * (2 * wide + 1 if stack.dropout else wide)


def _selective(scenario: Scenario, whole: float, scores: float) -> float:
    """What is left under `selective`, by the kind of the stack (or by the known share of blocks that recompute)."""
    if scenario.recompute_fraction is not None:
        share = min(1.0, scenario.recompute_fraction)
        return (1 - share) * (whole + scores) + share * _block_input(scenario)
    kind, wide = scenario.stack.selective, scenario.numerics.compute_bytes
    if kind == "attention":
        return whole if not scenario.stack.flash_attention else whole + scores
    q, kv, f = _ratios(scenario)
    split, sequence = scenario.layout.tensor_parallel_size, scenario.sequence_split
    columns = 2 if scenario.shape.gated_mlp else 1
    products = ((q + 2 * kv + columns * f) / split + 2.0 / sequence) * wide
    if kind == "products" and split > 1:  # partial sums are kept whole, and what is left of them after their reduction
        products += 2.0 * wide
    attention = wide * q / split + (scores if scenario.stack.flash_attention else 0.0)
    return _block_input(scenario) + attention + (products if kind == "products" else products / 2)


def _ratios(scenario: Scenario) -> tuple[float, float, float]:
    """Width of queries, of keys and of the MLP over the hidden size."""
    shape = scenario.shape
    q = shape.num_attention_heads * shape.head_size / shape.hidden_size
    kv = shape.kv_heads * shape.head_size / shape.hidden_size
    return q, kv, shape.intermediate_size / shape.hidden_size
