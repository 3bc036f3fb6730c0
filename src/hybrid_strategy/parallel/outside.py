"""Calls of the model outside of steps, in hooks: where layers are spread over ranks, all ranks must make them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class OutsideCalls:
    """Tells a call of the model in a hook from those within steps.

    Attributes:
        meet: called before such a call, where it is a collective of all ranks; raises where some of them do something else.
    """

    def __init__(self) -> None:
        self.meet: Callable[[], None] | None = None
        self._inside = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the passes of a step: what is called in it is not outside."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around a call of the model or of a layer."""
        if self._inside or self.meet is None:
            yield
            return
        self.meet()
        with self.step():
            yield

    def __deepcopy__(self, memo: dict[int, Any]) -> OutsideCalls:
        """A copied model is called in the same steps."""
        return self
