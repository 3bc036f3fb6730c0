"""The files of a checkpoint: torch's distributed-checkpoint format, written with a digest and read without running code.

The format is torch's: each rank's `__<rank>_<n>.distcp` hold its blocks one after another as `torch.save` writes them, and
`.metadata` says which block of which tensor lies where. Torch's own writer keeps every host copy of a rank until its file is
closed and its reader unpickles `.metadata` freely; this one holds one block a file at a time and lets through data classes only.
"""

from __future__ import annotations

import math
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.serialization import get_crc32_options, set_crc32_options

from hybrid_strategy.checkpoint.digests import Digest, DigestFile, write_file
from hybrid_strategy.errors import CheckpointError, message

_Result = TypeVar("_Result")
INDEX_FILE = ".metadata"
_FILES, _ONE_FILE_BYTES = 2, 2**24  # of a rank: two are written and digested side by side, unless they would be small
_INDEX_CLASSES = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}


def write_items(
    folder: Path, rank: int, items: Sequence[WriteItem], tensor_of: Callable[[MetadataIndex], Tensor]
) -> tuple[list[WriteResult], dict[str, Digest]]:
    """Writes the blocks `items` of a rank, one after another as they come to the host; many of them into two files at a time.

    Returns:
        Where each block lies, for the index, and the digests by file.
    """
    parts = _parts(items)
    paths = [folder / f"__{rank}_{number}.distcp" for number in range(len(parts))]
    with _without_crc():
        written = _side_by_side([partial(_write_part, path, part, tensor_of) for path, part in zip(paths, parts, strict=True)])
    return [result for results, _ in written for result in results], {
        path.name: digest for path, (_, digest) in zip(paths, written, strict=True)
    }


def _side_by_side(jobs: Sequence[Callable[[], _Result]]) -> list[_Result]:
    """What the jobs return, the first done here and each other one in a thread of its own.

    No executor: none takes work once the process is ending, and newer versions of Python start no thread then. Such a job is done
    here too.
    """
    found: dict[int, _Result] = {}
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            found[number] = jobs[number]()
        except BaseException as error:  # raised below: a thread has no caller
            errors.append(error)

    threads = []
    for number in range(1, len(jobs)):
        thread = threading.Thread(target=work, args=(number,), name="checkpoint-file")
        try:
            thread.start()
            threads.append(thread)
        except RuntimeError:
            work(number)
    work(0)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [found[number] for number in range(len(jobs))]


def _parts(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """The items by file: the largest first, each into the file that has less by then."""
    num_bytes = {item.index: num_bytes_of(item) for item in items}
    if sum(num_bytes.values()) < _ONE_FILE_BYTES:
        return [list(items)]
    parts: list[list[WriteItem]] = [[] for _ in range(_FILES)]
    filled = [0] * _FILES
    for item in sorted(items, key=lambda item: -num_bytes[item.index]):
        smallest = filled.index(min(filled))
        parts[smallest].append(item)
        filled[smallest] += num_bytes[item.index]
    return [part for part in parts if part]


def num_bytes_of(item: WriteItem) -> int:
    """Bytes of the values of a block."""
    data = item.tensor_data
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize if data is not None else 0


def _write_part(
    path: Path, items: Iterable[WriteItem], tensor_of: Callable[[MetadataIndex], Tensor]
) -> tuple[list[WriteResult], Digest]:
    results: list[WriteResult] = []

    def fill(file: DigestFile) -> None:
        for item in items:
            start = file.num_bytes
            torch.save(_host_block(tensor_of(item.index)), cast(Any, file))
            length = file.num_bytes - start
            results.append(WriteResult(item.index, length, _StorageInfo(path.name, start, length)))

    return results, write_file(path, fill)


@contextmanager
def _without_crc() -> Iterator[None]:
    """The digest of the manifest takes the place of torch.save's CRC-32, which alone costs 3 times as much CPU time."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _host_block(tensor: Tensor) -> Tensor:
    """The values on the host with no more storage than their own: torch.save writes a view's whole storage."""
    block = tensor.detach().cpu()
    return block.clone() if block.untyped_storage().nbytes() != block.nbytes or not block.is_contiguous() else block


class IndexWriter(FileSystemWriter):
    """Writes `.metadata`, without the folder's path in it (it is renamed afterwards)."""

    def storage_meta(self) -> StorageMeta | None:
        return None


class BlockReader(FileSystemReader):
    """Torch's reader with an index that may hold the format's own data classes and nothing else."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_index(Path(self.path))


def read_index(folder: Path) -> Metadata:
    """Which tensors a folder holds and where.

    Raises:
        CheckpointError: `.metadata` is missing, unreadable or holds something that is not data.
    """
    path = folder / INDEX_FILE
    try:
        with path.open("rb") as stream:
            found = _IndexUnpickler(stream).load()
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ValueError, KeyError, IndexError, TypeError) as error:
        raise CheckpointError(
            message("checkpoint", str(folder), f"{INDEX_FILE} cannot be read", f"{type(error).__name__}: {error}", "")
        ) from error
    if not isinstance(found, Metadata):
        raise CheckpointError(message("checkpoint", str(folder), f"{INDEX_FILE} holds no index", str(type(found)), ""))
    found.storage_meta = found.storage_meta or StorageMeta()
    return found


class _IndexUnpickler(pickle.Unpickler):
    """Lets through the classes of the format and torch's dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _INDEX_CLASSES.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in an index")
