"""Random numbers of a step that several ranks run on the same samples.

Ranks that read the same samples share a stream of random numbers: what a hook or the step draws for them (noise, a mixture of
samples, a mask) must be the same for the stage that gets the inputs and the one that knows the labels. Yet inside of the model
they draw unequally many, each for its own layers. So

- a step draws one number from the shared stream, plays under states of its own, and puts the stream back where it was;
- each micro-batch starts from a state that follows from that number and its index, on every stage that plays it;
- each unit of the model draws one number on entry, whether it is here or on another rank, and the states after it follow from
  that number alone. Under sequence parallelism tensor-parallel ranks go apart within a unit, for they hold other tokens.

So the code of a step and of a model's `forward` between its units draws the same on all ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import numpy
import torch
from torch import nn

from hybrid_strategy.distributed.random_state import keyed_seed, seed_generators, torch_generators
from hybrid_strategy.parallel.tensor.random import DROPOUTS

_RANGE = 2**62


class StepRandom:
    """The random states of one rank while it plays a step.

    Args:
        device: the rank's device; its generator is steered beside the CPU's.
        shared: do other ranks run the same steps on the same samples? Otherwise nothing is done.
        place: ranks that hold other tokens of the same samples have other places.
    """

    def __init__(self, device: torch.device, shared: bool, place: int = 0) -> None:
        self.shared, self._place = shared, place
        self._generators = torch_generators(device)
        self._number: int | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the plays of one batch."""
        if not self.shared:
            yield
            return
        self._number = _draw()
        torch_states = [each.get_state() for each in self._generators]
        python, numpy_state = random.getstate(), numpy.random.get_state(legacy=False)
        try:
            yield
        finally:
            self._number = None
            for generator, state in zip(self._generators, torch_states, strict=True):
                generator.set_state(state)
            random.setstate(python)
            numpy.random.set_state(numpy_state)

    def micro_batch(self, index: int) -> None:
        """The step begins on this micro-batch, as far as one stage goes."""
        if self._number is not None:
            seed_generators(keyed_seed(self._number, f"micro-batch {index}"), self._generators)

    @contextmanager
    def unit(self) -> Iterator[None]:
        """Around a unit of the model; also where it is computed again."""
        if self._number is None:
            yield
            return
        number = _draw()
        if self._place:
            self._seed(number ^ self._place)
        yield
        self._seed(number + _RANGE)

    def skip_unit(self) -> None:
        """Instead of a unit that another rank computes."""
        if self._number is not None:
            self._seed(_draw() + _RANGE)

    def _seed(self, seed: int) -> None:
        for generator in self._generators:
            generator.manual_seed(seed)

    def __deepcopy__(self, memo: dict[int, Any]) -> StepRandom:
        """A copied model (a moving average, say) draws from the same generators; they cannot be copied."""
        return self


def _draw() -> int:
    return int(torch.randint(_RANGE, (), device="cpu"))


class _OwnNumbers:
    """Mixed into the class of a dropout that stands outside of the units, on parts of sequences."""

    _step_random: StepRandom

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._step_random.unit():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]


@cache
def _apart(kind: type[Any]) -> Any:
    return type(kind.__name__, (_OwnNumbers, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


def put_dropouts_apart(root: nn.Module, outside: Callable[[str], bool], numbers: StepRandom) -> None:
    """Lets each rank draw its own masks in dropouts that stand `outside` of the units; for sequence parallelism."""
    for name, module in root.named_modules():
        if isinstance(module, DROPOUTS) and outside(name):
            module.__class__ = _apart(cast("Any", type(module)))
            object.__setattr__(module, "_step_random", numbers)
