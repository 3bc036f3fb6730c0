"""Tokens on disk: a flat file of little-endian integers, and beside it a JSON header that is written last.

`train.bin` holds the tokens, `train.json` says what they are. A file without its header, or of another length than the header
says, was not written to its end.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from hybrid_strategy.errors import DataError, message

VERSION = 1


@dataclass(frozen=True)
class TokenHeader:
    """What a token file holds.

    Attributes:
        dtype: `uint16` or `uint32`, little-endian.
        count: how many tokens.
        vocab_size: every token is less than this.
        tokenizer: digest of the tokenizer that made them.
        source: digest of the text they were made from.
        sha256: digest of the file's bytes.
        version: of this format.
    """

    dtype: str
    count: int
    vocab_size: int
    tokenizer: str
    source: str
    sha256: str
    version: int = VERSION


def token_dtype(vocab_size: int) -> str:
    """The smallest type that holds every token.

    >>> token_dtype(65536), token_dtype(65537)
    ('uint16', 'uint32')
    """
    return "uint16" if vocab_size <= 2**16 else "uint32"


def header_path(path: str | Path) -> Path:
    """Where the header of the token file `path` is."""
    return Path(path).with_suffix(".json")


class TokenWriter:
    """Writes a token file piece by piece; it appears under its name only when all of it is on disk.

    Args:
        path: the token file; its header goes beside it.
        vocab_size: every token must be less.
        tokenizer: digest of the tokenizer.
        source: digest of the text.
    """

    def __init__(self, path: str | Path, vocab_size: int, tokenizer: str, source: str) -> None:
        self.path = Path(path)
        self._vocab_size, self._tokenizer, self._source = vocab_size, tokenizer, source
        self._dtype = np.dtype(token_dtype(vocab_size)).newbyteorder("<")
        self._digest = hashlib.sha256()
        self._part = self.path.with_suffix(".part")
        self._file = self._part.open("wb")
        self.count = 0

    def append(self, tokens: npt.ArrayLike) -> None:
        """Writes `tokens`, integers of shape [n].

        Raises:
            DataError: a token is not less than `vocab_size`.
        """
        numbers = np.asarray(tokens, dtype=np.int64)
        if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < self._vocab_size:
            rule, advice = f"tokens must lie in [0, {self._vocab_size})", "Set a vocab_size that holds every token"
            raise DataError(message("vocab_size", self._vocab_size, rule, f"Found {numbers.min()} to {numbers.max()}", advice))
        data = numbers.astype(self._dtype).tobytes()
        self._file.write(data)
        self._digest.update(data)
        self.count += numbers.size

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._commit()
        else:
            self._file.close()
            self._part.unlink(missing_ok=True)

    def _commit(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        header = TokenHeader(
            dtype=token_dtype(self._vocab_size),
            count=self.count,
            vocab_size=self._vocab_size,
            tokenizer=self._tokenizer,
            source=self._source,
            sha256=self._digest.hexdigest(),
        )
        header_path(self.path).unlink(missing_ok=True)  # an old header must not stand beside new tokens
        os.replace(self._part, self.path)
        write_json(header_path(self.path), asdict(header))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes `content` so that `path` is either the old file or the whole new one."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(part, path)


@dataclass(frozen=True)
class TokenFile:
    """An opened token file: `tokens` is a read-only memory map of shape [count]."""

    path: Path
    header: TokenHeader
    tokens: npt.NDArray[Any]


def open_tokens(path: str | Path, verify: bool = False) -> TokenFile:
    """Opens the token file `path`.

    Args:
        path: the file of tokens (its header is found beside it).
        verify: read all of it and compare its digest.

    Raises:
        DataError: header or tokens are missing, damaged, or do not belong together; it names the file.
    """
    path = Path(path)
    header = read_header(path)
    dtype = np.dtype(header.dtype).newbyteorder("<")
    size = path.stat().st_size if path.is_file() else -1
    if size != header.count * dtype.itemsize:
        numbers = f"It has {size:,} bytes, its header says {header.count:,} tokens of {dtype.itemsize} bytes"
        raise _damaged(path, "it must be as long as its header says", numbers if size >= 0 else "It does not exist")
    tokens = np.memmap(path, dtype=dtype, mode="r", shape=(header.count,)) if header.count else np.empty(0, dtype)
    if verify and hashlib.sha256(tokens.tobytes()).hexdigest() != header.sha256:
        raise _damaged(path, "its content must have the digest in its header", "It has another one")
    return TokenFile(path, header, tokens)


def read_header(path: str | Path) -> TokenHeader:
    """The header of the token file `path`.

    Raises:
        DataError: there is none, or it is no header of this version.
    """
    place = header_path(path)
    try:
        fields = json.loads(place.read_text(encoding="utf-8"))
        header = TokenHeader(**fields)
        good = header.version == VERSION and header.dtype in ("uint16", "uint32") and int(header.count) >= 0
    except (OSError, ValueError, TypeError) as error:
        raise _damaged(place, "it must be the header of a token file", str(error)) from error
    if not good:
        raise _damaged(place, f"it must be a header of version {VERSION}", f"It says {fields}")
    return header


def _damaged(path: Path, rule: str, numbers: str) -> DataError:
    return DataError(message("token file", str(path), rule, numbers, f"Delete {path.parent} to have it made anew"))
