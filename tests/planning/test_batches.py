from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_strategy.errors import LayoutError
from hybrid_strategy.planning.batches import default_num_microbatches, resolve_batch
from hybrid_strategy.spec.batch import BatchSpec
from hybrid_strategy.spec.layout import Layout

PP2, DP4 = Layout(pipeline_parallel_size=2), Layout(data_parallel_size=4)

REFUSED = [
    (
        DP4,
        {"global_batch_size": 10},
        "global_batch_size is 10: data_parallel_size x accumulate_grad_batches must divide it. "
        "data_parallel_size 4 x accumulate_grad_batches 1 = 4 does not divide 10. Set 8 or 12.",
    ),
    (DP4, {"global_batch_size": 3}, "4 does not divide 3. Set 4."),
    (DP4, {"global_batch_size": 16, "accumulate_grad_batches": 3}, "= 12 does not divide 16. Set 12 or 24."),
    (
        PP2,
        {"global_batch_size": 4, "num_microbatches": 5},
        "num_microbatches is 5: a micro-batch must have a row, and a data-parallel rank's batch has fewer rows than that. "
        "4 samples / (data_parallel_size 1 x accumulate_grad_batches 1) = 4 rows. Set 4 or less, or a larger global_batch_size.",
    ),
    (
        PP2,
        {"global_batch_size": 8, "num_microbatches": 4, "micro_batch_size": 2},
        "micro_batch_size is 2: it and num_microbatches say the same thing in two ways, so only one may be set. "
        "num_microbatches is 4. Set one and leave the other out.",
    ),
    (
        PP2,
        {"global_batch_size": 8, "micro_batch_size": 3},
        "micro_batch_size is 3: it must divide the batch of a data-parallel rank. 3 does not divide 8 rows. Set 1, 2, 4 or 8.",
    ),
    (PP2, {"global_batch_size": 8, "num_microbatches": 0}, "num_microbatches is 0: it must be a whole number of 1 or more."),
    (PP2, {"global_batch_size": 8, "micro_batch_size": 0}, "micro_batch_size is 0: it must be a whole number of 1 or more."),
    (PP2, {"global_batch_size": 0}, "global_batch_size is 0: it must be a whole number of 1 or more."),
    (PP2, {"global_batch_size": 8, "accumulate_grad_batches": 0}, "accumulate_grad_batches is 0: it must be a whole number"),
]


@pytest.mark.parametrize(("layout", "settings", "part"), REFUSED)
def test_batches_that_are_refused(layout: Layout, settings: dict[str, Any], part: str) -> None:
    with pytest.raises(LayoutError) as error:
        resolve_batch(layout, **settings)
    assert part in str(error.value)


def test_batches_that_pass() -> None:
    assert resolve_batch(PP2, global_batch_size=8, micro_batch_size=2) == BatchSpec(8, 4, 1)
    assert resolve_batch(PP2, global_batch_size=7, num_microbatches=5) == BatchSpec(7, 5, 1)
    assert resolve_batch(DP4, global_batch_size=48, accumulate_grad_batches=3) == BatchSpec(48, 1, 3)


@given(st.integers(1, 300), st.integers(1, 16))
def test_the_default_has_rows_for_every_micro_batch_and_fills_the_pipeline(rows: int, pipeline_size: int) -> None:
    count = default_num_microbatches(rows, pipeline_size)
    assert 1 <= count <= rows
    assert count == 1 if pipeline_size == 1 else count >= min(rows, pipeline_size)
