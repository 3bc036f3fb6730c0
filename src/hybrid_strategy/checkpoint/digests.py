"""Files written with a digest of what was meant to be written, and read back to compare. No torch: a command verifies at once."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any, NamedTuple

import xxhash

_CHUNK_BYTES, _SEND_BYTES = 2**20, 2**24
_KINDS: dict[str, Callable[[], Any]] = {"xxh3_128": xxhash.xxh3_128, "sha256": hashlib.sha256}
_WRITTEN = "xxh3_128"


class Digest(NamedTuple):
    """Size and digest of a file as it was meant to be written.

    Attributes:
        value: hexadecimal.
        kind: XXH3-128 of what is written now: its 128 bits find damage as surely as 256 do, at a tenth of the time, and no digest
            that lies beside a file keeps anybody from changing both. Earlier checkpoints have SHA-256.
    """

    num_bytes: int
    value: str
    kind: str = _WRITTEN

    @staticmethod
    def of_entry(entry: dict[str, Any]) -> Digest:
        """Raises:
        KeyError: the entry has no digest of a known kind.
        """
        kind = next((each for each in _KINDS if each in entry), _WRITTEN)
        return Digest(int(entry["num_bytes"]), str(entry[kind]), kind)

    def entry(self) -> dict[str, Any]:
        """As data, for a manifest."""
        return {"num_bytes": self.num_bytes, self.kind: self.value}


class DigestFile:
    """A file being written whose digest is taken from what is written, so that a fault of the disk shows when it is read.

    The disk is set to work while there is more to come.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream
        self.num_bytes = 0
        self.error: OSError | None = None
        self._hash = _KINDS[_WRITTEN]()
        self._sent_bytes = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, view.nbytes, _CHUNK_BYTES):  # Linux takes 4 MiB in one call 4 times as long as 1 MiB in four
            self._write(view[start : start + _CHUNK_BYTES])
        return view.nbytes

    def _write(self, chunk: memoryview) -> None:
        try:
            self.stream.write(chunk)
        except OSError as error:
            self.error = error  # torch.save may replace it by a RuntimeError that does not name the cause
            raise
        self._hash.update(chunk)
        self.num_bytes += chunk.nbytes
        if self.num_bytes - self._sent_bytes >= _SEND_BYTES:
            self._send()

    def flush(self) -> None:
        self.stream.flush()

    def _send(self) -> None:
        """Whole pages only: one on its way to the disk cannot be written to."""
        self.stream.flush()
        whole = self.num_bytes // _CHUNK_BYTES * _CHUNK_BYTES
        _send(self.stream.fileno(), self._sent_bytes, whole - self._sent_bytes)
        self._sent_bytes = whole

    @property
    def digest(self) -> Digest:
        return Digest(self.num_bytes, self._hash.hexdigest())


def write_file(path: Path, fill: Callable[[DigestFile], None]) -> Digest:
    """Writes `path` through `fill` and forces it to the disk.

    Raises:
        OSError: the disk refused (no space, no permission).
    """
    with path.open("wb") as stream:
        file = DigestFile(stream)
        try:
            fill(file)
        except Exception:
            if file.error is not None:
                raise file.error from None
            raise
        stream.flush()
        os.fsync(stream.fileno())
    return file.digest


def write_bytes(path: Path, data: bytes) -> Digest:
    """Writes `data` to `path` and forces it to the disk."""

    def fill(file: DigestFile) -> None:
        file.write(data)

    return write_file(path, fill)


def write_unsynced(path: Path, data: bytes) -> Digest:
    """Writes `data` to `path`; `sync_files` is to follow."""
    with path.open("wb") as stream:
        file = DigestFile(stream)
        file.write(data)
    return file.digest


def sync_files(paths: Iterable[Path]) -> None:
    """Forces files to the disk. All are on their way before the first is waited for: one entry in the journal serves them all."""
    descriptors: list[int] = []
    try:
        for path in paths:
            descriptors.append(os.open(path, os.O_RDONLY))
            _send(descriptors[-1], 0, 0)
        for descriptor in descriptors:
            os.fsync(descriptor)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def read_digest(path: Path, kind: str = _WRITTEN) -> Digest:
    """Size and digest of a file as it is on the disk."""
    found, size = _KINDS[kind](), 0
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            found.update(chunk)
            size += len(chunk)
    return Digest(size, found.hexdigest(), kind)


def _send(descriptor: int, start: int, length: int) -> None:
    """Lets the kernel begin to write out what it has: its advice for pages that are not needed, which Linux does at once.

    Args:
        length: in bytes; 0: all that follows `start`.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_DONTNEED)
