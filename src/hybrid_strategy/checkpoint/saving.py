"""Writes a checkpoint: all ranks together, into a folder beside, which then appears at once under its name.

Three stages, each ending in the agreement of all ranks: `prepare` (who writes what, does it fit), `write` (each rank its blocks),
`commit` (index, small state, manifest, rename). Between the first two the blocks may be copied to the host, so that training
goes on while they are written.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from hybrid_strategy.checkpoint import folder as folders
from hybrid_strategy.checkpoint.agreement import Ranks, Work
from hybrid_strategy.checkpoint.content import CheckpointContent, Contribution, small_files
from hybrid_strategy.checkpoint.digests import Digest, read_digest, sync_files, write_unsynced
from hybrid_strategy.checkpoint.folder import MANIFEST_FILE
from hybrid_strategy.checkpoint.manifest import write_manifest
from hybrid_strategy.checkpoint.planners import PieceSavePlanner
from hybrid_strategy.checkpoint.storage import INDEX_FILE, IndexWriter, num_bytes_of, write_items
from hybrid_strategy.errors import CheckpointError, message

_ITEM_OVERHEAD_BYTES, _SLACK_BYTES = 2048, 2**20


@dataclass(frozen=True)
class SaveOptions:
    """How a checkpoint is written.

    Attributes:
        point_last: let the `last` file beside the folder name it.
        owners_only: only the owner of a block writes it; default: replicas share the writing.
        arrival_seconds: how long to wait for all ranks to come to the save (on gloo) before naming those that did not.
    """

    point_last: bool = True
    owners_only: bool = False
    arrival_seconds: float = 600.0


@dataclass(frozen=True)
class SaveReport:
    """What was written.

    Attributes:
        path: the folder.
        num_bytes: all its files together.
        seconds: from the start of writing to the commit.
        unsaved: values that were not data and could not be kept, as `<where>: <class>`.
    """

    path: str
    num_bytes: int
    seconds: float
    unsaved: tuple[str, ...]


def save_checkpoint(
    path: str | os.PathLike[str],
    content: CheckpointContent,
    options: SaveOptions | None = None,
    process_group: ProcessGroup | None = None,
) -> SaveReport:
    """Writes a checkpoint and returns when it is complete on the disk. Called by every rank of the group.

    Args:
        path: the folder to be; may exist and is replaced then. The same on all ranks, on a file system all nodes share.
        process_group: None is the default group; one process without torch.distributed writes alone.

    Raises:
        CheckpointError: on every rank, if any could not write. The folder that had this name is as it was.
    """
    save = PreparedSave(path, content, options or SaveOptions(), Ranks.of(process_group))
    return save.write(save.ranks)


class PreparedSave:
    """A save that is planned and known to fit, but not written. Making one is collective.

    Raises:
        CheckpointError: on every rank, if the ranks' pieces do not fit together or the disk is too small.
    """

    def __init__(self, path: str | os.PathLike[str], content: CheckpointContent, options: SaveOptions, ranks: Ranks) -> None:
        self.path = Path(os.path.abspath(path))
        self.options = options
        self.ranks = ranks
        self._content = content
        self._planner = PieceSavePlanner(dict(content.tensors), options.owners_only)
        self._metadata: Metadata | None = None
        self._plans: list[SavePlan] | None = None
        self._small: dict[str, bytes] = {}
        self._unsaved: tuple[str, ...] = ()
        ranks.arrive(self._work("save"), options.arrival_seconds)
        gathered = ranks.collect(self._work("prepare"), self._contribute)
        self.partial: Path = ranks.lead(self._work("prepare"), lambda: self._plan(gathered or []))
        mine: SavePlan = ranks.scatter(self._work("prepare"), self._plans)
        self._items = mine.items
        self._plans = None

    @property
    def staged_bytes(self) -> int:
        """Bytes of the blocks this rank writes: what `stage` copies."""
        return sum(_tensor_bytes(self._planner.lookup_object(item.index)) for item in self._items)

    def stage(self, buffers: dict[str, Tensor]) -> None:
        """Copies the blocks this rank writes to host memory and lets go of the model's.

        Args:
            buffers: by key, from an earlier save; used again where they fit, replaced where not.
        """
        devices = set()
        for item in self._items:
            source = self._planner.lookup_object(item.index).detach()
            buffers[item.index.fqn] = _host_copy(source, buffers.get(item.index.fqn))
            devices.add(source.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        self._planner.hold({item.index.fqn: buffers[item.index.fqn] for item in self._items})
        self._content = CheckpointContent({})

    def write(self, ranks: Ranks) -> SaveReport:
        """Writes and commits; collective over `ranks` (of the same processes; another group when in another thread)."""
        start = time.monotonic()
        try:
            written = ranks.collect(self._work("write"), self._write_blocks)
            num_bytes = ranks.lead(self._work("commit"), lambda: self._commit(written or []))
        except CheckpointError:
            if ranks.rank == 0:
                folders.remove_folder(self.partial)
            raise
        return SaveReport(str(self.path), num_bytes, time.monotonic() - start, self._unsaved)

    def _work(self, verb: str) -> Work:
        return Work(str(self.path), verb, "Earlier checkpoints are intact")

    def _contribute(self) -> tuple[SavePlan, Contribution]:
        self._planner.set_up_planner({}, is_coordinator=self.ranks.rank == 0)
        return self._planner.create_local_plan(), Contribution.of(self._content)

    def _plan(self, gathered: list[tuple[SavePlan, Contribution]]) -> Path:
        self._plans, self._metadata = self._planner.create_global_plan([plan for plan, _ in gathered])
        self._small, self._unsaved = small_files(self._content, [small for _, small in gathered])
        folders.check_replaceable(self.path)
        partial = folders.start_partial(self.path)
        try:
            folders.check_space(partial.parent, self._needed_bytes())
        except CheckpointError:
            folders.remove_folder(partial)
            raise
        return partial

    def _needed_bytes(self) -> int:
        items = [item for plan in self._plans or [] for item in plan.items]
        blocks = sum(num_bytes_of(item) for item in items)
        small = sum(len(data) for data in self._small.values())
        return blocks + small + len(items) * _ITEM_OVERHEAD_BYTES + _SLACK_BYTES

    def _write_blocks(self) -> tuple[list[WriteResult], dict[str, Digest]]:
        if not self._items:
            return [], {}
        if not self.partial.is_dir():
            rule = "this rank does not see it: it is not shared by all nodes, or somebody has removed it while it was written"
            advice = "Set a folder on a file system that all nodes share, in which only one run saves under this name"
            raise CheckpointError(message("checkpoint folder", str(self.partial), rule, "", advice))
        return write_items(self.partial, self.ranks.rank, self._items, self._planner.lookup_object)

    def _commit(self, written: list[tuple[list[WriteResult], dict[str, Digest]]]) -> int:
        if self._metadata is None:
            raise CheckpointError(message("checkpoint", str(self.path), "rank 0 has no plan for it", "", ""))
        files = {name: digest for _, digests in written for name, digest in digests.items()}
        for name, data in self._small.items():
            files[name] = write_unsynced(self.partial / name, data)
        index = IndexWriter(self.partial, sync_files=False)
        index.finish(self._metadata, [results for results, _ in written])
        files[INDEX_FILE] = read_digest(self.partial / INDEX_FILE)
        manifest = write_manifest(self.partial, files)
        sync_files(self.partial / name for name in (*self._small, INDEX_FILE, MANIFEST_FILE))
        folders.commit(self.partial, self.path)
        if self.options.point_last:
            folders.point_last(self.path)
        return manifest.num_bytes


def _tensor_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _host_copy(source: Tensor, buffer: Tensor | None) -> Tensor:
    """A copy in host memory; pinned and not waited for if it comes from a GPU."""
    if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
        buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
    return buffer.copy_(source, non_blocking=source.is_cuda)
