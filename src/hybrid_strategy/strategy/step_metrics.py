"""torchmetrics objects: updated where the step runs, synchronised over data-parallel ranks only, known on all ranks.

A metric's value of one step is that of all its micro-batches and data-parallel ranks together: a second metric, emptied before
each step, is updated beside the user's. Under a pipeline only the ranks of the last stage hold what was counted; `compute()`,
called on all ranks, gives all of them the last stage's value. So are metrics that a module keeps in a dict or a list. Those of
callbacks count what hooks give them, on all ranks, and are synchronised over the same ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from hybrid_strategy.distributed.groups import Groups


class _DataGather:
    """Gathers a metric's state over the data-parallel ranks; copies of a metric share it."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def __call__(self, state: Tensor, group: Any = None) -> list[Tensor]:
        if self._group is None:
            return [state]
        return gather_all_tensors(state, self._group)

    def __deepcopy__(self, memo: dict[int, Any]) -> _DataGather:
        return self


_OF_MODULES = frozenset(vars(nn.Module()))
_LOOKED_INTO = 64
"""Entries of a dict or a list that may hold metrics."""


def _ignore(*_args: Any, **_kwargs: Any) -> None:
    """Stands for a metric's `update` while a row of padding passes."""


class StepMetrics:
    """The metric objects of one LightningModule.

    Args:
        module: the user's module.
        groups: this rank's place.
        last_stage_rank: the pipeline rank whose metrics are updated.
    """

    def __init__(self, module: nn.Module, groups: Groups, last_stage_rank: int) -> None:
        self._module = module
        self._metrics = self._present()
        self._of_callbacks: list[Metric] = []
        self._resting: dict[int, Callable[..., None]] = {}
        self._groups, self._last_stage_rank = groups, last_stage_rank
        self._gather = _DataGather(groups.data)
        self._twins = {id(each): copy.deepcopy(each) for each in self._metrics}
        self._forwarded: set[int] = set()
        self._in_step = self._computing = False
        for twin in self._twins.values():
            self._share_state(twin)

    def _present(self) -> list[Metric]:
        """The metrics of the module at the moment."""
        registered = [each for each in self._module.modules() if isinstance(each, Metric)]
        return list({id(each): each for each in (*registered, *metrics_held_by(self._module))}.values())

    def attach(self, callbacks: Iterable[object]) -> None:
        """From now on the metrics, also those that `callbacks` hold, are those of the whole run."""
        found = [each for holder in callbacks for each in metrics_held_by(holder)]
        own = {id(each) for each in self._metrics}
        self._of_callbacks = list({id(each): each for each in found if id(each) not in own}.values())
        for metric in self._of_callbacks:
            self._share_state(metric)
        for metric in self._metrics:
            self._share_state(metric)
            own = vars(metric)["compute"]
            if self._groups.upward is not None and not isinstance(own, partial):
                vars(metric)["compute"] = partial(self._compute, metric, own)

    def release(self) -> None:
        """Gives the metrics back as they were."""
        self.go_on()
        for metric in self._metrics:
            own = vars(metric)["compute"]
            if isinstance(own, partial):
                vars(metric)["compute"] = own.args[1]
        for metric in (*self._metrics, *self._of_callbacks):
            if isinstance(metric.dist_sync_fn, _DataGather):
                metric.dist_sync_fn = None

    def _share_state(self, metric: Metric) -> None:
        """Where the user has not said over which processes a metric is synchronised, it is over the data-parallel ranks."""
        if metric.dist_sync_fn is None and metric.process_group is None:
            metric.dist_sync_fn = self._gather

    def rest(self) -> None:
        """The hooks of a batch of padding follow: metrics of callbacks stay as they are until `go_on`."""
        for metric in self._of_callbacks:
            self._resting.setdefault(id(metric), vars(metric)["update"])
            vars(metric)["update"] = _ignore

    def go_on(self) -> None:
        """The hooks of a batch are done."""
        for metric in self._of_callbacks if self._resting else ():
            vars(metric)["update"] = self._resting.get(id(metric), vars(metric)["update"])
        self._resting.clear()

    def begin(self) -> None:
        """A step begins."""
        for key in self._forwarded:
            self._twins[key].reset()
        self._forwarded.clear()

    @contextmanager
    def watching(self, counts: bool) -> Iterator[None]:
        """Follows the metrics during one micro-batch; where `counts` is false they stay as they are."""
        self._in_step = True
        ignoring = [] if counts else [(each, vars(each)["update"]) for each in self._present()]  # a tracker makes new ones
        for metric, _ in ignoring:
            vars(metric)["update"] = _ignore
        for metric in self._metrics:
            vars(metric)["forward"] = partial(self._forward, metric, counts)
        try:
            yield
        finally:
            self._in_step = False
            for metric in self._metrics:
                del vars(metric)["forward"]
            for metric, update in ignoring:
                vars(metric)["update"] = update

    def step_value(self, metric: Metric) -> Tensor | None:
        """The metric of this step over all data-parallel ranks, where it is one number; a collective call of the last stage."""
        if id(metric) not in self._forwarded:
            return None
        value = self._twins[id(metric)].compute()
        return value.detach() if isinstance(value, Tensor) and value.numel() == 1 else None

    def _forward(self, metric: Metric, counts: bool, *args: Any, **kwargs: Any) -> Any:
        twin = self._twins[id(metric)]
        self._forwarded.add(id(metric))
        if not counts:
            return copy.deepcopy(twin).forward(*args, **kwargs)
        value = type(metric).forward(metric, *args, **kwargs)
        twin.to(metric.device).update(*args, **kwargs)
        return value

    def _compute(self, metric: Metric, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`compute()` of all pipeline ranks: the last stage's value, or its error."""
        if self._in_step or self._computing:  # a metric around this one asks for it, on this rank only
            return compute(*args, **kwargs)
        box: list[Any] = [None, None]
        if self._groups.coordinate.pipeline_parallel == self._last_stage_rank:
            self._computing = True
            try:
                box = _attempt(compute, *args, **kwargs)
            finally:
                self._computing = False
        dist.broadcast_object_list(box, group_src=self._last_stage_rank, group=self._groups.upward)
        value, error = box
        if error is not None:
            raise error
        return _to_device(value, metric.device)


def metrics_held_by(holder: object) -> Iterator[Metric]:
    """Metric objects among the attributes of `holder`, also in their dicts, lists and modules; not its own submodules."""
    todo, seen = [value for name, value in vars(holder).items() if name not in _OF_MODULES], set[int]()
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            yield from (each for each in value.modules() if isinstance(each, Metric))
        elif isinstance(value, (dict, list, tuple)) and len(value) <= _LOOKED_INTO:
            todo += value.values() if isinstance(value, dict) else value


def _attempt(compute: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    try:
        return [_to_device(compute(*args, **kwargs), torch.device("cpu")), None]
    except Exception as error:  # whatever the metric raises: the other ranks wait for an answer
        return [None, error]


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _to_device(each, device) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_to_device(each, device) for each in value)
    return value
