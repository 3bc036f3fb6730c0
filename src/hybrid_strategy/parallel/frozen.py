"""Parameters that are frozen or thawed between steps, and the messages of a pipeline, whose gradients depend on it.

The receiver of a stage's output keeps in mind whether it wants a gradient back. Where layers before the cut are thawed in the
middle of a run, only their own rank sees it; so while anything is frozen the pipeline ranks compare notes before each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from hybrid_strategy.distributed.groups import Groups


class ThawWatch:
    """Notices that other parameters are trained than in the step before.

    Args:
        groups: this rank's place, in a pipeline of several ranks.
        forget: called on all pipeline ranks when it is so: what is remembered of messages is out of date.
    """

    def __init__(self, groups: Groups, forget: Callable[[], None]) -> None:
        self._groups, self._forget = groups, forget
        self.restart()

    def restart(self) -> None:
        """A fit begins."""
        self._before: list[bool] | None = None
        self._frozen = True

    def before_step(self, trainable: Sequence[bool]) -> None:
        """Looks at which of this rank's parameters are trained now.

        A collective call of the pipeline ranks at the first step, and later where anything was frozen at the first step:
        what is frozen afterwards has sent its gradients before, and may go on doing so.
        """
        now = list(trainable)
        if self._before is None:
            self._frozen = self._on_any_rank(not all(now))
            changed = True
        else:
            changed = self._frozen and self._on_any_rank(now != self._before)
        if changed:
            self._forget()
        self._before = now

    def _on_any_rank(self, flag: bool) -> bool:
        flags = torch.tensor([float(flag)])
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._groups.control)
        return bool(flags.item())
