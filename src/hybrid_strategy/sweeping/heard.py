"""Settings of Hydra's that only its own launchers hear: those start jobs of Hydra's, ours start processes from a folder."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from hybrid_strategy.errors import ConfigError, message

_NO_JOB = {
    "job.env_set": ({}, "Set hydra.launcher.environment; variables of this shell reach the points without hydra.job.env_copy"),
    "job.chdir": (False, "Leave it out: the processes of a point keep the folder of the command"),
    "sweep.subdir": ("${hydra.job.num}", "Leave it out: points are called after what varies"),
    "output_subdir": (".hydra", "Leave it out: what was composed is in config.yaml"),
}
"""Key -> its default, and what to set instead."""
_FOLDERS = {True: ("sweep", "run"), False: ("run", "sweep")}
"""Is it a single run -> whose folder nothing is written to, whose is used."""


def check_heard(config: DictConfig, single: bool) -> None:
    """Refuses what would be ignored.

    Raises:
        ConfigError: a setting of jobs of Hydra's, for a launcher of ours.
    """
    raw = OmegaConf.to_container(config.hydra, resolve=False)
    for key, (default, advice) in _NO_JOB.items():
        value = _at(raw, key)
        if value and value != default:
            raise ConfigError(message(f"hydra.{key}", value, "only Hydra's own launchers hear it", "", advice))
    unused, used = _FOLDERS[single]
    if _is_set(raw, unused) and not _is_set(raw, used):  # a file that names both serves runs and sweeps
        rule = f"it is no folder of a {'single run' if single else 'sweep'}"
        value = _at(raw, f"{unused}.dir")
        raise ConfigError(message(f"hydra.{unused}.dir", value, rule, "", f"Set hydra.{used}.dir or paths.run_dir"))


def _is_set(raw: Any, kind: str) -> bool:
    """Is the folder neither our default nor Hydra's own?"""
    folder = str(_at(raw, f"{kind}.dir"))
    return f"hybrid_{kind}_dir:" not in folder and "${now:" not in folder


def _at(values: Any, path: str) -> Any:
    for part in path.split("."):
        values = values[part]
    return values
