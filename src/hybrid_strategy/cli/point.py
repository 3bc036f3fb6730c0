"""One point of a sweep: `python -m hybrid_strategy.cli.point prepare|run|begin|end FOLDER`, called by launchers and scripts.

`run` starts the ranks on this machine; `begin` and `end` stand before and after `srun` in a batch script and import no torch.
`prepare` makes the folder in a script that is submitted by hand (`slurm/train.sbatch`); elsewhere the launcher has made it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from hybrid_strategy import registry
from hybrid_strategy.cli.plan import show
from hybrid_strategy.cli.train import FIT, environment_of
from hybrid_strategy.config.compose import Source
from hybrid_strategy.config.plan import plan_of
from hybrid_strategy.config.resume import newest_checkpoint
from hybrid_strategy.config.storage import RESULT_FILE, read_config
from hybrid_strategy.errors import HybridError
from hybrid_strategy.launch import parent_death
from hybrid_strategy.launch.job import Job, Launcher
from hybrid_strategy.reporting.console import make_console
from hybrid_strategy.reporting.summary import Closing, print_summary
from hybrid_strategy.sweeping.points import read_point, write_point
from hybrid_strategy.sweeping.prepare import prepare_alone
from hybrid_strategy.sweeping.session import Session
from hybrid_strategy.sweeping.slurm import job as slurm_job


def main(argv: Sequence[str]) -> int:
    """Runs one of the four parts."""
    verb, folder = argv[0], Path(argv[1])
    if verb == "begin":
        return slurm_job.begin_job(folder)
    if verb == "end":
        return slurm_job.end_job(folder, int(argv[2]))
    try:
        if verb == "prepare":
            return prepare(folder.absolute(), argv[2:])
        parent_death.guard()
        return run(folder)
    except HybridError as error:
        print(as_sbatch(str(error)) if verb == "prepare" else error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def prepare(folder: Path, overrides: Sequence[str]) -> int:
    """Makes the folder of a run that is submitted by hand, once: a job that was put back into the queue finds it as it was."""
    if read_point(folder) is not None:
        return 0
    session = Session(make_console(), single=True, target=FIT)
    made = prepare_alone(Source(tuple(overrides)), folder, session)
    write_point(made.point, made.config, made.planned)
    show(made.config, made.planned, session.console)
    return 0


def as_sbatch(text: str) -> str:
    """A refusal for one who submits by hand: nodes and processes are those of the job, and no override changes them.

    >>> print(as_sbatch("Set 1, or cluster.devices=4."))
    Set 1, or sbatch --ntasks-per-node=4.
    """
    return text.replace("cluster.devices=", "sbatch --ntasks-per-node=").replace("cluster.num_nodes=", "sbatch --nodes=")


def run(folder: Path) -> int:
    """Starts the ranks of the point on this machine and waits for them."""
    config = read_config(folder)
    planned, console = plan_of(config), make_console()
    launcher: Launcher = registry.find("launch.launchers", config.cluster.launcher, "cluster.launcher")
    if config.resume is not None:
        console.print(f"resuming from {config.resume}", markup=False, soft_wrap=True)
    show(config, planned, console)
    launcher.run(Job(FIT, folder, planned.world.devices, environment_of(planned), stops_itself=True))
    result = json.loads((folder / RESULT_FILE).read_text(encoding="utf-8"))
    command = f"hybrid train resume={folder}" if newest_checkpoint(folder) else ""
    print_summary(Closing(result, str(folder), command), console)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
