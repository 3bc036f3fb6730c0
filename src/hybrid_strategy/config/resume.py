"""From what `resume` says to one checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hybrid_strategy.config.folders import name_folder
from hybrid_strategy.config.settings import RunConfig
from hybrid_strategy.errors import ConfigError, message

_MANIFEST = "manifest.json"
"""The file that a finished checkpoint folder has (`checkpoint/folder.py`, which needs torch)."""


def find_checkpoint(config: RunConfig) -> Path | None:
    """The checkpoint to resume from; None where there is none to look for, or `auto` found none.

    Raises:
        ConfigError: the path does not exist, or holds no finished checkpoint.
    """
    if config.resume is None:
        return None
    if config.resume == "auto":
        runs = Path(name_folder(config.paths.output_dir, config.name))
        return _newest(path for run in _folders(runs) for path in _checkpoints(run))
    path = Path(config.resume).expanduser()
    if not path.exists():
        raise ConfigError(message("resume", config.resume, "there is no such path", "", "Set a run folder, a checkpoint or auto"))
    if path.is_file() or (path / _MANIFEST).is_file():
        return path.resolve()
    found = newest_checkpoint(path)
    if found is None:
        rule = "it holds no finished checkpoint"
        raise ConfigError(message("resume", config.resume, rule, "", "Set a run folder, a checkpoint or auto"))
    return found.resolve()


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest finished checkpoint of a run folder or of a folder of checkpoints; None where there is none."""
    return _newest(_checkpoints(folder))


def _checkpoints(folder: Path) -> list[Path]:
    return [*_folders(folder / "checkpoints"), *_folders(folder)]


def _folders(folder: Path) -> list[Path]:
    return [each for each in folder.iterdir() if each.is_dir()] if folder.is_dir() else []


def _newest(folders: Iterable[Path]) -> Path | None:
    finished = [each for each in folders if ".partial-" not in each.name and (each / _MANIFEST).is_file()]
    return max(finished, key=lambda each: (each / _MANIFEST).stat().st_mtime_ns, default=None)
