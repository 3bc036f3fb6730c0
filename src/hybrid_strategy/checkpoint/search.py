"""Which checkpoint of a folder can be trusted: complete, and every file as it was written. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from hybrid_strategy.checkpoint.folder import MANIFEST_FILE, META_FILE, committed_name, is_hidden, unfinished
from hybrid_strategy.checkpoint.manifest import Manifest, check_files, read_manifest
from hybrid_strategy.errors import CheckpointError


@dataclass(frozen=True)
class Found:
    """A search for the newest good checkpoint.

    Attributes:
        path: the checkpoint; None if there is none.
        skipped: (folder, why) of newer ones that cannot be trusted, and of unfinished ones.
    """

    path: Path | None
    skipped: tuple[tuple[str, str], ...] = ()

    def lines(self) -> list[str]:
        """For printing: what was chosen and what was not."""
        head = f"Newest good checkpoint: {self.path}" if self.path else "No good checkpoint was found"
        return [head, *(f"  skipped {name}: {why}" for name, why in self.skipped)]


def verify_checkpoint(path: Path, digests: bool = True) -> Manifest:
    """Checks that a folder is complete and every file is as it was written.

    Raises:
        CheckpointError: the manifest or a file is missing, truncated or altered; names it.
    """
    manifest = read_manifest(path)
    check_files(path, manifest, digests=digests)
    return manifest


def committed(*folders: Path) -> list[Path]:
    """What in `folders` claims to be a complete checkpoint, newest first. Links and hidden ones are left out."""
    found = [each for folder in folders if folder.is_dir() for each in folder.iterdir() if _claims(each)]
    return sorted(found, key=lambda each: (_created_seconds(each), each.name), reverse=True)


def search(*folders: Path, digests: bool = True, for_training: bool = False) -> Found:
    """The newest checkpoint in `folders` that verifies; looked for by this process alone.

    Args:
        for_training: pass over those that hold weights only.
    """
    skipped = [(each.name, "it was never finished") for folder in folders for each in unfinished(folder)]
    skipped += [(each.name, f"it has no {MANIFEST_FILE}") for folder in folders for each in _without_manifest(folder)]
    for each in committed(*folders):
        try:
            verify_checkpoint(each, digests)
        except CheckpointError as error:
            skipped.append((each.name, str(error)))
            continue
        if not (for_training and _holds_weights_only(each)):
            return Found(each, tuple(skipped))
        skipped.append((each.name, "it holds weights only, so training cannot go on from it"))
    return Found(None, tuple(skipped))


def instead_of(path: Path) -> str:
    """A sentence that offers the newest good checkpoint beside a damaged one; empty where `path` is not damaged."""
    try:
        if not path.is_file():
            verify_checkpoint(path)
    except CheckpointError:
        found = search(path.parent)
        return f" The newest good checkpoint beside it is {found.path}." if found.path else " No good one lies beside it."
    return ""


def _holds_weights_only(path: Path) -> bool:
    try:
        return bool(json.loads((path / META_FILE).read_text())["meta"].get("weights_only"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _claims(path: Path) -> bool:
    named = committed_name(path) is not None and not is_hidden(path)
    return named and not path.is_symlink() and (path / MANIFEST_FILE).is_file()


def _without_manifest(folder: Path) -> list[Path]:
    """Folders that lost their manifest: they have another file that only a checkpoint has."""
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    return [
        each
        for each in entries
        if committed_name(each) is not None and (each / META_FILE).is_file() and not (each / MANIFEST_FILE).is_file()
    ]


def _created_seconds(path: Path) -> float:
    """When it was committed; for a damaged manifest the folder's own time, so that it is still looked at in its turn."""
    try:
        return read_manifest(path).created_seconds
    except CheckpointError:
        return (path / MANIFEST_FILE).stat().st_mtime
