"""What a model family offers, so that one new file is one new family."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hybrid_strategy.spec.exchange import Exchange
from hybrid_strategy.spec.model_shape import ModelShape
from hybrid_strategy.spec.parallel_plan import ParallelPlan


class FamilyModel(Protocol):
    """A model of a family: besides `forward` it can tell how to cut it and how to fill one of its parameters.

    Attributes:
        shape, options: what `ModelFamily.build` makes it of, as plain values.
    """

    shape: ModelShape
    options: dict[str, Any]

    def parallel_plan(self) -> ParallelPlan:
        """Units, tensor-parallel rules, tied parameters, heads."""

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fills the whole parameter `name` in place; `tensor` is on the CPU and of the parameter's full shape."""


class ModelFamily(Protocol):
    """The `PART` of a family's file.

    Attributes:
        name: as in `ModelShape.family`.
        tiny: a shape for tests: a few heads, odd sizes where the family bears them.
        exchange: its counterpart in Hugging Face's library; None: it has none.
    """

    name: str
    tiny: ModelShape
    exchange: Exchange | None

    def build(self, shape: ModelShape, **options: Any) -> nn.Module:
        """The model on torch's current default device; its parameters' values are not those of a run yet."""

    def matches(self, module: nn.Module) -> bool:
        """Is `module` a model of this family?"""
