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
_FOLDERS = {True: ("sweep.dir", "hybrid_sweep_dir", "run"), False: ("run.dir", "hybrid_run_dir", "sweep")}
"""Is it a single run -> the folder that nothing is written to, the resolver that its default names, the one that is used."""


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
    key, resolver, used = _FOLDERS[single]
    value = _at(raw, key)
    if f"{resolver}:" not in str(value) and "${now:" not in str(value):  # nor Hydra's own default
        rule = f"it is no folder of a {'single run' if single else 'sweep'}"
        raise ConfigError(message(f"hydra.{key}", value, rule, "", f"Set hydra.{used}.dir or paths.run_dir"))


def _at(values: Any, path: str) -> Any:
    for part in path.split("."):
        values = values[part]
    return values
