"""The entry of every task under `srun`: `python -m hybrid_strategy.launch.slurm_rank <package.module:function> <run folder>`.

The step's own variables become those that torchrun would set; what differs from the plan is refused before anyone waits.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from hybrid_strategy.checkpoint.stop_request import REQUEST
from hybrid_strategy.errors import ConfigError, message
from hybrid_strategy.launch import failures, worker
from hybrid_strategy.launch.failures import has_failed
from hybrid_strategy.launch.launchers.local import SHUTDOWN_SECONDS

_POLL_SECONDS = 0.5
_PLAN_FILE = "plan.json"
_TASKS = re.compile(r"^(\d+)(?:\(x(\d+)\))?$")


def tasks_per_node(text: str) -> list[int]:
    """Slurm's short form of task counts, node by node.

    >>> tasks_per_node("4(x2),2"), tasks_per_node("1")
    ([4, 4, 2], [1])
    """
    counts: list[int] = []
    for part in text.split(","):
        found = _TASKS.match(part.strip())
        if found is None:
            rule = "it cannot be read as counts of tasks"
            raise ConfigError(message("SLURM_TASKS_PER_NODE", text, rule, "", "Start the ranks with srun"))
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would set, from the live step: the job may be larger than the step.

    Raises:
        ConfigError: this is no task of a step, or the nodes have different numbers of tasks.
    """
    if "SLURM_PROCID" not in environment or "SLURM_LOCALID" not in environment:
        rule = "this process is no task of a Slurm step"
        raise ConfigError(message("SLURM_PROCID", "missing", rule, "", "Start the ranks with srun"))
    given = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE") or "1"
    counts = tasks_per_node(given)
    if len(set(counts)) > 1:
        rule, advice = "every node must have the same number of tasks", "Set #SBATCH --ntasks-per-node and --nodes"
        raise ConfigError(message("SLURM_TASKS_PER_NODE", given, rule, "", advice))
    world = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or str(sum(counts))
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": world,
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(counts[0]),
        "GROUP_RANK": environment.get("SLURM_NODEID", "0"),
    }


def check_world(plan: Mapping[str, object], variables: Mapping[str, str]) -> None:
    """Refuse a step of another shape than the plan: its ranks would wait for some that never come.

    Raises:
        ConfigError: with the lines of the script to change.
    """
    nodes, devices = int(str(plan["num_nodes"])), int(str(plan["devices"]))
    tasks, local = int(variables["WORLD_SIZE"]), int(variables["LOCAL_WORLD_SIZE"])
    if tasks == nodes * devices and local == devices:
        return
    rule = "the step must have a task for each process of the layout"
    numbers = f"The layout needs {nodes} x {devices} = {nodes * devices} tasks, {local} on each node are running"
    advice = f"Set #SBATCH --nodes={nodes} --ntasks-per-node={devices}"
    raise ConfigError(message("SLURM_STEP_NUM_TASKS", tasks, rule, numbers, advice))


def leave_with_the_failed(log_dir: Path) -> None:
    """From now on a signal that comes because another rank has failed ends this one, also where it waits for others to come.

    There no handler of Python's runs, and Slurm would kill it after `KillWait` (30 s). A thread is told by the signal itself.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    arguments = (reader, writer, log_dir)  # the second is held: it must stay open
    threading.Thread(target=_watch, args=arguments, daemon=True, name="failed-peers").start()


def _watch(reader: socket.socket, writer: socket.socket, log_dir: Path) -> None:
    while reader.recv(1) != bytes([signal.SIGTERM]):
        continue  # another signal is the main thread's
    while not has_failed(log_dir):
        time.sleep(_POLL_SECONDS)
    time.sleep(SHUTDOWN_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)  # as Slurm would: an exit code would look like a cause


def main() -> None:
    """Runs one rank; leaves without waiting for what a dead peer will never answer."""
    target, run_dir = sys.argv[1], Path(sys.argv[2])
    REQUEST.listen()  # a signal that comes before there is anything to save is remembered
    leave_with_the_failed(run_dir / "logs")
    rank = int(os.environ.get("SLURM_PROCID", "0"))
    try:
        variables = rank_variables(os.environ)
        check_world(json.loads((run_dir / _PLAN_FILE).read_text(encoding="utf-8")), variables)
    except ConfigError as error:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        failures.record(run_dir / "logs", rank, error)
        sys.exit(f"{error}")
    os.environ.update(variables)
    code = worker.run(target, run_dir, rank)
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)
    worker.leave()


if __name__ == "__main__":
    main()
