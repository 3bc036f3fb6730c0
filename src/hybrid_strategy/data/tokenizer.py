"""A byte-level BPE tokenizer: every text can be written in it, and the same text always trains the same one.

Source: byte-level BPE as in GPT-2 (Radford et al. 2019, section 2.2).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from hybrid_strategy.errors import DataError, message

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCABULARY = 256 + 1
_PARALLELISM = "TOKENIZERS_PARALLELISM"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a tokenizer of at most `vocab_size` tokens; a small text gives fewer.

    Raises:
        DataError: `vocab_size` leaves no room for all bytes and the end-of-text token.
    """
    check_vocab_size(vocab_size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with parallel_tokenizers():
        tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def check_vocab_size(vocab_size: int) -> None:
    """Raises DataError where `vocab_size` is too small for a byte-level tokenizer."""
    if vocab_size < SMALLEST_VOCABULARY:
        rule = f"it must be at least {SMALLEST_VOCABULARY}"
        numbers = "256 bytes and the end-of-text token"
        raise DataError(message("vocab_size", vocab_size, rule, numbers, f"Set {SMALLEST_VOCABULARY} or more, e.g. 8192"))


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer saved in `path`.

    Raises:
        DataError: the file is no tokenizer.
    """
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        rule = "it must be a tokenizer.json"
        raise DataError(message("tokenizer", str(path), rule, str(error), "Delete its folder to have it made anew")) from error


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Token ids of each text, on all cores."""
    with parallel_tokenizers():
        return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """A hash of everything that decides the tokens."""
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


@contextmanager
def parallel_tokenizers() -> Iterator[None]:
    """Uses all cores, and leaves a word about it for processes that are forked later.

    A process that was forked after its parent used the library's threads must not use them; the library warns of it at every
    fork, unless the variable says what to do.
    """
    configured = _PARALLELISM in os.environ
    os.environ.setdefault(_PARALLELISM, "true")
    try:
        yield
    finally:
        if not configured:
            os.environ[_PARALLELISM] = "false"
