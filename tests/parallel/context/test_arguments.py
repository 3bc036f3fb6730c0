"""Which dimension of an argument follows the sequence is told from its shape, learned, declared, or asked for."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from hybrid_strategy.errors import LayoutError, ModelError
from hybrid_strategy.parallel.context.arguments import Arguments, UnitCall
from hybrid_strategy.parallel.context.region import ContextRegion

ROWS, LENGTH = 3, 8
REGION = ContextRegion(cast(Any, None), 1, 2)
OWN = [2, 3, 4, 5]


def call_of(arguments: Arguments, rows: int = ROWS, **kwargs: Any) -> UnitCall:
    call = UnitCall.of(REGION, arguments, (torch.zeros(rows, LENGTH, 6),), kwargs)
    assert call is not None
    return call


SHAPES = [
    ((ROWS, LENGTH), 1),
    ((1, LENGTH), 1),
    ((LENGTH,), 0),
    ((LENGTH, 4), 0),
    ((1, LENGTH, 4), 1),
    ((ROWS, 1, LENGTH, 4), 2),
    ((ROWS, 1, LENGTH, LENGTH), 2),
    ((LENGTH, LENGTH), 0),
    ((ROWS, 1, 1, LENGTH), None),
    ((ROWS, 6), None),
    ((ROWS,), None),
    ((), None),
]


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_the_dimension_is_told_from_the_shape(shape: tuple[int, ...], dim: int | None) -> None:
    other = torch.arange(LENGTH).view([-1 if i == dim else 1 for i in range(len(shape))]) if dim is not None else torch.zeros(())
    other = other.expand(shape)
    (_, got), _ = call_of(Arguments(("x", "other"), {})).parts((torch.zeros(ROWS, LENGTH, 6), other), {})
    assert torch.equal(got, other if dim is None else other.index_select(dim, torch.tensor(OWN)))


def test_nested_arguments_keep_their_containers() -> None:
    tables = (torch.zeros(1, LENGTH, 4), torch.zeros(1, LENGTH, 4))
    _, named = call_of(Arguments((), {})).parts((), {"tables": tables, "cache": None, "flag": True})
    assert [tuple(each.shape) for each in named["tables"]] == [(1, 4, 4)] * 2
    assert (named["cache"], named["flag"]) == (None, True)


def test_as_many_rows_as_positions_are_told_by_earlier_calls() -> None:
    arguments = Arguments((), {})

    def dim_of(name: str, tensor: Tensor, rows: int) -> int | None:
        return call_of(arguments, rows).sequence_dim(name, tensor)

    assert dim_of("condition", torch.zeros(ROWS, 6), ROWS) is None
    assert dim_of("condition", torch.zeros(LENGTH, 6), LENGTH) is None
    assert dim_of("position_ids", torch.zeros(ROWS, LENGTH), ROWS) == 1
    assert dim_of("position_ids", torch.zeros(LENGTH, LENGTH), LENGTH) == 1


def test_what_cannot_be_told_is_asked_for() -> None:
    square = torch.zeros(LENGTH, LENGTH)
    with pytest.raises(ModelError, match=r"sequence_dims=\{'position_ids': 1\}"):
        call_of(Arguments((), {}), LENGTH).sequence_dim("position_ids", square)
    assert call_of(Arguments((), {"position_ids": 1}), LENGTH).sequence_dim("position_ids", square) == 1
    assert call_of(Arguments((), {"mask": None}), LENGTH).sequence_dim("mask", square) is None


def test_sequences_must_be_cut_evenly() -> None:
    with pytest.raises(LayoutError, match="sequences of 6 positions, which is not a multiple of 4"):
        UnitCall.of(REGION, Arguments((), {}), (torch.zeros(2, 6, 6),), {})


def test_a_call_without_a_sequence_is_left_alone() -> None:
    assert UnitCall.of(REGION, Arguments((), {}), (torch.zeros(3), "text"), {}) is None
