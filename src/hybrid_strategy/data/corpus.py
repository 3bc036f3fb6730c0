"""Where text comes from: the user's files, or the source of Python's standard library, which every machine has.

A document is a file, or a piece of a large file that ends at the end of a line. Everything here depends on names and contents
only, so that every machine with the same files makes the same corpus.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import glob
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from hybrid_strategy.errors import DataError, message

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}
_SMALLEST_PIECE, _LARGEST_PIECE = 4 << 10, 1 << 20
_PIECES = 256


@dataclass(frozen=True)
class Document:
    """A piece of text of `size_bytes` bytes in its file; `ends`: the file ends with it, so an end-of-text token follows."""

    text: str
    size_bytes: int
    ends: bool


@dataclass(frozen=True)
class Corpus:
    """Files in a fixed order.

    Attributes:
        files: path and name of each file; the name is the part of the path that is the same on every machine.
        sizes: how many bytes of each file belong to the corpus.
    """

    files: tuple[tuple[Path, str], ...]
    sizes: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return sum(self.sizes)

    @property
    def piece_bytes(self) -> int:
        """Larger files are read in pieces of about this size, small enough for a split of a few files."""
        return min(max(self.size_bytes // _PIECES, _SMALLEST_PIECE), _LARGEST_PIECE)

    def documents(self) -> Iterator[Document]:
        """All documents, in order; bytes that are no UTF-8 are replaced."""
        for (path, _), size in zip(self.files, self.sizes, strict=True):
            yield from _pieces(path, size, self.piece_bytes)

    def digest(self) -> str:
        """A hash of all names and contents."""
        whole = hashlib.sha256()
        for (path, name), size in zip(self.files, self.sizes, strict=True):
            whole.update(f"{name}\0{size}\0".encode())
            whole.update(_file_digest(path, size))
        return whole.hexdigest()

    def stamp(self) -> str:
        """A hash of paths, sizes and times of change: cheap, and another one as soon as a file is written."""
        whole = hashlib.sha256()
        for (path, name), size in zip(self.files, self.sizes, strict=True):
            status = path.stat()
            told = (path, name, size, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
            whole.update("\0".join(map(str, told)).encode() + b"\n")
        return whole.hexdigest()


def find_corpus(files: Sequence[str] = (), max_bytes: int | None = None) -> Corpus:
    """The corpus of all files that match the globs `files`, default: the standard library's source.

    Args:
        files: globs (`**` goes through folders) or names; `~` is the home folder.
        max_bytes: take files in a fixed arbitrary order until there are so many bytes, and the beginning of the last one.

    Raises:
        DataError: a glob matches nothing, a file cannot be read, or all are empty.
    """
    found = _matching(files) if files else _standard_library()
    corpus = _capped(found, max_bytes)
    if corpus.size_bytes == 0:
        shown = list(files) or str(_library_folder())
        raise DataError(message("data.files", shown, "there must be text", "0 bytes in all", "Give files that are not empty"))
    return corpus


def check_split(corpus: Corpus, files: Sequence[str]) -> None:
    """Refuses text of a single document, of which nothing could be kept for validation.

    Args:
        corpus: what `find_corpus` found.
        files: the globs that it was found with.

    Raises:
        DataError: there is one document.
    """
    if len(list(islice(corpus.documents(), 2))) > 1:
        return
    shown = list(files) or str(_library_folder())
    rule = "there must be a document to train on and another for validation"
    numbers = f"A document is a file, or some {_SMALLEST_PIECE:,} bytes of a larger one; here is 1 of {corpus.size_bytes:,} bytes"
    raise DataError(message("data.files", shown, rule, numbers, "Give more text, or set a larger data.max_bytes where it is set"))


def _matching(patterns: Sequence[str]) -> list[tuple[Path, str]]:
    found: set[Path] = set()
    for pattern in patterns:
        given = Path(pattern).expanduser()  # a name may hold what a glob would read as signs
        matches = [given] if given.is_file() else [Path(name) for name in glob(str(given), recursive=True)]
        readable = [path.resolve() for path in matches if path.is_file()]
        if not readable:
            numbers = f"{len(matches)} of the matches are no files" if matches else f"Looked from {Path.cwd()}"
            rule = "it must match at least one file"
            raise DataError(message("data.files", pattern, rule, numbers, "Set existing files or globs, e.g. ['text/**/*.txt']"))
        found.update(readable)
    common = Path(os.path.commonpath([path.parent for path in found]))
    return sorted(((path, path.relative_to(common).as_posix()) for path in found), key=lambda each: each[1])


def _library_folder() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _standard_library() -> list[tuple[Path, str]]:
    """Every `*.py` of the standard library, its own tests too, without installed packages."""
    folder, found = _library_folder(), []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        found += [Path(parent, name) for name in names if name.endswith(".py")]
    return sorted(((path, path.relative_to(folder).as_posix()) for path in found), key=lambda each: each[1])


def _capped(files: list[tuple[Path, str]], max_bytes: int | None) -> Corpus:
    sizes = {name: path.stat().st_size for path, name in files}
    if max_bytes is not None and max_bytes < sum(sizes.values()):
        left = max_bytes
        for _, name in sorted(files, key=lambda each: hashlib.sha256(each[1].encode()).digest()):
            sizes[name] = min(sizes[name], left)
            left -= sizes[name]
    kept = [each for each in files if sizes[each[1]] > 0]
    return Corpus(tuple(kept), tuple(sizes[name] for _, name in kept))


def _pieces(path: Path, size: int, piece_bytes: int) -> Iterator[Document]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with _opened(path) as file:
        left = size
        while left > 0:
            data = file.read(min(piece_bytes, left))
            if not data:
                return  # the file has become shorter since it was found
            data += file.readline(min(piece_bytes, left - len(data))) if len(data) < left else b""
            left -= len(data)
            yield Document(decoder.decode(data, final=left <= 0), len(data), left <= 0)


def _file_digest(path: Path, size: int) -> bytes:
    whole = hashlib.sha256()
    with _opened(path) as file:
        while size > 0 and (data := file.read(min(size, _LARGEST_PIECE))):
            whole.update(data)
            size -= len(data)
    return whole.digest()


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        rule = "it must be readable"
        raise DataError(message("data.files", str(path), rule, str(error), "Set files that this user may read")) from error
