"""Slices a model for one tensor-parallel rank, after its `ParallelPlan`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hybrid_strategy.errors import ConfigError, ModelError, message
from hybrid_strategy.parallel.tensor.check import assign_styles, check_tensor_parallel, is_inside
from hybrid_strategy.parallel.tensor.region import Region
from hybrid_strategy.parallel.tensor.split_features import FeatureWatch, watch_features
from hybrid_strategy.parallel.tensor.styles._style import Style
from hybrid_strategy.parallel.tensor.widths import watch_widths
from hybrid_strategy.registry import find
from hybrid_strategy.spec.parallel_plan import ParallelPlan


@dataclass(frozen=True)
class TensorShard:
    """What a tensor-parallel rank holds of one parameter.

    Attributes:
        dim: the sliced dimension; None: the whole parameter, a replica.
        start: where the slice begins along `dim` (0 for a replica).
        size: how long it is along `dim` (0 for a replica).
        full_shape: shape of the whole parameter.
        partial_gradient: a backward leaves this rank's part of the gradient only; the sum over the ranks is the gradient.
    """

    dim: int | None
    start: int
    size: int
    full_shape: tuple[int, ...]
    partial_gradient: bool = False

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the rank's slice."""
        return tuple(self.size if dim == self.dim else length for dim, length in enumerate(self.full_shape))

    def of(self, full: Tensor) -> Tensor:
        """This rank's slice of the whole parameter, as a view."""
        return full if self.dim is None else full.narrow(self.dim, self.start, self.size)


def apply_tensor_parallel(
    model: nn.Module,
    plan: ParallelPlan,
    *,
    group: ProcessGroup,
    rank: int,
    size: int,
    sequence_parallel: bool = False,
    absent: Collection[str] = (),
    refused: Callable[[], list[ConfigError] | None] | None = None,
) -> dict[str, TensorShard]:
    """Slices `model` in place for rank `rank` of the `size` ranks of `group`; returns the shard of every parameter by name.

    Parameters keep their identity, so tied ones stay tied (both names are in the result); on the meta device they only change
    shape. A layer becomes its parallel subclass in place, so no name changes.

    Args:
        absent: names of modules that a pipeline cut removed from this rank; what lies at or below them is left alone.
        refused: where refusals are noted while a step is looked at: then what mixes features that are split is refused.
            Answers `None` in other steps; `None` itself: no step is looked at.

    Raises:
        LayoutError: `size` does not divide the plan's heads, or a dimension is too short for it.
        ModelError: the plan does not fit the model.
    """
    check_tensor_parallel(plan, size)
    assigned = assign_styles(model, plan, size, absent)
    region = Region(group, rank, size, sequence_parallel)
    styles = {name: find("parallel.tensor.styles", style, "tensor") for name, style in assigned.items()}
    shards = _slice_parameters(model, styles, region)
    for name, style in styles.items():
        style.install(model.get_submodule(name), region, is_inside(name.rpartition(".")[0], assigned))
    counts = frozenset(plan.heads.values()) - {heads // size for heads in plan.heads.values()}
    watch = FeatureWatch(refused or (lambda: None), counts)
    watch_widths(model, assigned, region, watch.note)
    if refused is not None:
        widths = {name: shards[id(model.get_submodule(name).weight)].full_shape[0] for name in _named(assigned, "colwise")}
        watch_features(model, assigned, widths, watch)
    return {name: shards[id(each)] for name, each in model.named_parameters(remove_duplicate=False)}


def _named(styles: Mapping[str, str], style: str) -> list[str]:
    return [name for name, each in styles.items() if each == style]


def _slice_parameters(model: nn.Module, styles: Mapping[str, Style], region: Region) -> dict[int, TensorShard]:
    """Slices what the styles slice, each parameter once; what became of each, by the parameter's id."""
    shards: dict[int, TensorShard] = {}
    assigned = {name: style.name for name, style in styles.items()}
    for name, module in model.named_modules():
        style = styles.get(name, Style())
        partial = style.partial_gradient(is_inside(name, assigned), region.sequence_parallel)
        for key, parameter in module.named_parameters(recurse=False):
            dim = style.sliced.get(key)
            found = shards.setdefault(id(parameter), _shard(parameter, dim, region, partial and dim is None))
            if found.dim != dim:
                numbers = f"another module slices the same parameter along {found.dim}"
                rule = "tied parameters must be sliced alike"
                raise ModelError(
                    message(f"{name}.{key}", f"sliced along {dim}", rule, numbers, "Give both modules fitting styles")
                )
    for parameter in model.parameters():
        shard = shards[id(parameter)]
        if shard.dim is not None:
            parameter.grad = None
            parameter.data = shard.of(parameter.data).clone(memory_format=torch.contiguous_format)
    return shards


def _shard(parameter: Tensor, dim: int | None, region: Region, partial: bool) -> TensorShard:
    start, size = (0, 0) if dim is None else region.chunk(parameter.shape[dim])
    return TensorShard(dim, start, size, tuple(parameter.shape), partial)
