"""SIGKILL at a chosen moment of a run, planned by the environment: in which phase, how often entered, after how long, whom."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

PLAN_VARIABLE = "CHECKPOINT_KILL"
PHASES = ("training", "validating", "saving", "committing")
VICTIMS = ("one", "all", "parent")

_plan: dict[str, Any] = {}


def arm() -> None:
    """Reads the plan; from then on the phases count."""
    _plan.update(json.loads(os.environ.get(PLAN_VARIABLE, "{}")))
    if not _plan or _plan.get("armed"):
        return
    _plan.update(armed=True, seen=0)
    from hybrid_strategy.checkpoint.agreement import Ranks

    for name, verb, phase in (("collect", "write", "saving"), ("lead", "commit", "committing")):
        setattr(Ranks, name, _noticed(getattr(Ranks, name), verb, phase))


def _noticed(method: Callable[..., Any], verb: str, phase: str) -> Callable[..., Any]:
    def noticing(ranks: Any, work: Any, function: Any) -> Any:
        if work.verb == verb:
            enter(phase)
        return method(ranks, work, function)

    return noticing


def enter(phase: str) -> None:
    """To be called where a phase begins."""
    if _plan.get("phase") != phase:
        return
    _plan["seen"] += 1
    if _plan["seen"] == _plan["count"] and (pid := _victim()):
        threading.Timer(_plan["delay_seconds"], os.kill, (pid, signal.SIGKILL)).start()


def _victim() -> int:
    """The process that this one kills; 0: none."""
    rank, who = int(os.environ.get("RANK", "0")), _plan["who"]
    if who == "parent":
        return os.getppid() if rank == 0 else 0
    return os.getpid() if who == "all" or rank == _plan["rank"] else 0
