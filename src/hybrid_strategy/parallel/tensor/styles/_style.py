"""What a tensor-parallel style is: which parameters it slices, and what it makes of the layer's forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, TypeVar, cast

from torch import nn

from hybrid_strategy.errors import ModelError, message
from hybrid_strategy.parallel.tensor.region import Region


class Style:
    """Base of all styles; by itself the style of modules that no rule names: nothing is sliced, forward stays as it is.

    Attributes:
        name: the word plans use.
        layer: the class the style is for; None: any module.
        sliced: parameter of the layer -> the dimension that is sliced.
    """

    name: ClassVar[str] = "replicated"
    layer: ClassVar[type[nn.Module] | None] = None
    sliced: ClassVar[Mapping[str, int]] = {}

    def check(self, module: nn.Module, name: str) -> None:
        """Raises ModelError where the style cannot be applied to `module`, called `name` in the model.

        Subclasses of a layer are refused because their forward may do something else with the weights.
        """
        if self.layer is None or type(module) is self.layer:
            return
        wanted, kind = f"torch.nn.{self.layer.__name__}", type(module)
        numbers = f"{name} is a {kind.__module__}.{kind.__qualname__}"
        advice = f"Use {wanted} there, leave {name!r} out of ParallelPlan.tensor, or set tensor_parallel_size to 1"
        raise ModelError(message(f"tensor[{name!r}]", self.name, f"it is for {wanted} only", numbers, advice))

    def partial_gradient(self, inside: bool, sequence_parallel: bool) -> bool:
        """Is a backward's gradient of a parameter that is not sliced only this rank's part of it?

        It is for whatever stands inside the region (each rank's loss reaches it through its own slices only) and, under
        sequence parallelism, outside too (each rank sees its part of the sequence only).
        """
        return inside or sequence_parallel

    def install(self, module: nn.Module, region: Region, inside: bool) -> None:
        """Changes `module`'s forward; its parameters are slices by then. `inside`: an ancestor has `replicate_input`."""


class ParallelLayer(nn.Module):
    """What the parallel subclasses of layers share."""

    region: Region
    inside: bool


Layer = TypeVar("Layer", bound=ParallelLayer)


def become(module: nn.Module, kind: type[Layer], region: Region, inside: bool) -> Layer:
    """Turns a layer into its parallel subclass in place: same object, same name, same parameters and hooks."""
    module.__class__ = kind
    layer = cast(Layer, module)
    layer.region, layer.inside = region, inside
    return layer
