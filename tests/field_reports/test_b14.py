"""B14, kind of fault: a size that tensor parallelism cannot divide fails in the middle of forward, or is cut wrongly.

Heads that cannot be shared out are refused with the sizes that can, before any process; a vocabulary or a hidden layer of an MLP
that does not divide is cut unevenly and right.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch.utils.data import DataLoader

from hybrid_strategy.cli.main import main
from hybrid_strategy.errors import LayoutError
from hybrid_strategy.models.llama import Llama
from hybrid_strategy.parallel.tensor.check import assign_styles, check_tensor_parallel
from hybrid_strategy.planning.layouts import check_layout
from hybrid_strategy.spec.layout import Layout
from hybrid_strategy.spec.model_shape import ModelShape
from tests.support.gate import gate
from tests.support.ranks import RankFailedError
from tests.support.training import TinyLM, Tokens

SHAPE = ModelShape(24, 2, 6, 32, 64, 16, num_key_value_heads=3, head_dim=4)


@pytest.mark.parametrize(
    ("heads", "key_value_heads", "size", "words"),
    [
        (6, 3, 2, "it must divide num_key_value_heads. 2 does not divide 3; 1 or 3 would"),
        (4, 4, 3, "it must divide num_attention_heads. 3 does not divide 4; 1, 2 or 4 would"),
        (8, 2, 4, "it must divide num_key_value_heads. 4 does not divide 2; 1 or 2 would"),
        (8, 1, 2, "it must divide num_key_value_heads. 2 does not divide 1; 1 would"),
    ],
)
def test_heads_that_do_not_divide_are_refused_by_their_numbers(heads: int, key_value_heads: int, size: int, words: str) -> None:
    shape = replace(SHAPE, num_attention_heads=heads, num_key_value_heads=key_value_heads)
    with pytest.raises(LayoutError) as caught:
        check_layout(Layout(tensor_parallel_size=size), shape=shape)
    assert words in str(caught.value)
    assert "Set" in str(caught.value)


def test_the_command_line_refuses_before_any_process(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [
        "model=llama_tiny",
        "model.num_attention_heads=6",
        "model.num_key_value_heads=3",
        "model.head_dim=8",
        "strategy=tp2",
    ]
    for command in ("plan", "check", "train"):
        assert main([command, *overrides]) == 2
        assert "num_key_value_heads" in capsys.readouterr().err


def test_a_users_model_is_refused_by_its_own_words_for_heads() -> None:
    plan = Llama(SHAPE).parallel_plan()
    with pytest.raises(LayoutError, match=r"tensor_parallel_size is 2: it must divide num_key_value_heads. 2 does not divide 3"):
        check_tensor_parallel(plan, 2)
    with pytest.raises(RankFailedError, match="it must divide num_key_value_heads"):
        gate(partial(TinyLM, SHAPE), _data(SHAPE), {"tensor_parallel_size": 2})


def test_more_ranks_than_rows_are_refused() -> None:
    shape = replace(SHAPE, vocab_size=3, num_attention_heads=4, num_key_value_heads=4)
    with pytest.raises(LayoutError, match=r"dimension 0 of every slice needs an entry\. .*weight has 3 of them"):
        assign_styles(Llama(shape), Llama(shape).parallel_plan(), 4)


def _data(shape: ModelShape) -> DataLoader[Any]:
    return DataLoader(Tokens(32, shape.sequence_length, shape.vocab_size), batch_size=8)


UNEVEN = {
    "vocabulary": {"vocab_size": 7},
    "vocabulary_of_a_prime": {"vocab_size": 61},
    "tied_vocabulary": {"vocab_size": 7, "tied_embeddings": True},
    "mlp": {"intermediate_size": 33},
    "everything": {"vocab_size": 13, "intermediate_size": 37, "hidden_size": 18},
    "one_key_value_head_a_rank": {"num_attention_heads": 6, "num_key_value_heads": 2},
}


@pytest.mark.parametrize("name", UNEVEN)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_sizes_that_do_not_divide_are_cut_and_right(name: str, sequence_parallel: bool) -> None:
    shape = replace(SHAPE, **{"num_attention_heads": 4, "num_key_value_heads": 2, **UNEVEN[name]})
    strategy = {"tensor_parallel_size": 2, "sequence_parallel": sequence_parallel}
    report = gate(partial(TinyLM, shape), _data(shape), strategy)
    assert report.same, str(report)


@pytest.mark.parametrize("sharding", ["zero1", "zero3"])
def test_slices_that_do_not_divide_are_sharded_again(sharding: str) -> None:
    shape = replace(SHAPE, num_attention_heads=4, num_key_value_heads=2, vocab_size=7, intermediate_size=33)
    strategy = {"tensor_parallel_size": 2, "data_parallel_size": 2, "sharding": sharding}
    report = gate(partial(TinyLM, shape), _data(shape), strategy, trainer={"gradient_clip_val": 0.05})
    assert report.same, str(report)


def test_a_sequence_that_does_not_divide_is_right_or_refused() -> None:
    shape = replace(SHAPE, num_attention_heads=4, num_key_value_heads=2, sequence_length=15)
    with pytest.raises(LayoutError, match="2 does not divide 15"):
        check_layout(Layout(tensor_parallel_size=2, sequence_parallel=True), shape=shape)
    report = gate(partial(TinyLM, shape), _data(shape), {"tensor_parallel_size": 2})
    assert report.same, str(report)
