"""From the user's batch settings to a batch, or a refusal that names the nearest valid values."""

from __future__ import annotations

from hybrid_strategy.errors import LayoutError, message
from hybrid_strategy.planning.choices import divisors, nearest, nearest_multiples, one_of
from hybrid_strategy.planning.refusals import check_whole, raise_if
from hybrid_strategy.spec.batch import BatchSpec
from hybrid_strategy.spec.layout import Layout
from hybrid_strategy.spec.schedule import Refusal

MICROBATCHES_PER_RANK = 4
"""Micro-batches a pipeline rank gets where none are asked for: a bubble of about a fifth (arXiv:1811.06965, section 2.3)."""


def resolve_batch(
    layout: Layout,
    *,
    global_batch_size: int,
    num_microbatches: int | None = None,
    micro_batch_size: int | None = None,
    accumulate_grad_batches: int = 1,
) -> BatchSpec:
    """The batch of an optimizer step, checked against the layout.

    Args:
        layout: sizes of the run.
        global_batch_size: samples of an optimizer step over all ranks.
        num_microbatches: pieces that a data-parallel rank's batch is cut into. Uneven pieces are right; they differ by a row.
        micro_batch_size: rows of a piece, instead of `num_microbatches`. It must divide the rank's batch.
        accumulate_grad_batches: batches whose gradients are added up before the optimizer steps.

    Raises:
        LayoutError: sizes that do not fit each other.

    >>> resolve_batch(Layout(data_parallel_size=2), global_batch_size=16, micro_batch_size=4).num_microbatches
    2
    """
    if num_microbatches is not None and micro_batch_size is not None:
        rule = "it and num_microbatches say the same thing in two ways, so only one may be set"
        numbers = f"num_microbatches is {num_microbatches}"
        raise LayoutError(message("micro_batch_size", micro_batch_size, rule, numbers, "Set one and leave the other out"))
    whole = {"global_batch_size": global_batch_size, "accumulate_grad_batches": accumulate_grad_batches}
    given = {"num_microbatches": num_microbatches, "micro_batch_size": micro_batch_size}
    check_whole({**whole, **{key: size for key, size in given.items() if size is not None}})
    raise_if(_global_refusal(layout, global_batch_size, accumulate_grad_batches))
    rows = global_batch_size // (layout.data_parallel_size * accumulate_grad_batches)
    if micro_batch_size is not None:
        raise_if(_micro_batch_refusal(rows, micro_batch_size))
        num_microbatches = rows // micro_batch_size
    elif num_microbatches is None:
        num_microbatches = default_num_microbatches(rows, layout.pipeline_parallel_size)
    batch = BatchSpec(global_batch_size, num_microbatches, accumulate_grad_batches)
    raise_if(batch_refusal(layout, batch))
    return batch


def default_num_microbatches(rows: int, pipeline_size: int) -> int:
    """Micro-batches where none are asked for: whole ones where possible, enough of them to fill the pipeline.

    >>> [default_num_microbatches(rows, 2) for rows in (1, 4, 12, 13, 64)], default_num_microbatches(64, 1)
    ([1, 4, 6, 4, 8], 1)
    """
    if pipeline_size == 1:
        return 1
    even = max(each for each in divisors(rows) if each <= MICROBATCHES_PER_RANK * pipeline_size)
    return even if even >= pipeline_size else min(rows, 2 * pipeline_size)


def batch_refusal(layout: Layout, batch: BatchSpec) -> Refusal | None:
    """Why `batch` cannot be spread over `layout`; None when it can."""
    check_whole(vars(batch))
    refusal = _global_refusal(layout, batch.global_batch_size, batch.accumulate_grad_batches)
    if refusal:
        return refusal
    rows, pieces = batch.rank_batch_size(layout.data_parallel_size), batch.num_microbatches
    if pieces <= rows:
        return None
    rule = "a micro-batch must have a row, and a data-parallel rank's batch has fewer rows than that"
    shares = _shares(layout.data_parallel_size, batch.accumulate_grad_batches)
    numbers = f"{batch.global_batch_size} samples / ({shares}) = {rows} rows"
    return "num_microbatches", pieces, rule, numbers, f"Set {rows} or less, or a larger global_batch_size"


def _global_refusal(layout: Layout, global_batch_size: int, accumulate: int) -> Refusal | None:
    shares = layout.data_parallel_size * accumulate
    if global_batch_size % shares == 0:
        return None
    rule = "data_parallel_size x accumulate_grad_batches must divide it"
    numbers = f"{_shares(layout.data_parallel_size, accumulate)} = {shares} does not divide {global_batch_size}"
    advice = f"Set {one_of(nearest_multiples(global_batch_size, shares))}"
    return "global_batch_size", global_batch_size, rule, numbers, advice


def _micro_batch_refusal(rows: int, micro_batch_size: int) -> Refusal | None:
    if rows % micro_batch_size == 0:
        return None
    rule = "it must divide the batch of a data-parallel rank"
    advice = f"Set {one_of(nearest(divisors(rows), micro_batch_size))}"
    return "micro_batch_size", micro_batch_size, rule, f"{micro_batch_size} does not divide {rows} rows", advice


def _shares(data_parallel_size: int, accumulate: int) -> str:
    return f"data_parallel_size {data_parallel_size} x accumulate_grad_batches {accumulate}"
