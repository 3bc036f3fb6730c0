"""`manifest.json`: size and digest of every file of a checkpoint. It is written last, so a folder that has it is complete."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_strategy.checkpoint.digests import Digest, read_digest, write_unsynced
from hybrid_strategy.checkpoint.folder import FORMAT_VERSION, MANIFEST_FILE
from hybrid_strategy.errors import CheckpointError, message

_ADVICE = "Load another checkpoint"


@dataclass(frozen=True)
class Manifest:
    """What a complete folder consists of.

    Attributes:
        created_seconds: Unix time of the commit.
        files: size and digest by file name.
    """

    created_seconds: float
    files: dict[str, Digest]

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.files.values())


def write_manifest(folder: Path, files: dict[str, Digest]) -> Manifest:
    """Writes the manifest of `files`; to force it to the disk is the caller's.

    Raises:
        CheckpointError: a file is not there in its size, e.g. because another node wrote it to a disk of its own.
    """
    for name, digest in files.items():
        _check_size(folder, name, digest)
    manifest = Manifest(time.time(), files)
    entries = {name: each.entry() for name, each in sorted(files.items())}
    body = {"format_version": FORMAT_VERSION, "created_seconds": manifest.created_seconds, "files": entries}
    write_unsynced(folder / MANIFEST_FILE, json.dumps({**body, "sha256": _own_digest(body)}, indent=1).encode())
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Raises:
    CheckpointError: the folder has no manifest, a damaged one, or one of a newer format.
    """
    text = _manifest_text(folder)
    try:
        body = json.loads(text)
        stated = body.pop("sha256")
        version = int(body["format_version"])
        if version > FORMAT_VERSION:
            raise _damaged(folder, MANIFEST_FILE, f"is of format {version}", f"This version reads up to {FORMAT_VERSION}")
        files = {name: Digest.of_entry(each) for name, each in body["files"].items()}
        created_seconds = float(body["created_seconds"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(folder, MANIFEST_FILE, "is altered", f"{type(error).__name__}: {error}") from error
    if stated != _own_digest(body):
        raise _damaged(folder, MANIFEST_FILE, "is altered", "Its own digest does not match")
    return Manifest(created_seconds, files)


def check_files(folder: Path, manifest: Manifest, share: tuple[int, int] = (0, 1), digests: bool = True) -> None:
    """Compares the files with the manifest.

    Args:
        share: (index, count): the sizes of all files are checked, the digests only of this part of them, so that `count` ranks
            together read each file once.
        digests: False checks sizes only.

    Raises:
        CheckpointError: a file is missing, truncated or altered; names it.
    """
    for name, stated in manifest.files.items():
        _check_size(folder, name, stated)
    by_size = sorted(manifest.files, key=lambda name: manifest.files[name].num_bytes, reverse=True)
    for name in by_size[share[0] :: share[1]] if digests else ():
        if read_digest(folder / name, manifest.files[name].kind) != manifest.files[name]:
            raise _damaged(folder, name, "is altered", "Its digest is not the one it was written with")


def _check_size(folder: Path, name: str, stated: Digest) -> None:
    try:
        size = (folder / name).stat().st_size
    except OSError as error:
        if not folder.is_dir():
            raise _absent(folder) from error
        advice = "The folder must be on a file system that all nodes share"
        raise _damaged(folder, name, "is missing", f"{type(error).__name__}: {error}", advice) from error
    if size != stated.num_bytes:
        kind = "is truncated" if size < stated.num_bytes else "is longer than written"
        raise _damaged(folder, name, kind, f"It has {size} bytes of {stated.num_bytes}")


def _manifest_text(folder: Path) -> str:
    try:
        return (folder / MANIFEST_FILE).read_text()
    except UnicodeDecodeError as error:
        raise _damaged(folder, MANIFEST_FILE, "is altered", str(error)) from error
    except OSError as error:
        if folder.is_dir():
            raise _damaged(folder, MANIFEST_FILE, "is missing: it was never finished", "", _ADVICE) from error
        raise _absent(folder) from error


def _own_digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _absent(folder: Path) -> CheckpointError:
    numbers = "" if folder.parent.is_dir() else f"Nor is there {folder.parent}"
    rule = "there is no such folder; if there was, it has been removed or renamed since"
    return CheckpointError(message("checkpoint", str(folder), rule, numbers, "Set the path of one"))


def _damaged(folder: Path, name: str, what: str, numbers: str, advice: str = _ADVICE) -> CheckpointError:
    return CheckpointError(message("checkpoint", str(folder), f"its file {name} {what}", numbers, advice))
