"""From text to token files: find, train a tokenizer, encode, split, keep. Done once for the same text and settings.

The cache folder holds `text/<key>/{tokenizer.json, train.bin, train.json, validation.bin, validation.json, prepared.json}`. The
key is a hash of the text and of all settings that matter. `text/stamps/` remembers the key of files that have not been written
since, so that a second call does not read them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from hybrid_strategy.data.corpus import Corpus, Document, check_split, find_corpus
from hybrid_strategy.data.token_file import TokenWriter, open_tokens, write_json
from hybrid_strategy.data.tokenizer import END_OF_TEXT, check_vocab_size, encode, tokenizer_digest, train_tokenizer
from hybrid_strategy.errors import DataError, message
from hybrid_strategy.files import cache_folder

VERSION = 1
TRAINING_BYTES = 32 << 20
"""The tokenizer is trained on at most so much text, taken evenly from all documents."""

_ENCODED_BYTES = 4 << 20
SMALL_BYTES = 1 << 20
"""So much text is prepared within a second."""

Progress: TypeAlias = Callable[[str, int, int], None]
"""`progress(phase, done_bytes, total_bytes)`; the phases are "tokenizer" and "tokens"."""


@dataclass(frozen=True)
class TextSpec:
    """What is to be prepared.

    Attributes:
        files: globs of text files; none: the source of Python's standard library.
        vocab_size: the most tokens that the tokenizer may have.
        validation_fraction: share of the documents that is kept apart.
        max_bytes: use so much of the text only.
        cache_dir: default: the environment variable HYBRID_STRATEGY_CACHE, else `~/.cache/hybrid_strategy`.
    """

    files: tuple[str, ...] = ()
    vocab_size: int = 8192
    validation_fraction: float = 0.01
    max_bytes: int | None = None
    cache_dir: str | Path | None = None


@dataclass(frozen=True)
class PreparedText:
    """Prepared token files. `vocab_size` is what was asked for: no token reaches it."""

    folder: Path
    train: Path
    validation: Path
    tokenizer: Path
    vocab_size: int
    train_tokens: int
    validation_tokens: int


def prepare_text(spec: TextSpec, progress: Progress | None = None) -> PreparedText:
    """Token files for `spec`, made now or taken from the cache.

    Any number of processes may call it at once: one does the work, the others wait for it. A process that is killed leaves
    nothing that looks complete.

    Raises:
        DataError: no text, settings that do not fit it, or a damaged file in the cache (named).
    """
    _check(spec)
    corpus = find_corpus(spec.files, spec.max_bytes)
    root = cache_folder(spec.cache_dir) / "text"
    stamp = root / "stamps" / f"{_hash(corpus.stamp(), spec)}.json"
    folder = _remembered(stamp, root)
    if folder is None:
        digest = corpus.digest()
        folder = root / _hash(digest, spec)
        stamp.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if not (folder / "prepared.json").is_file():
                _make(folder, corpus, digest, spec, progress or _silent)
        write_json(stamp, {"key": folder.name})
    return _opened(folder, spec.vocab_size)


def prepared_or_small(spec: TextSpec) -> PreparedText | None:
    """Token files that are there, or are made in a moment; None where preparing this text takes its time.

    Raises:
        DataError: as of `prepare_text`.
    """
    corpus, root = find_corpus(spec.files, spec.max_bytes), cache_folder(spec.cache_dir) / "text"
    known = _remembered(root / "stamps" / f"{_hash(corpus.stamp(), spec)}.json", root)
    return prepare_text(spec) if known is not None or corpus.size_bytes <= SMALL_BYTES else None


def _check(spec: TextSpec) -> None:
    check_vocab_size(spec.vocab_size)
    if not 0 < spec.validation_fraction < 1:
        rule = "it must lie between 0 and 1"
        raise DataError(message("validation_fraction", spec.validation_fraction, rule, "", "Set e.g. 0.01"))
    if spec.max_bytes is not None and spec.max_bytes < 1:
        raise DataError(message("max_bytes", spec.max_bytes, "it must be positive", "", "Set e.g. 1000000, or null for all"))


def _hash(text: str, spec: TextSpec) -> str:
    settings = f"{VERSION}\0{text}\0{spec.vocab_size}\0{spec.validation_fraction!r}"
    return hashlib.sha256(settings.encode()).hexdigest()[:24]


def _remembered(stamp: Path, root: Path) -> Path | None:
    """The folder made from files that have not been written since."""
    try:
        folder = root / str(json.loads(stamp.read_text(encoding="utf-8"))["key"])
    except (OSError, ValueError, KeyError):
        return None
    return folder if (folder / "prepared.json").is_file() else None


def _opened(folder: Path, vocab_size: int) -> PreparedText:
    train, validation = folder / "train.bin", folder / "validation.bin"
    return PreparedText(
        folder=folder,
        train=train,
        validation=validation,
        tokenizer=folder / "tokenizer.json",
        vocab_size=vocab_size,
        train_tokens=open_tokens(train).header.count,
        validation_tokens=open_tokens(validation).header.count,
    )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time makes `folder`. The lock falls with the process that holds it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as file:
        with suppress(OSError):  # a file system without locks: then the renaming decides
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(folder: Path, corpus: Corpus, digest: str, spec: TextSpec, progress: Progress) -> None:
    """Makes all files in a folder of another name, which then gets its own: it exists as a whole or not at all."""
    host = socket.gethostname()
    for left_over in folder.parent.glob(f".{folder.name}.{host}.*"):
        shutil.rmtree(left_over, ignore_errors=True)  # of a process that was killed: we hold the lock
    work = folder.with_name(f".{folder.name}.{host}.{os.getpid()}")
    work.mkdir(parents=True)
    try:
        _write_all(work, corpus, digest, spec, progress)
        if not (folder / "prepared.json").is_file():
            shutil.rmtree(folder, ignore_errors=True)
        os.rename(work, folder)
    except OSError:
        # where the file system knows no locks across hosts, another one may have been first
        if not (folder / "prepared.json").is_file():
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_all(work: Path, corpus: Corpus, digest: str, spec: TextSpec, progress: Progress) -> None:
    is_validation = _split(corpus, spec)
    tokenizer = train_tokenizer(_training_texts(corpus, progress), spec.vocab_size)
    tokenizer.save(str(work / "tokenizer.json"))
    end = tokenizer.token_to_id(END_OF_TEXT)
    arguments = spec.vocab_size, tokenizer_digest(tokenizer), digest
    with TokenWriter(work / "train.bin", *arguments) as train, TokenWriter(work / "validation.bin", *arguments) as validation:
        first = 0
        for batch, done in _batches(corpus):
            for place, ids in enumerate(encode(tokenizer, [document.text for document in batch]), first):
                writer = validation if is_validation[place] else train
                writer.append(np.asarray(ids + [end] * batch[place - first].ends))
            first += len(batch)
            progress("tokens", done, corpus.size_bytes)
    counts = {"train_tokens": train.count, "validation_tokens": validation.count}
    write_json(work / "prepared.json", {"version": VERSION, "files": len(corpus.files), "bytes": corpus.size_bytes, **counts})


def _split(corpus: Corpus, spec: TextSpec) -> list[bool]:
    """Which documents are kept for validation: evenly spread, at least one, and never the first of several."""
    check_split(corpus, spec.files)
    count = sum(1 for _ in corpus.documents())
    fraction = spec.validation_fraction
    chosen = [int((place + 1) * fraction) > int(place * fraction) for place in range(count)]
    if not any(chosen):
        chosen[-1] = True
    return chosen


def _training_texts(corpus: Corpus, progress: Progress) -> Iterator[str]:
    """Every document, or every k-th of a larger corpus."""
    step = max(1, round(corpus.size_bytes / TRAINING_BYTES))
    done = 0
    for place, document in enumerate(corpus.documents()):
        done += document.size_bytes
        if place % step == 0:
            yield document.text
            progress("tokenizer", done, corpus.size_bytes)


def _batches(corpus: Corpus) -> Iterator[tuple[list[Document], int]]:
    """Documents in batches of a few megabytes, each with the bytes read up to its end."""
    batch: list[Document] = []
    size = done = 0
    for document in corpus.documents():
        batch.append(document)
        size += document.size_bytes
        if size >= _ENCODED_BYTES:
            done += size
            yield batch, done
            batch, size = [], 0
    if batch:
        yield batch, done + size


def _silent(phase: str, done_bytes: int, total_bytes: int) -> None:
    """Shows nothing."""
