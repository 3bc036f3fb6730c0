"""Ranks that share samples must have the same ones, and ranks that share every layer must come to the same loss from them.

Both are asked now and then. Samples differ where every process makes its own data without a seed, or where a hook
or the step changes them by numbers from a generator of its own: a pipeline would then pair one rank's inputs with another's
labels. Losses differ where a step reads weights past the layers (a norm in the loss: each rank has a piece), or draws such
numbers: each rank would then train another model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_strategy.distributed.groups import Groups
from hybrid_strategy.distributed.random_state import has_peers, print_of_generators, seed_generators, torch_generators
from hybrid_strategy.errors import DataError, ModelError, message
from hybrid_strategy.parallel.look import Look, needs_refused
from hybrid_strategy.parallel.stage_context import StageContext
from hybrid_strategy.parallel.trees import Path, tensors_of
from hybrid_strategy.strategy.cadence import Cadence

_STOOD_IN = (
    "If the model's forward raised it: this rank runs a later stage of a pipeline, where of the earlier units only the output of "
    "the last one is here; values of others (for a skip connection) have its shape. Let the units hand them on, as a tuple."
)
_ROUNDING = 1e-5
"""Sums over ranks end in the same bits on all of them, so this is room enough for kernels that add in any order."""

_LOOKED_AT = 4096
"""Values of a tensor that are compared."""

_LARGE = 1e30
"""Masks hold infinities, which would hide everything else in a sum."""

_COMPUTED = 1e-4
"""Far above the rounding of what each rank computes for itself (by a frozen encoder, say), far below other random numbers."""


class Peers:
    """Compares samples over tensor-, context- and pipeline-parallel ranks, and the loss over tensor-parallel ones.

    Args:
        groups: this rank's place.
        device: where the loss is compared.
        cadence: in which training steps inputs and losses are compared.
    """

    def __init__(self, groups: Groups, device: torch.device, cadence: Cadence) -> None:
        self._groups, self._device, self._cadence = groups, device, cadence
        self._seen: set[str] = set()

    def restart(self) -> None:
        """The next batch is the first of a run."""
        self._seen.clear()

    def share_numbers(self) -> None:
        """Lets the ranks of a pipeline draw the same random numbers from here on, if they do not; a collective of them.

        Called at the end of a batch or epoch and before a batch: a hook that draws numbers for each parameter draws other ones on
        each of these ranks, for other parameters.
        """
        if self._groups.control is None:
            return
        generators = torch_generators(self._device)
        mine = print_of_generators(generators)
        ends = torch.tensor([mine, -mine])  # on the host: a GPU need not be waited for
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self._groups.control)
        highest, lowest = ends.tolist()
        if highest + lowest:
            seed_generators(highest, generators)

    def check_samples(self, stage: str, batch: Any) -> None:
        """Compares the first batch of a stage (`train`, `validate`, ...); a collective of all ranks.

        Raises:
            DataError: on every rank: ranks that must see the same samples do not.
        """
        if stage in self._seen or not has_peers(self._groups.layout):
            return
        self._seen.add(stage)
        apart = self._apart([_Print.of(*each) for each in tensors_of(batch)], 0.0)
        if apart is not None:
            rule = "ranks that share a model read the same data, as every process makes it, and these differ"
            numbers = f"The first batch to {stage} is another on rank {apart[0]} than on rank {apart[1]}"
            advice = "Call seed_everything before the data is made, or give its generator a seed"
            raise DataError(message("dataset", "another on every rank", rule, numbers, advice))

    def _apart(self, prints: list[_Print], tolerance: float) -> tuple[int, int] | None:
        """Two ranks that read the same samples and bring other `prints`, by more than `tolerance`; a collective of all ranks."""
        layout = self._groups.layout
        found: list[Any] = [None] * layout.world_size
        dist.all_gather_object(found, prints)
        first: dict[int, int] = {}
        for rank, each in enumerate(found):
            peer = first.setdefault(layout.coordinate(rank).data_parallel, rank)
            if len(each) != len(found[peer]) or not all(
                mine.is_like(other, tolerance) for mine, other in zip(each, found[peer], strict=True)
            ):
                return rank, peer
        return None

    @contextmanager
    def noting(self, context: StageContext, kind: str) -> Iterator[None]:
        """Around the play of a step: compares what it gives to the model; a collective of all ranks.

        Args:
            kind: `train`, or of an evaluation, of which the first step is looked at.

        Raises:
            ModelError: on every rank: one of them has found what a step may not do, or what it gives to the model differs.
        """
        looks = self._cadence.looks if kind == "train" else f"{kind} step" not in self._seen
        self._seen.add(f"{kind} step")
        if not looks or not has_peers(self._groups.layout):
            yield
            return
        with context.looking() as look:
            try:
                yield
            except Exception as error:
                if look.refused:  # what was played on with has led to it
                    raise look.refused[0] from error
                if look.stood_in and isinstance(error, (RuntimeError, ValueError, TypeError, IndexError)):
                    error.add_note(_STOOD_IN)
                raise
        self._tell(look, context)
        self._compare_inputs(look.inputs)

    def _tell(self, look: Look, context: StageContext) -> None:
        first = (type(look.refused[0]), str(look.refused[0])) if look.refused else None
        mine = (first, look.needs, look.kept, look.taken, look.asked, look.metrics_before, look.metrics)
        found: list[Any] = [mine] * self._groups.layout.world_size
        dist.all_gather_object(found, mine)
        refused, needs, kept, taken, asked, before, logged = zip(*found, strict=True)
        _refuse_metrics(sorted(set().union(*before) - set().union(*logged)))
        named = set().union(*asked)
        lost = sorted(each for each in set().union(*kept) if each in set().union(*taken) or each[1] in named)
        if lost:
            rule = "only its output gets to the next stage of a pipeline, and the loss uses what layers keep beside it"
            numbers = f"{lost[0][0]}.{lost[0][1]} of layers of other stages would be left out"
            advice = "Let the layers hand it on with their output, as a tuple, or set pipeline_parallel_size=1"
            raise ModelError(message("training_step", "its loss", rule, numbers, advice))
        for each in refused:
            if each is not None:
                raise each[0](each[1])
        if (lacking := needs_refused(needs, context.units, context.carried)) is not None:
            raise lacking

    def _compare_inputs(self, inputs: list[Tensor]) -> None:
        apart = self._apart([_Print.of((str(index),), each) for index, each in enumerate(inputs)], _COMPUTED)
        if apart is not None:
            rule = "ranks that share a model must give it the same values for the same samples"
            numbers = f"They differ between rank {apart[0]} and rank {apart[1]} in step {self._cadence.steps} of this run"
            advice = (
                "Draw with torch, numpy.random or random and leave their seeds to the strategy; a generator of your own needs "
                "a seed that all ranks share"
            )
            raise ModelError(message("training_step", "the inputs of its model", rule, numbers, advice))

    def apart(self, loss: Tensor) -> Tensor:
        """1 where the ranks of this group differ in this step, else 0; a collective of ranks that hold the last stage."""
        no = torch.zeros((), dtype=torch.float64, device=self._device)
        if self._groups.tensor is None or not self._cadence.looks:
            return no
        ends = torch.nan_to_num(torch.stack([loss, -loss])).to(self._device)
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self._groups.tensor)
        return (ends.sum() > _ROUNDING * ends.abs().max()).to(no)

    def check(self, apart: float) -> None:
        """Called on all ranks with the sum of what `apart` gave.

        Raises:
            ModelError: the losses differ.
        """
        if apart:
            rule = "ranks that share every layer must come to the same loss for the same samples"
            numbers = (
                "It differs between them: the step reads weights past their layers (each rank has a piece), or draws by itself"
            )
            advice = (
                "Use weight_decay of the optimizer instead of a norm in the loss, draw with torch, or set tensor_parallel_size=1"
            )
            raise ModelError(message("training_step", "its loss", rule, numbers, advice))


def _refuse_metrics(lost: list[str]) -> None:
    """Of metric objects that layers of earlier stages log: what they count stays on ranks that publish nothing."""
    if lost:
        rule = "a layer of an earlier pipeline stage logs a metric object, and what that counts stays on the rank of the layer"
        advice = "Log its value there (self.log(name, value)), log the object in the step, or set pipeline_parallel_size=1"
        raise ModelError(message("self.log", lost[0], rule, "", advice))


@dataclass(frozen=True)
class _Print:
    """Tells a tensor from others, by some of its values.

    Attributes:
        about: path, shape and type.
        total: a weighted sum of the values, of which that of the sizes is `size`.
    """

    about: tuple[Any, ...]
    total: float = 0.0
    size: float = 0.0

    @staticmethod
    def of(path: Path, tensor: Tensor) -> _Print:
        about = (path, tuple(tensor.shape), str(tensor.dtype))
        if tensor.layout is not torch.strided or tensor.is_complex() or tensor.is_meta:
            return _Print(about)
        some = torch.nan_to_num(tensor.detach().reshape(-1)[:_LOOKED_AT].double()).clamp(-_LARGE, _LARGE)
        weighted = some * torch.arange(1, len(some) + 1, device=some.device)
        exact = not tensor.is_floating_point()
        return _Print(about, weighted.sum().item(), 0.0 if exact else weighted.abs().sum().item())

    def is_like(self, other: _Print, tolerance: float) -> bool:
        return self.about == other.about and abs(self.total - other.total) <= tolerance * max(self.size, other.size)
