"""Activations and logits cut along the sequence that look whole.

What a unit returns goes on through the model and the user's step in this shell: code between the units, the shift of logits and
labels, the loss all see whole sequences. What works position by position stays on the part (`_sequence_operations.py`), and so
does `F.cross_entropy`; anything else gathers the whole, differentiably. All context-parallel ranks run the same code on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from hybrid_strategy.errors import LayoutError, message
from hybrid_strategy.parallel.context import _sequence_operations
from hybrid_strategy.parallel.context.collectives import gather_sequence, scatter_sequence
from hybrid_strategy.parallel.context.span import SequenceSpan
from hybrid_strategy.parallel.shell import Shell, whole_of


class SplitSequence(Shell):
    """A shell of the shape of the whole around this rank's part of the sequence.

    Attributes:
        local: this rank's part; it may itself be a shell (logits split by vocabulary).
        span: which positions lie where.
        cut_dim: the dimension that is cut, counted from the front.
    """

    subject = "a split sequence"
    rule = "activations cut along the sequence have no memory of their own"
    span: SequenceSpan
    cut_dim: int

    @staticmethod
    def wrap(local: Tensor, span: SequenceSpan, dim: int = 1) -> Tensor:
        """The whole of which `local` is this rank's part along `dim`."""
        shell: SplitSequence = cast(Any, _Shell).apply(local, span, dim)
        shell.local, shell.span, shell.cut_dim, shell.whole = local, span, dim, None
        return shell

    def like(self, local: Tensor, dim: int | None = None) -> Tensor:
        """The same span around another part."""
        return SplitSequence.wrap(local, self.span, self.cut_dim if dim is None else dim)

    def full_tensor(self) -> Tensor:
        if self.whole is not None:
            return self.whole
        return gather_sequence(self._plain(whole_of), self._known_span, self.cut_dim)

    def gathered_values(self) -> Tensor:
        part = self._plain(lambda shell: shell.gathered_values()).detach()
        return gather_sequence(part, self._known_span, self.cut_dim)

    def around_detached(self) -> Tensor:
        return self.like(self.local.detach())

    def on_part(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _sequence_operations.run(func, self, args, kwargs)

    def on_second(self, func: Callable[..., Any], first: Any) -> Any:
        return _sequence_operations.run_reversed(func, first, self)

    def _plain(self, opened: Callable[[Shell], Tensor]) -> Tensor:
        return opened(self.local) if isinstance(self.local, Shell) else self.local

    @property
    def _known_span(self) -> SequenceSpan:
        if not self.span.scattered:
            return self.span
        rule = "an operation on the hidden state between the model's units needs whole sequences, which no rank can put together"
        numbers = f"Its shape is {tuple(self.shape)}"
        advice = "Make the operation a unit of ParallelPlan.units, or set sequence_parallel=False or context_parallel_size=1"
        raise LayoutError(message("sequence_parallel", True, rule, numbers, advice))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """No collective: one rank alone may print it."""
        held = f"{len(self.span.own)} of {self.span.length} positions on this rank"
        return f"SplitSequence(shape={tuple(self.shape)}, dtype={self.dtype}, {held})"


class _Shell(torch.autograd.Function):
    """The edge by which a gradient that reached the shell reaches `local`."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, span: SequenceSpan, dim: int) -> Tensor:
        ctx.span, ctx.dim = span, dim
        return SplitSequence.around(local, [*local.shape[:dim], span.whole_size, *local.shape[dim + 1 :]])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return scatter_sequence(grads[0], ctx.span, ctx.dim), None, None


class Part(NamedTuple):
    """A shell on its way to another pipeline stage: the part, and the length of the whole sequence."""

    local: Tensor
    length: int
    scattered: bool
