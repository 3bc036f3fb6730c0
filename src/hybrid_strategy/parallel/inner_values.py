"""What a model's forward collects from within its layers (attention weights, router logits): incomplete in a pipeline.

Such models put hooks on parts of their layers, or on all parts of a kind, and return what these have seen. Layers of other
stages do not run here, so nothing of theirs is seen, and what is returned is that of the last stage's layers alone, as if it were
all. It is told by the tensors themselves: what a container of units returns must come out of units, not out of parts of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from hybrid_strategy.errors import ModelError, message
from hybrid_strategy.parallel.trees import iterate_tensors


class InnerValues:
    """Watches the outputs of a model's parts while a step is looked at.

    Args:
        root: the model, cut.
        units: names of its units, those of other ranks as well.
        refuse: takes the error.
    """

    def __init__(self, root: nn.Module, units: Sequence[str], refuse: Callable[[ModelError], None]) -> None:
        self._root, self._units, self._refuse = weakref.ref(root), units, refuse  # what belongs to a model must not keep it
        self._made: dict[int, tuple[weakref.ref[Tensor], str]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around the passes of a step."""
        root = self._root()
        assert root is not None  # its step runs
        units = {id(root.get_submodule(name)) for name in self._units}
        with ExitStack() as hooks:
            hooks.callback(self._made.clear)
            for name, part in root.named_modules():
                unit = next((each for each in self._units if name == each or name.startswith(f"{each}.")), None)
                hook = self._of_container if unit is None else self._of_unit if id(part) in units else self._of_part(name)
                if unit is None or unit != self._units[-1] or id(part) in units:  # the last unit is always on the last stage
                    hooks.callback(part.register_forward_hook(hook).remove)
            yield

    def _of_part(self, name: str) -> Callable[..., None]:
        def note(_part: nn.Module, _inputs: Any, output: Any) -> None:
            for each in iterate_tensors(output):
                known = self._made.get(id(each))
                if known is None or known[0]() is not each:
                    self._made[id(each)] = weakref.ref(each), name

        return note

    def _of_unit(self, _unit: nn.Module, _inputs: Any, output: Any) -> None:
        for each in iterate_tensors(output):
            self._made[id(each)] = weakref.ref(each), ""

    def _of_container(self, container: nn.Module, _inputs: Any, output: Any) -> None:
        for each in iterate_tensors(output):
            made, part = self._made.get(id(each), (None, ""))
            if made is not None and part and made() is each:
                rule = "it returns what a part of a unit has made, and of units of other stages that is not here"
                advice = (
                    "Let the units hand it on with their output, as a tuple, leave such as output_attentions and "
                    "output_router_logits out, or set pipeline_parallel_size=1"
                )
                self._refuse(ModelError(message("module", type(container).__name__, rule, f"{part} has made it", advice)))
                return
