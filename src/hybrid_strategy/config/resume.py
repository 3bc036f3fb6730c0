"""From what `resume` says to one checkpoint."""

from __future__ import annotations

from pathlib import Path

from hybrid_strategy.checkpoint.folder import MANIFEST_FILE, META_FILE, committed_name, resolve
from hybrid_strategy.checkpoint.search import Found, committed, search
from hybrid_strategy.config.folders import name_folder
from hybrid_strategy.config.settings import RunConfig
from hybrid_strategy.errors import ConfigError, message


def find_checkpoint(config: RunConfig) -> Found:
    """The checkpoint to resume from, every file of it verified, and the newer ones that cannot be trusted, with the reasons.

    Its path is None where there is none to look for, or `auto` found none.

    Raises:
        ConfigError: the path does not exist, or holds no checkpoint that can be trusted.
    """
    if config.resume is None:
        return Found(None)
    if config.resume == "auto":
        runs = _folders(Path(name_folder(config.paths.output_dir, config.name)))
        return search(*(place for run in runs for place in _places(run)), for_training=True)
    found = good_checkpoint(
        Path(config.resume).expanduser(), "resume", "Set a run folder, a checkpoint or auto", for_training=True
    )
    if found.path is not None and found.path.is_file():
        rule = "training cannot go on from a single file, whose optimizer states have numbers and no names"
        advice = "Set strategy.initial_weights to it to begin with its weights"
        raise ConfigError(message("resume", config.resume, rule, "", advice))
    return found


def good_checkpoint(given: Path, key: str, advice: str = "Set a run folder or a checkpoint", for_training: bool = False) -> Found:
    """What is meant by the path of a checkpoint, or of a run folder or folder of checkpoints: the newest good one there.

    Args:
        given: a checkpoint that is named itself is verified by who loads it, not here.
        key, advice: for the error's text.
        for_training: pass over those that hold weights only.

    Raises:
        ConfigError: the path does not exist, or holds no checkpoint that can be trusted.
    """
    path = resolve(given)
    if not path.exists():
        raise ConfigError(message(key, str(given), "there is no such path", "", advice))
    if path.is_file() or (path / MANIFEST_FILE).is_file():
        return Found(path.resolve())
    found = search(*_places(path), for_training=for_training)
    if found.path is None:
        reasons = "; ".join(f"{name}: {why}" for name, why in found.skipped)
        raise ConfigError(message(key, str(given), "it holds no finished checkpoint", reasons, advice))
    return Found(found.path.resolve(), found.skipped)


def newest_good(folder: Path) -> Path | None:
    """The newest checkpoint of a run folder that verifies and that training can go on from; None where there is none."""
    return search(*_places(folder), for_training=True).path


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest finished checkpoint of a run folder or of a folder of checkpoints, not verified; None where there is none."""
    return next(iter(committed(*_places(folder))), None)


def _places(folder: Path) -> list[Path]:
    """Where the checkpoints of a run may lie, or those of a folder of checkpoints.

    A metric's name with a slash in a file name (`{step}-{val/loss:.2f}`) makes a folder of what stands before it.
    """
    inner = folder if folder.name == "checkpoints" else folder / "checkpoints"
    named_after_metrics = (each for each in (inner.iterdir() if inner.is_dir() else ()) if each.is_dir() and not _is_one(each))
    return [inner, *sorted(named_after_metrics), folder]


def _is_one(folder: Path) -> bool:
    """It is a checkpoint itself, whole or not."""
    return any((folder / name).exists() for name in (MANIFEST_FILE, META_FILE, ".metadata")) or committed_name(folder) is None


def _folders(folder: Path) -> list[Path]:
    return [each for each in folder.iterdir() if each.is_dir()] if folder.is_dir() else []
