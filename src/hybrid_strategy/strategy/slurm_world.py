"""Whether this process is one of a live Slurm step's tasks, by the step itself.

Lightning 2.6 decides by the name of the job (lightning/fabric/plugins/environments/slurm.py, issue 19762): a notebook in an
allocation would wait for tasks that nobody starts, and a step smaller than its job for ranks that do not exist.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning_utilities.core.rank_zero import rank_zero_info

from hybrid_strategy.errors import ConfigError, message


class LiveStep(SLURMEnvironment):
    """The step that this process belongs to; the job may be larger.

    Args:
        tasks: of the step.
        given: what Lightning has chosen, whose settings stay.
    """

    def __init__(self, tasks: int, given: SLURMEnvironment) -> None:
        super().__init__(given.auto_requeue, given.requeue_signal)
        self._tasks = tasks

    def world_size(self) -> int:
        return self._tasks


def live_tasks(environment: Mapping[str, str]) -> int:
    """Tasks of the step that this process belongs to; 0: of none, e.g. a batch script or a shell in an allocation."""
    if "SLURM_STEP_ID" not in environment or "SLURM_PROCID" not in environment:
        return 0
    return int(environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or "1")


def judged(given: ClusterEnvironment | None, num_nodes: int, devices: int) -> ClusterEnvironment | None:
    """The environment that fits what is running. Another one than Slurm's, which the user may give, is left alone.

    Args:
        given: what Lightning has chosen, or the user.

    Raises:
        ConfigError: the step has another number of tasks than the Trainer, so that some would wait for ever.
    """
    if type(given) is not SLURMEnvironment:
        return given
    tasks, world = live_tasks(os.environ), num_nodes * devices
    if tasks == world and tasks > 0:
        return LiveStep(tasks, given)
    if tasks <= 1 and num_nodes == 1:
        why = "a step of one task" if tasks else "no task of a step"
        rank_zero_info(f"Slurm: this process is {why}, so {world} processes are started here; srun would start them as tasks.")
        return LightningEnvironment()
    rule = "each process of the Trainer must be a task of the step"
    numbers = f"devices={devices} and num_nodes={num_nodes} are {world} processes, {tasks} tasks are running"
    advice = f"Set #SBATCH --nodes={num_nodes} --ntasks-per-node={devices} and start it with srun"
    raise ConfigError(message("SLURM_STEP_NUM_TASKS", tasks, rule, numbers, advice))
