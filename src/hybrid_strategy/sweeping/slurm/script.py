"""The sbatch script of a point: what a person would have written, nothing that has to be decoded."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid_strategy.errors import ConfigError, message
from hybrid_strategy.sweeping.points import Point
from hybrid_strategy.sweeping.settings import SlurmSettings, seconds_of

SCRIPT_FILE = "slurm/job.sh"
BATCH_LOG = "slurm/batch.log"

_OPTION = re.compile(r"^[a-z][a-z0-9-]*$")

_OF_THE_LAYOUT = (
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "tasks-per-node",
    "ntasks-per-gpu",
    "ntasks-per-core",
    "ntasks-per-socket",
)
_ELSEWHERE = {
    **dict.fromkeys(_OF_THE_LAYOUT, "It follows from the layout: set strategy and cluster"),
    **dict.fromkeys(("output", "error", "open-mode"), f"How the run ended is read there: leave it at {BATCH_LOG}"),
    **dict.fromkeys(("requeue", "no-requeue"), "Set hydra.launcher.max_requeues"),
    "time": "Set hydra.launcher.time",
    "job-name": "Jobs are called after sweep and point: set name",
    "signal": "Set hydra.launcher.signal_seconds",
    "array": "Set hydra.launcher.array",
    "wait": "Set hydra.launcher.wait",
    "test-only": "Set hydra.launcher.dry_run",
    "wrap": "Set hydra.launcher.setup",
}
"""Options of sbatch that the script has already, or that would let two jobs run in one folder, with what to do instead."""


_SHORT = {"-N": "nodes", "-n": "ntasks", "-o": "output", "-e": "error"}
_OF_SRUN = (*_OF_THE_LAYOUT, "output", "error", "open-mode")
"""Arguments of srun that would make its step another one."""
_OF_SETTINGS = ("partition", "account", "qos", "constraint", "reservation", "mem", "cpus_per_task")
"""Options of sbatch that are settings of the same name."""

_KEYS = {"job-name": "name", "output": "paths.output_dir"}
"""Options whose values follow from settings of other names."""


def options_of(point: Point, settings: SlurmSettings, sweep: str) -> dict[str, Any]:
    """What sbatch is asked for, by name; nodes, tasks and GPUs are the layout's. A single run's folder is the sweep's, too."""
    needs = point.resources
    seconds = seconds_of(settings.time, "hydra.launcher.time") or 60.0
    options: dict[str, Any] = {
        "job-name": f"{sweep}.{point.name}" if sweep != point.folder.name else point.name,
        "nodes": needs.nodes,
        "ntasks-per-node": needs.tasks_per_node,
        "time": max(1, -(-int(seconds) // 60)),
    }
    options |= _named(settings)
    if settings.signal_seconds >= seconds:
        rule = "the ranks would be told to save as soon as they start"
        numbers = f"The time limit is {seconds:g} s"
        key = "hydra.launcher.signal_seconds"
        raise ConfigError(message(key, settings.signal_seconds, rule, numbers, f"Set {int(seconds // 2)}, or a longer time"))
    options["signal"] = f"USR1@{settings.signal_seconds}"
    options["requeue" if settings.max_requeues else "no-requeue"] = True
    return options | _further(settings)


def _named(settings: SlurmSettings) -> dict[str, Any]:
    given = {name.replace("_", "-"): getattr(settings, name) for name in _OF_SETTINGS}
    return {name: value for name, value in given.items() if value is not None}


def _further(settings: SlurmSettings) -> dict[str, Any]:
    """The options of `hydra.launcher.sbatch`, none of which may be ignored."""
    twice = {name: f"Set hydra.launcher.{name.replace('-', '_')}" for name in _named(settings)}
    elsewhere = {**_ELSEWHERE, **twice, _option_of_gpus(settings): "Set hydra.launcher.gpu_option"}
    further = {str(name).lstrip("-"): value for name, value in settings.sbatch.items()}
    for name, value in further.items():
        if not _OPTION.match(name):
            raise ConfigError(
                message(f"hydra.launcher.sbatch.{name}", value, "it is no option of sbatch", "", "Set its long name")
            )
        if name in elsewhere and value is not None:
            raise ConfigError(message(f"hydra.launcher.sbatch.{name}", value, "the script says it itself", "", elsewhere[name]))
    return further


def _option_of_gpus(settings: SlurmSettings) -> str:
    return (settings.gpu_option or "").lstrip("-").partition("=")[0]


def gpu_line(point: Point, settings: SlurmSettings) -> list[str]:
    """How GPUs are asked for, as sites do it in different ways."""
    if not point.resources.gpus or settings.gpu_option is None:
        return []
    return [f"#SBATCH {settings.gpu_option.replace('{n}', str(point.resources.tasks_per_node))}"]


def header(point: Point, settings: SlurmSettings, sweep: str, log: Path) -> list[str]:
    """The lines for sbatch. Slurm reads them itself, without a shell: a value is one word or stands in quotes."""
    lines = []
    for name, value in options_of(point, settings, sweep).items():
        if value is None or value is False:
            continue
        lines.append(f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={word(name, value)}")
    return [
        *lines,
        *gpu_line(point, settings),
        f"#SBATCH --output={word('output', _literal(log))}",
        "#SBATCH --open-mode=append",
    ]


def script_of(point: Point, settings: SlurmSettings, sweep: str, target: str) -> str:
    """The whole script."""
    python = shlex.quote(settings.python or sys.executable)
    folder = shlex.quote(str(point.folder))
    listen = "USR1,USR2,TERM"
    size = f"{point.resources.nodes} x {point.resources.tasks_per_node} ranks"
    lines = [
        "#!/bin/bash",
        f"# point {_comment(point.name)} of sweep {_comment(sweep)}: {size}",
        *header(point, settings, sweep, point.folder / BATCH_LOG),
        "",
        "trap : TERM USR1 USR2  # the ranks are told to save; this shell waits for them",
        f"RUN={folder}",
        f"PYTHON={python}",
        "export MASTER_ADDR=$(hostname) MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))",
        f"export HYBRID_STRATEGY_STOP_SIGNALS={listen} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${{SLURM_CPUS_PER_TASK:-1}}",
        *_exports(settings.environment),
        *settings.setup,
        "",
        '"$PYTHON" -m hybrid_strategy.cli.point begin "$RUN" || exit 1',
        f'"$PYTHON" -m hybrid_strategy.launch.slurm_step "$RUN" srun --kill-on-bad-exit=1 {_srun(settings)}\\',
        f'    "$PYTHON" -m hybrid_strategy.launch.slurm_rank {target} "$RUN"',
        "code=$?",
        '"$PYTHON" -m hybrid_strategy.cli.point end "$RUN" "$code"',
    ]
    return "\n".join(lines) + "\n"


def _exports(environment: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, value in environment.items():
        lines.append(f"unset {name}" if value is None else f"export {name}={shlex.quote(str(value))}")
    return lines


def _srun(settings: SlurmSettings) -> str:
    for index, each in enumerate(settings.srun):
        name = re.split(r"[=\s]", each, maxsplit=1)[0]
        option = name[2:] if name.startswith("--") else _SHORT.get(name[:2], "")
        if option in _OF_SRUN:
            rule = "the ranks of a point follow from its layout, and its end is read from its log"
            raise ConfigError(message(f"hydra.launcher.srun[{index}]", each, rule, "", _ELSEWHERE[option]))
    return "".join(f"{shlex.quote(each)} " for each in settings.srun)


def _literal(path: Path) -> str:
    """Slurm fills patterns such as %j into file names, and takes a backslash for the end of that."""
    return str(path).replace("%", "%%")


def word(name: str, value: object) -> str:
    """The value of an option as sbatch reads it from a line of a script.

    Raises:
        ConfigError: no such line can hold it.
    """
    text = str(value)
    if "\n" in text or "\r" in text or '"' in text:
        rule = "a line of the script cannot hold line breaks or double quotes"
        raise ConfigError(message(_KEYS.get(name, f"hydra.launcher, --{name}"), text, rule, "", "Set another value"))
    return text if re.fullmatch(r"[\w.,:@/%+=\-\[\]]+", text) else f'"{text}"'


def _comment(text: str) -> str:
    return " ".join(text.split())
