"""B08, kind of fault: a weight with two names becomes two weights, or part of its rows is never updated.

The tie holds whatever is split and wherever the two places live: same values bit for bit after training, and every row moves,
also where the ranks do not divide the vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hybrid_strategy.spec.model_shape import ModelShape
from tests.support.gate import gate
from tests.support.training import SHAPE, Case, TinyLM, Tokens, assemble, train

PIPELINE = {"pipeline_parallel_size": 2, "num_microbatches": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero1": {"sharding": "zero1"},
    "zero3": {"sharding": "zero3"},
    "tp2": {"tensor_parallel_size": 2},
    "pp2": PIPELINE,
    "pp2_zbv": {**PIPELINE, "schedule": "ZBVZeroBubble"},
}


def _shape(vocab: int) -> ModelShape:
    return replace(SHAPE, vocab_size=vocab, tied_embeddings=True)


@pytest.mark.parametrize("vocab", [7, 8])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_tied_weight_is_one_weight(name: str, vocab: int) -> None:
    shape = _shape(vocab)
    data = DataLoader(Tokens(32, shape.sequence_length, vocab), batch_size=8)
    report = gate(partial(TinyLM, shape), data, LAYOUTS[name], devices=2, steps=3)
    assert report.same, str(report)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_row_moves_and_both_places_stay_equal(name: str) -> None:
    case = Case(strategy=LAYOUTS[name], shape=_shape(7), rows=32, steps=2)
    records = train(case, 2)  # `assemble` fails where two ranks hold different values of one row
    before = assemble(records, lambda record: record["initial"])["embed_tokens.weight"]
    after = assemble(records, lambda record: record["steps"][-1]["weights"])["embed_tokens.weight"]
    assert (before != after).any(dim=1).all()
    assert not torch.isnan(after).any()
