"""Files written with a digest of what was meant to be written, and read back to compare. No torch: a command verifies at once."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

_CHUNK_BYTES, _SEND_BYTES = 2**20, 2**24


class Digest(NamedTuple):
    """Size and SHA-256 of a file as it was meant to be written."""

    num_bytes: int
    sha256: str


class DigestFile:
    """A file being written whose digest is taken from what is written, so that a fault of the disk shows when it is read.

    The disk is set to work while there is more to come. Writing and digesting take about as long as each other; who writes much
    writes two files side by side.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream
        self.num_bytes = 0
        self.error: OSError | None = None
        self._hash = hashlib.sha256()
        self._sent_bytes = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            self.stream.write(view)
        except OSError as error:
            self.error = error  # torch.save may replace it by a RuntimeError that does not name the cause
            raise
        self._hash.update(view)
        self.num_bytes += view.nbytes
        if self.num_bytes - self._sent_bytes >= _SEND_BYTES:
            self._send()
        return view.nbytes

    def flush(self) -> None:
        self.stream.flush()

    def _send(self) -> None:
        """Lets the kernel begin to write out what it has: its advice for pages that are not needed, which Linux does at once.

        Whole pages only: one on its way to the disk cannot be written to.
        """
        self.stream.flush()
        whole = self.num_bytes // _CHUNK_BYTES * _CHUNK_BYTES
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.stream.fileno(), self._sent_bytes, whole - self._sent_bytes, os.POSIX_FADV_DONTNEED)
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


def read_digest(path: Path) -> Digest:
    """Size and SHA-256 of a file as it is on the disk."""
    found, size = hashlib.sha256(), 0
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            found.update(chunk)
            size += len(chunk)
    return Digest(size, found.hexdigest())
