from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_strategy.data.token_file import TokenWriter, header_path, open_tokens
from hybrid_strategy.errors import DataError


def write(path, tokens, vocab_size=1000):
    with TokenWriter(path, vocab_size, tokenizer="t", source="s") as writer:
        writer.append(tokens)
    return path


@settings(max_examples=30, deadline=None)
@given(pieces=st.lists(st.lists(st.integers(0, 99_999))), vocab_size=st.sampled_from([100_000, 2**32]))
def test_tokens_come_back(tmp_path_factory, pieces, vocab_size):
    path = tmp_path_factory.mktemp("tokens") / "train.bin"
    with TokenWriter(path, vocab_size, tokenizer="t", source="s") as writer:
        for piece in pieces:
            writer.append(piece)
    opened = open_tokens(path, verify=True)
    assert opened.tokens.tolist() == [token for piece in pieces for token in piece]
    assert opened.header.count == writer.count == len(opened.tokens)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(300, "uint16"), (2**16, "uint16"), (2**16 + 1, "uint32")])
def test_type_and_header(tmp_path, vocab_size, dtype):
    path = write(tmp_path / "train.bin", [0, 299], vocab_size)
    header = open_tokens(path).header
    assert (header.dtype, header.count, header.vocab_size, header.tokenizer, header.source) == (dtype, 2, vocab_size, "t", "s")
    assert path.stat().st_size == 2 * np.dtype(dtype).itemsize
    assert sorted(each.name for each in tmp_path.iterdir()) == ["train.bin", "train.json"]


@pytest.mark.parametrize("token", [-1, 1000])
def test_a_token_outside_the_vocabulary_is_refused_and_nothing_is_left(tmp_path, token):
    with pytest.raises(DataError, match="vocab_size is 1000"):
        write(tmp_path / "train.bin", [1, token])
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_rewrite_leaves_the_old_file(tmp_path):
    path = write(tmp_path / "train.bin", [1, 2, 3])
    with pytest.raises(DataError), TokenWriter(path, 1000, "t", "s") as writer:
        writer.append([7, 1000])
    assert open_tokens(path, verify=True).tokens.tolist() == [1, 2, 3]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"\0")


def lose(path):
    path.unlink()


def lose_header(path):
    header_path(path).unlink()


def break_header(path):
    header_path(path).write_text("{")


def change_header(**fields):
    def change(path):
        header_path(path).write_text(json.dumps({**json.loads(header_path(path).read_text()), **fields}))

    return change


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (truncate, "train.bin"),
        (lengthen, "train.bin"),
        (lose, "train.bin"),
        (lose_header, "train.json"),
        (break_header, "train.json"),
        (change_header(version=99), "train.json"),
        (change_header(dtype="float64"), "train.json"),
        (change_header(surprise=1), "train.json"),
        (change_header(count=2), "train.bin"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, damage, name):
    path = write(tmp_path / "train.bin", [1, 2, 3])
    damage(path)
    with pytest.raises(DataError) as raised:
        open_tokens(path)
    assert str(tmp_path / name) in str(raised.value)
    assert "Delete" in str(raised.value)


def test_changed_content_is_found_when_it_is_looked_for(tmp_path):
    path = write(tmp_path / "train.bin", [1, 2, 3])
    path.write_bytes(b"\1\0\2\0\4\0")
    assert open_tokens(path).tokens.tolist() == [1, 2, 4]
    with pytest.raises(DataError, match="digest"):
        open_tokens(path, verify=True)


def test_tokens_are_read_only(tmp_path):
    tokens = open_tokens(write(tmp_path / "train.bin", [1])).tokens
    with pytest.raises(ValueError):
        tokens[0] = 2
