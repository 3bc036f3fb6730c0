"""What a unit is called with: which tensors run along the sequence, and this rank's part of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hybrid_strategy.errors import ModelError, message
from hybrid_strategy.parallel.context.region import ContextRegion
from hybrid_strategy.parallel.context.sequence import SplitSequence
from hybrid_strategy.parallel.context.span import SequenceSpan
from hybrid_strategy.parallel.shell import Shell, whole_of
from hybrid_strategy.parallel.trees import map_tensors, tensors_of

Change = Callable[[str, Tensor], Any]


def _changed(change: Change, name: str, value: Any) -> Any:
    return map_tensors(lambda _, each: change(name, each), value)


@dataclass(frozen=True)
class Arguments:
    """What is known of the arguments of a unit.

    Attributes:
        names: of the arguments given by position.
        declared: argument -> its sequence dimension; `None`: it passes whole.
        learned: the same by (argument, number of dimensions), as seen in calls where rows and positions were not equally many.
    """

    names: tuple[str, ...]
    declared: Mapping[str, int | None]
    learned: dict[tuple[str, int], int | None] = field(default_factory=dict)


@dataclass(frozen=True)
class UnitCall:
    """The call of a unit.

    Attributes:
        region: the ranks.
        span: how its sequences lie over them.
        rows: samples of the call.
        arguments: what is known of its arguments.
        first: the tensor whose dimensions are batch and sequence.
    """

    region: ContextRegion
    span: SequenceSpan
    rows: int
    arguments: Arguments
    first: Tensor

    @staticmethod
    def of(region: ContextRegion, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> UnitCall | None:
        """Reads a call; `None` where no tensor runs along a sequence.

        Raises:
            LayoutError: the sequence cannot be cut evenly.
        """
        first = next((each for _, each in tensors_of((args, kwargs)) if each.dim() >= 2), None)
        if first is None:
            return None
        length = first.shape[1]
        if isinstance(first, SplitSequence) and first.whole is None and first.cut_dim == 1:
            length = first.span.length
        region.check(length)
        return UnitCall(region, SequenceSpan.of(region, length), first.shape[0], arguments, first)

    def parts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with this rank's part of what runs along the sequence."""
        return self.mapped(args, kwargs, self._part)

    def mapped(self, args: tuple[Any, ...], kwargs: dict[str, Any], change: Change) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with `change(name, tensor)` in place of every tensor."""
        known = self.arguments.names
        names = [known[index] if index < len(known) else "" for index in range(len(args))]
        given = tuple(_changed(change, name, value) for name, value in zip(names, args, strict=True))
        return given, {name: _changed(change, name, value) for name, value in kwargs.items()}

    def sequence_dim(self, name: str, tensor: Tensor) -> int | None:
        """The dimension of a whole tensor that runs along the sequence, or `None`.

        Raises:
            ModelError: it could be one or another.
        """
        if name in self.arguments.declared:
            return self.arguments.declared[name]
        if tensor is self.first:
            return 1
        key, learned = (name, tensor.dim()), self.arguments.learned
        if self.rows == self.span.length and key in learned:
            return learned[key]
        dim = self._dim_by_shape(name, tensor)
        if self.rows != self.span.length:
            learned[key] = dim
        return dim

    def _dim_by_shape(self, name: str, tensor: Tensor) -> int | None:
        found, length, shape = set(), self.span.length, tensor.shape
        if tensor.dim() == 1 and shape[0] == length:
            found.add(0)
        if tensor.dim() >= 2 and shape[1] == length and shape[0] in (1, self.rows):
            found.add(1)
        if tensor.dim() >= 2 and shape[-2] == length:
            found.add(tensor.dim() - 2)
        if len(found) > 1:
            rule = "it cannot be told along which dimension it follows the sequence"
            numbers = f"The sequences have {length} positions and there are {self.rows} of them"
            advice = f"Say which: ParallelPlan(sequence_dims={{{name!r}: {max(found)}}}), or None where it passes whole"
            raise ModelError(message(f"the argument {name!r}", tuple(shape), rule, numbers, advice))
        return found.pop() if found else None

    def _part(self, name: str, tensor: Tensor) -> Tensor:
        if isinstance(tensor, SplitSequence) and tensor.whole is None and tensor.cut_dim == 1 and tensor.span.is_fresh():
            return tensor.local
        whole = whole_of(tensor) if isinstance(tensor, Shell) else tensor
        dim = 1 if tensor is self.first else self.sequence_dim(name, whole)
        return whole if dim is None else self.cut(whole, dim)

    def cut(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's two chunks of a whole tensor."""
        chunks = whole.chunk(2 * self.region.size, dim)
        return torch.cat((chunks[self.region.rank], chunks[-1 - self.region.rank]), dim)

    def joined(self, output: Any) -> Any:
        """A unit's output with every part of a sequence in a shell."""
        part = self.span.length // self.region.size

        def wrap(_: Any, tensor: Tensor) -> Tensor:
            if tensor.dim() < 2 or tensor.shape[0] != self.rows:
                return tensor
            if tensor.shape[1] == part:
                return SplitSequence.wrap(tensor, self.span)
            if self.region.tensor_size > 1 and tensor.shape[1] * self.region.tensor_size == part:
                return SplitSequence.wrap(tensor, SequenceSpan.of(self.region, self.span.length, scattered=True))
            return tensor

        return map_tensors(wrap, output)
