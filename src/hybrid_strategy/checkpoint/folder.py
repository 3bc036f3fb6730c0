"""The folder of one checkpoint and how it comes to be: written beside, complete or not there at all.

<name>.partial-<id>/     being written; never read
<name>.old-<id>/         the folder of this name that is being replaced; there for an instant, or after a crash in it
<name>/
    .metadata            torch's index: which block of which tensor lies where
    __<rank>_0.distcp    the blocks each rank wrote
    meta.pt              state of loops, callbacks, schedulers, scaler (data only)
    replicated.pt        per-parameter numbers: step counts, hyper-parameters of parameter groups, by parameter name
    rng.pt               random state by logical coordinate
    plan.json            the plan the run was made with
    meta.json            format, versions, steps, data position, what could not be saved
    manifest.json        size and digest of every other file; written last
last                     text file beside the folders: the name of the newest one
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import shutil
import uuid
from collections.abc import Collection
from pathlib import Path

from hybrid_strategy.checkpoint.digests import write_bytes
from hybrid_strategy.errors import CheckpointError, message
from hybrid_strategy.units import format_bytes

STATE_FILE, REPLICATED_FILE, RANDOM_FILE = "meta.pt", "replicated.pt", "rng.pt"
PLAN_FILE, META_FILE, MANIFEST_FILE = "plan.json", "meta.json", "manifest.json"
LAST_FILE = "last"
FORMAT_VERSION = 2
_HOLDS_OTHERS = "the folder holds other things and would be replaced"
_POINTER_BYTES = 1024
_PARTIAL, _OLD, _REMOVED = ".partial-", ".old-", ".removed-"


def check_replaceable(path: Path) -> None:
    """Refuses a path whose folder holds other things: they would go when the checkpoint takes its place.

    Many programs call a file `manifest.json`, so that it says nothing.

    Raises:
        CheckpointError: it is a folder, not empty, and no checkpoint.
    """
    if path.is_dir() and any(path.iterdir()) and not any((path / mark).exists() for mark in (META_FILE, STATE_FILE, ".metadata")):
        raise CheckpointError(message("path", str(path), _HOLDS_OTHERS, "", "Set the path of a new folder"))


def refuse_url(key: str, path: str) -> None:
    """Refuses `s3://...`, which as a path would be a folder of that name on the local disk.

    Raises:
        CheckpointError: always then.
    """
    scheme, sign, _ = path.partition("://")
    if sign and scheme.isidentifier():
        rule = "checkpoints are folders of a file system that all nodes share, not objects of a store"
        raise CheckpointError(message(key, path, rule, "", "Set a path, and copy finished checkpoints from there"))


def check_holds_only(path: Path, patterns: Collection[str]) -> None:
    """Refuses a folder with anything beside files of these names: it would go when the folder is replaced.

    Raises:
        CheckpointError: names what would go.
    """
    entries = sorted(path.iterdir()) if path.is_dir() else []
    others = [each.name for each in entries if not any(fnmatch.fnmatch(each.name, pattern) for pattern in patterns)]
    if others:
        numbers = f"There are {', '.join(others[:5])}{' and more' if len(others) > 5 else ''}"
        raise CheckpointError(message("path", str(path), _HOLDS_OTHERS, numbers, "Set the path of a new folder"))


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
    """Lets `last` beside `path` name it; a reader sees the old name or the new one.

    A folder of that name, and a file that is no pointer (an old checkpoint, somebody's notes), is left alone. A hidden checkpoint
    is not pointed to.
    """
    if is_hidden(path) or not _is_free_for_pointer(path.parent / LAST_FILE):
        return
    beside = path.parent / f"{LAST_FILE}{_PARTIAL}{uuid.uuid4().hex[:8]}"
    try:
        write_bytes(beside, f"{path.name}\n".encode())
        beside.replace(path.parent / LAST_FILE)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def is_hidden(path: Path) -> bool:
    """A name that begins with a dot is for a passing purpose: Lightning's tuner saves the state that it will put back."""
    return path.name.startswith(".")


def _is_free_for_pointer(path: Path) -> bool:
    """There is nothing there, or one line of text."""
    if not path.exists():
        return True
    if path.is_dir() or path.stat().st_size > _POINTER_BYTES:
        return False
    text = path.read_bytes()
    return text.count(b"\n") == 1 and text.endswith(b"\n") and b"\0" not in text


def read_last(folder: Path) -> Path | None:
    """The checkpoint `last` in `folder` names; None if there is no pointer or it points to nothing."""
    try:
        name = (folder / LAST_FILE).read_text().strip()
    except OSError:
        return None
    target = resolve(folder / name)
    return target if name and target.is_dir() else None


def remove_checkpoint(path: Path) -> None:
    """Removes a checkpoint so that no reader finds half of it: it loses its name first. A pointer to nothing goes with it."""
    pointed = read_last(path.parent)
    if path.is_dir() and not path.is_symlink():
        away = path.with_name(f"{path.name}{_REMOVED}{uuid.uuid4().hex[:8]}")
        path.rename(away)
        remove_folder(away)
    else:
        path.unlink(missing_ok=True)
    if pointed is not None and pointed == path:
        (path.parent / LAST_FILE).unlink(missing_ok=True)


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
