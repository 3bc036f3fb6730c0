"""The files of a checkpoint: torch's distributed-checkpoint format, written with a digest and read without running code.

The format is torch's: each rank's `__<rank>_0.distcp` holds its blocks one after another as `torch.save` writes them, and
`.metadata` says which block of which tensor lies where. Torch's own writer keeps every host copy of a rank until its file is
closed and its reader unpickles `.metadata` freely; this one holds one block a file at a time and lets through data classes only.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

from hybrid_strategy.checkpoint.digests import Digest, DigestFile, write_file
from hybrid_strategy.checkpoint.framing import BlockWriter
from hybrid_strategy.errors import CheckpointError, message

INDEX_FILE = ".metadata"
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
    folder: Path, rank: int, items: Iterable[WriteItem], tensor_of: Callable[[MetadataIndex], Tensor]
) -> tuple[list[WriteResult], dict[str, Digest]]:
    """Writes the blocks `items` of a rank into one file, one after another as they come to the host.

    One file: where two are written side by side, one of them is held up, for longer than both take one after the other (ext4).

    Returns:
        Where each block lies, for the index, and the digest by file.
    """
    path, results = folder / f"__{rank}_0.distcp", list[WriteResult]()

    def fill(file: DigestFile) -> None:
        writer = BlockWriter(file)
        for item in items:
            start = file.num_bytes
            writer.write(_host_block(tensor_of(item.index)))
            length = file.num_bytes - start
            results.append(WriteResult(item.index, length, _StorageInfo(path.name, start, length)))

    with _without_crc():
        digest = write_file(path, fill)
    return results, {path.name: digest}


def num_bytes_of(item: WriteItem) -> int:
    """Bytes of the values of a block."""
    data = item.tensor_data
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize if data is not None else 0


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
    alone = block.untyped_storage().nbytes() == block.nbytes and block.is_contiguous()
    return block if alone else block.clone(memory_format=torch.contiguous_format)


class IndexWriter(FileSystemWriter):
    """Writes `.metadata`, without the folder's path in it (it is renamed afterwards)."""

    def storage_meta(self) -> StorageMeta | None:
        return None


class BlockReader(FileSystemReader):
    """Torch's reader with an index that may hold the format's own data classes and nothing else."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_index(Path(self.path))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Raises:
        CheckpointError: a block cannot be read, or holds something that is not data.
        """
        try:
            return super().read_data(plan, planner)
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError, ValueError) as error:
            why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise CheckpointError(message("checkpoint", str(self.path), "its blocks cannot be read", why, "")) from error


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
