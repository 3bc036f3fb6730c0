"""The folder of one checkpoint and how it comes to be: written beside, complete or not there at all.

<name>.partial-<id>/     being written; never read
<name>.old-<id>/         the folder of this name that is being replaced; there for an instant, or after a crash in it
<name>/
    .metadata            torch's index: which block of which tensor lies where
    __<rank>_<n>.distcp  the blocks each rank wrote; two files where they are many
    meta.pt              state of loops, callbacks, schedulers, scaler (data only)
    replicated.pt        per-parameter numbers: step counts, hyper-parameters of parameter groups, by parameter name
    rng.pt               random state by logical coordinate
    plan.json            the plan the run was made with
    meta.json            format, versions, steps, data position, what could not be saved
    manifest.json        size and SHA-256 of every other file; written last
last                     text file beside the folders: the name of the newest one
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from pathlib import Path

from hybrid_strategy.checkpoint.digests import write_bytes
from hybrid_strategy.errors import CheckpointError, message
from hybrid_strategy.units import format_bytes

STATE_FILE, REPLICATED_FILE, RANDOM_FILE = "meta.pt", "replicated.pt", "rng.pt"
PLAN_FILE, META_FILE, MANIFEST_FILE = "plan.json", "meta.json", "manifest.json"
LAST_FILE = "last"
FORMAT_VERSION = 1
_PARTIAL, _OLD, _REMOVED = ".partial-", ".old-", ".removed-"


def check_replaceable(path: Path, marks: tuple[str, ...] = (MANIFEST_FILE, META_FILE, STATE_FILE, ".metadata")) -> None:
    """Refuses a path whose folder holds other things: they would go when the checkpoint takes its place.

    Args:
        marks: names of files of which a folder that may be replaced has one.

    Raises:
        CheckpointError: it is a folder, not empty, and has none of them.
    """
    if path.is_dir() and any(path.iterdir()) and not any((path / mark).exists() for mark in marks):
        rule = "the folder holds other things and would be replaced"
        raise CheckpointError(message("path", str(path), rule, "", "Set the path of a new folder"))


def start_partial(path: Path) -> Path:
    """A new empty folder beside `path` to write into; what an interrupted save of the same name left is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in _siblings(path, _PARTIAL) + _siblings(path, _REMOVED):
        remove_folder(left)
    partial = path.with_name(f"{path.name}{_PARTIAL}{uuid.uuid4().hex[:8]}")
    partial.mkdir()
    return partial


def commit(partial: Path, path: Path) -> None:
    """Makes a finished folder appear as `path` at once, in place of what had that name.

    A folder cannot replace a folder in one step, so the old one steps aside first; `resolve` finds it there if the process ends
    between the two renames.
    """
    sync_folder(partial)
    old = path.with_name(f"{path.name}{_OLD}{uuid.uuid4().hex[:8]}") if os.path.lexists(path) else None
    if old is not None:
        path.rename(old)
    try:
        partial.rename(path)
    except OSError:
        if old is not None:
            old.rename(path)
        raise
    sync_folder(path.parent)
    for left in _siblings(path, _OLD):
        remove_folder(left)


def resolve(path: Path) -> Path:
    """`path`, or the folder that was aside when a process ended while replacing it."""
    if os.path.lexists(path):
        return path
    complete = [each for each in _siblings(path, _OLD) if (each / MANIFEST_FILE).is_file()]
    return max(complete, key=lambda each: each.stat().st_mtime_ns, default=path)


def committed_name(folder: Path) -> str | None:
    """The name a folder is or was committed under; None for one that was never finished or is being removed."""
    if _PARTIAL in folder.name or _REMOVED in folder.name:
        return None
    return folder.name.partition(_OLD)[0]


def point_last(path: Path) -> None:
    """Lets `last` beside `path` name it; a reader sees the old name or the new one. A folder called `last` is left alone."""
    if (path.parent / LAST_FILE).is_dir():
        return
    beside = path.parent / f"{LAST_FILE}{_PARTIAL}{uuid.uuid4().hex[:8]}"
    try:
        write_bytes(beside, f"{path.name}\n".encode())
        beside.replace(path.parent / LAST_FILE)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def read_last(folder: Path) -> Path | None:
    """The checkpoint `last` in `folder` names; None if there is no pointer or it points to nothing."""
    try:
        name = (folder / LAST_FILE).read_text().strip()
    except OSError:
        return None
    target = resolve(folder / name)
    return target if name and target.is_dir() else None


def remove_checkpoint(path: Path) -> None:
    """Removes a checkpoint so that no reader finds half of it: it loses its name first."""
    if path.is_dir() and not path.is_symlink():
        away = path.with_name(f"{path.name}{_REMOVED}{uuid.uuid4().hex[:8]}")
        path.rename(away)
        remove_folder(away)
    else:
        path.unlink(missing_ok=True)


def remove_unfinished(folder: Path) -> list[str]:
    """Removes what interrupted saves and removals left in `folder`; only while nothing is being saved there."""
    left = unfinished(folder)
    for each in left:
        remove_folder(each)
    return [each.name for each in left]


def unfinished(folder: Path) -> list[Path]:
    """What interrupted saves and removals left in `folder`."""
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    return [each for each in entries if _PARTIAL in each.name or _REMOVED in each.name]


def remove_folder(path: Path) -> None:
    """Removes a folder, file or link as far as it can; what stays is removed by the next save of the name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def sync_folder(folder: Path) -> None:
    """Forces a folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_space(folder: Path, needed_bytes: int) -> None:
    """Refuses a save that cannot fit; the folder it replaces stays until the new one is complete, so both must fit.

    Raises:
        CheckpointError: fewer than `needed_bytes` are free.
    """
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        numbers = f"It needs {format_bytes(needed_bytes)} and {format_bytes(free_bytes)} are free"
        advice = "Free space, keep fewer checkpoints or set another folder"
        raise CheckpointError(message("checkpoint folder", str(folder), "the checkpoint does not fit", numbers, advice))


def _siblings(path: Path, mark: str) -> list[Path]:
    if not path.parent.is_dir():
        return []
    return sorted(each for each in path.parent.iterdir() if each.name.startswith(path.name + mark))
