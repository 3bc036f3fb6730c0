from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from hybrid_strategy.data.loader import mesh_dataloader
from hybrid_strategy.data.packed import PackedTokens
from hybrid_strategy.data.token_file import TokenWriter
from hybrid_strategy.errors import DataError


def packed(folder, count, sequence_length):
    with TokenWriter(folder / "train.bin", 5000, "t", "s") as writer:
        writer.append(range(count))
    return PackedTokens(folder / "train.bin", sequence_length)


@settings(max_examples=40, deadline=None)
@given(count=st.integers(2, 60), sequence_length=st.integers(1, 20))
def test_every_token_but_the_first_is_a_label_once(tmp_path_factory, count, sequence_length):
    folder = tmp_path_factory.mktemp("packed")
    if count <= sequence_length:
        with pytest.raises(DataError, match=f"sequence_length is {sequence_length}"):
            packed(folder, count, sequence_length)
        return
    data = packed(folder, count, sequence_length)
    items = [data[index] for index in range(len(data))]
    labels = torch.cat([item["labels"] for item in items])
    assert torch.equal(labels, torch.arange(1, len(data) * sequence_length + 1))
    assert torch.equal(torch.cat([item["input_ids"] for item in items]) + 1, labels)
    assert count - 1 - len(labels) < sequence_length


def test_shapes_types_and_bounds(tmp_path):
    data = packed(tmp_path, 11, 5)
    assert len(data) == 2
    assert {key: (value.dtype, value.shape) for key, value in data[0].items()} == {
        "input_ids": (torch.int64, (5,)),
        "labels": (torch.int64, (5,)),
    }
    assert torch.equal(data[-1]["input_ids"], data[1]["input_ids"])
    for index in (2, -3):
        with pytest.raises(IndexError):
            data[index]
    assert len(list(data)) == 2


def test_pickled_without_its_tokens(tmp_path):
    data = packed(tmp_path, 4001, 4)
    data[0]
    assert len(pickle.dumps(data)) < 1000
    assert torch.equal(pickle.loads(pickle.dumps(data))[7]["labels"], data[7]["labels"])


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_read_by_workers(tmp_path, context):
    loader = DataLoader(packed(tmp_path, 41, 4), batch_size=3, num_workers=1, multiprocessing_context=context)
    batches = list(mesh_dataloader(loader, 2, 1, seed=0))
    assert [batch["input_ids"][:, 0].tolist() for batch in batches] == [[12, 16, 20], [32, 36]]
