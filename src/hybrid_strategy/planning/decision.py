"""The rules by which people choose a layout, with the numbers of this model and these machines filled in.

Three questions: does it fit one GPU; must the model itself be split; what does the network allow. Then the advice that follows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, gcd

from hybrid_strategy.planning.choices import divisors
from hybrid_strategy.planning.forecast import Forecast
from hybrid_strategy.planning.memory import peak_ledger, states_bytes_per_parameter
from hybrid_strategy.planning.roofline import peak_flops
from hybrid_strategy.planning.search import Question
from hybrid_strategy.spec.cluster import ClusterSpec
from hybrid_strategy.spec.layout import Layout
from hybrid_strategy.units import format_bytes, format_count, format_seconds

EXPECTED_MFU = (("V100", 0.30), ("A100", 0.45), ("H100", 0.35), ("H200", 0.35), ("B200", 0.30), ("GB200", 0.30), ("MI300", 0.30))
"""MFU below which a large dense run deserves a look, by kind of GPU: the lower part of published runs (A100 45, H100 35)."""

SLOW_RECOMPUTATION = 0.30
"""A step that full recomputation makes longer by more than this has another cause (measured: 21-32 %)."""


@dataclass(frozen=True)
class Rule:
    """One row: what is asked, the numbers, the answer."""

    question: str
    numbers: str
    answer: str


def bubble_of(pipeline_size: int, num_microbatches: int, stages_per_rank: int = 1) -> float:
    """Idle share of a 1F1B step, (p-1)/(v m+p-1) (arXiv:2104.04473 section 2.2).

    >>> [round(bubble_of(8, m), 3) for m in (8, 32, 64, 128)]
    [0.467, 0.179, 0.099, 0.052]
    """
    return (pipeline_size - 1) / (stages_per_rank * num_microbatches + pipeline_size - 1)


def microbatches_for(pipeline_size: int, bubble: float) -> int:
    """Micro-batches for a bubble of at most `bubble`: m = k p.

    >>> microbatches_for(8, 0.1), microbatches_for(8, 0.2)
    (63, 28)
    """
    return ceil(round((pipeline_size - 1) * (1 - bubble) / bubble, 6))


def tokens_to_hide_reduction(flops_per_second: float, bytes_per_second: float, gradient_bytes: float = 2.0) -> float:
    """Tokens a GPU between two reductions behind which the all-reduce hides: g F / (2 B).

    2 g N bytes against a backward pass of 4 N FLOPs a token. A100 at 150 TFLOP/s and 25 GB/s, H100 at 400 and 50:

    >>> tokens_to_hide_reduction(150e12, 25e9), tokens_to_hide_reduction(400e12, 50e9)
    (6000.0, 8000.0)
    """
    return gradient_bytes * flops_per_second / (2 * bytes_per_second)


def expected_mfu(cluster: ClusterSpec) -> float:
    """MFU to expect of a well-set run; 0 for a GPU of which nothing is known.

    >>> from dataclasses import replace
    >>> expected_mfu(ClusterSpec()), expected_mfu(replace(ClusterSpec(), gpu="GB200-186GB")), expected_mfu(ClusterSpec(gpu="?"))
    (0.45, 0.3, 0.0)
    """
    return next((value for name, value in EXPECTED_MFU if name in cluster.gpu), 0.0)


def decision_table(question: Question, winner: Forecast | None = None) -> list[Rule]:
    """The three questions and the advice; with `winner` also what the chosen layout makes of them."""
    rules = [_one_gpu(question), _split(question), _topology(question), _hide(question)]
    return rules + (_chosen(question, winner) if winner is not None else [])


def _one_gpu(question: Question) -> Rule:
    shape, numerics, cluster = question.shape, question.numerics, question.cluster
    states = shape.num_parameters * numerics.state_bytes
    alone = replace(question.scenario(Layout(activation_checkpoint="full"), 1), schedule_part=None)
    alone = replace(alone, batch=replace(alone.batch, num_microbatches=question.global_batch_size))
    least = peak_ledger(alone).total_bytes
    numbers = (
        f"{format_count(shape.num_parameters)} parameters x {numerics.state_bytes:g} B = {format_bytes(states)} of states, "
        f"{format_bytes(least)} with one sample, all recomputed; a GPU has {format_bytes(cluster.memory_bytes)}"
    )
    fits = least <= cluster.memory_bytes
    answer = "yes: data parallelism alone will do" if fits else "no: shard the states first, then split the model"
    return Rule("Does it fit one GPU?", numbers, answer)


def _split(question: Question) -> Rule:
    shape, cluster, world = question.shape, question.cluster, question.processes
    late = question.stack.plain_sharding
    least = {sharding: _ways(question, sharding) for sharding in (("zero1", "zero3") if late else ("zero1", "zero2", "zero3"))}
    wanted = ", ".join(f"{sharding} {ways or f'more than {world}'}" for sharding, ways in least.items())
    numbers = f"ways to split the model so that states fill at most 60 % of a GPU, {world} processes: {wanted}"
    ways = least["zero1" if late else "zero2"] or world
    if ways == 1:
        return Rule(
            "Must the model be split?",
            numbers,
            f"no: {'zero1' if late else 'zero1 or zero2'} over the data-parallel ranks is enough",
        )
    inside = max(each for each in divisors(gcd(ways, shape.kv_heads)) if each <= cluster.domain_size)
    beyond = f", pipeline parallelism for the other {ways // inside}" if ways > inside else ""
    return Rule("Must the model be split?", numbers, f"yes, {ways} ways: tensor parallelism up to {inside} in the node{beyond}")


def _ways(question: Question, sharding: str) -> int:
    """The fewest parts, by doubling, of which one's states fill at most 60 % of a GPU; 0: not even one a process does."""
    ways = 1
    while _share(question, sharding, ways) > 0.6 * question.cluster.memory_bytes:
        ways *= 2
        if ways > question.processes:
            return 0
    return ways


def _share(question: Question, sharding: str, ways: int) -> float:
    shards = max(1, question.processes // ways)
    each = states_bytes_per_parameter(question.numerics, sharding, shards)
    return each * question.shape.num_parameters / ways


def _topology(question: Question) -> Rule:
    shape, cluster = question.shape, question.cluster
    near, far = cluster.intra_node.effective_bytes_per_second(), cluster.inter_node.effective_bytes_per_second()
    numbers = (
        f"{cluster.num_nodes} nodes x {cluster.gpus_per_node} GPUs; a GPU reaches {near / 1e9:,.0f} GB/s in the node and "
        f"{far / 1e9:,.0f} GB/s between nodes; {shape.kv_heads} key-value heads, {shape.num_layers} layers"
    )
    most = max(size for size in range(1, cluster.domain_size + 1) if shape.kv_heads % size == 0)
    answer = f"tensor_parallel_size <= {most}, pipeline_parallel_size <= {min(shape.num_layers, question.processes)}"
    if cluster.num_nodes > 1 and near > 2 * far:
        answer += "; tensor parallelism must not leave the node, pipeline and data parallelism may"
    return Rule("What does the network allow?", numbers, answer)


def _hide(question: Question) -> Rule:
    cluster = question.cluster
    reached = peak_flops(question.scenario(Layout(), 1)) * (expected_mfu(cluster) or 0.4)
    link = cluster.inter_node if cluster.num_nodes > 1 else cluster.intra_node
    need = tokens_to_hide_reduction(reached, link.effective_bytes_per_second(), question.numerics.reduce_bytes)
    have = question.global_batch_size * question.shape.sequence_length / question.processes
    numbers = f"g F / (2 B) = {need:,.0f} tokens a GPU between reductions; a step has {have:,.0f}"
    enough = "enough work to hide it" if have >= need else "too little: a larger batch, or fewer data-parallel ranks"
    return Rule("Does the reduction of gradients hide behind computation?", numbers, enough)


def _chosen(question: Question, winner: Forecast) -> list[Rule]:
    layout, batch = winner.scenario.layout, winner.scenario.batch
    rules = []
    p, m = layout.pipeline_parallel_size, batch.num_microbatches
    if p > 1:
        wanted = microbatches_for(p, 0.1)
        numbers = f"p = {p}, m = {m}, v = {layout.stages_per_rank}: bubble {winner.step.bubble_fraction:.1%}"
        rules.append(Rule("How many micro-batches?", numbers, f"1F1B needs m = {wanted} ({wanted / p:.0f} p) for 10 %"))
    wide = question.numerics.compute_bytes >= 4
    expected = 0.0 if wide else expected_mfu(question.cluster)  # which is of runs in 16 bit
    numbers = f"forecast MFU {winner.mfu:.1%}, HFU {winner.hfu:.1%}, step {format_seconds(winner.step_seconds)}"
    answer = f"no published runs {'in 32 bit' if wide else 'of this GPU'} to compare"
    if expected:
        answer = f"look for the cause if the run is below {expected:.0%}"
    return [*rules, Rule("What utilisation to expect?", numbers, answer)]
