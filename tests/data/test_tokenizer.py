from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_strategy.data.tokenizer import (
    END_OF_TEXT,
    encode,
    load_tokenizer,
    parallel_tokenizers,
    tokenizer_digest,
    train_tokenizer,
)
from hybrid_strategy.errors import DataError

TEXTS = [f"def function_{number}(argument):\n    return argument + {number}\n" for number in range(50)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 400)


@settings(max_examples=50, deadline=None)
@given(text=st.text(st.characters(codec="utf-8")))
def test_every_text_comes_back(tokenizer, text):
    (ids,) = encode(tokenizer, [text])
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_size_and_end_of_text(tokenizer):
    assert 257 < tokenizer.get_vocab_size() <= 400
    assert tokenizer.token_to_id(END_OF_TEXT) == 0
    assert len(encode(tokenizer, TEXTS)[0]) < len(TEXTS[0]) / 2


def test_the_same_text_trains_the_same_tokenizer_in_another_process(tokenizer):
    program = (
        "from hybrid_strategy.data.tokenizer import train_tokenizer, tokenizer_digest\n"
        f"print(tokenizer_digest(train_tokenizer({TEXTS!r}, 400)))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "1"}
    answer = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == tokenizer_digest(tokenizer)


def test_saved_and_loaded(tokenizer, tmp_path):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_digest(load_tokenizer(tmp_path / "tokenizer.json")) == tokenizer_digest(tokenizer)


def test_refusals(tmp_path):
    with pytest.raises(DataError, match="vocab_size is 256: it must be at least 257"):
        train_tokenizer(TEXTS, 256)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer.json"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_processes_forked_later_are_told_not_to_use_threads(monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    with parallel_tokenizers():
        assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    with parallel_tokenizers():
        pass
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
