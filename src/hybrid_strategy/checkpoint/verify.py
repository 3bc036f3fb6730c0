"""The ranks' view of which checkpoint can be trusted, and what a checkpoint says of itself."""

from __future__ import annotations

import os
from pathlib import Path

from torch.distributed import ProcessGroup

from hybrid_strategy.checkpoint.agreement import Ranks, Work
from hybrid_strategy.checkpoint.content import read_json
from hybrid_strategy.checkpoint.folder import META_FILE
from hybrid_strategy.checkpoint.search import Found, committed, search, verify_checkpoint

__all__ = ["Found", "committed", "find_latest", "read_meta", "verify_checkpoint"]


def find_latest(folder: str | os.PathLike[str], process_group: ProcessGroup | None = None, digests: bool = True) -> Found:
    """The newest checkpoint in `folder` that verifies; rank 0 looks and tells all ranks of the group."""
    ranks, where = Ranks.of(process_group), Path(os.path.abspath(folder))
    return ranks.lead(Work(str(where), "search"), lambda: search(where, digests=digests))


def read_meta(path: Path) -> dict[str, object]:
    """The JSON data the run gave to a checkpoint (`global_step`, `epoch`, `score`, data position).

    Raises:
        CheckpointError: it cannot be read.
    """
    meta: dict[str, object] = read_json(path, META_FILE)["meta"]
    return meta
