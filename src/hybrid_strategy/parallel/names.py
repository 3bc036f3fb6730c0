"""Names and holders of parameters: what the un-split module says of them, and what this rank's piece is called and counts for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from hybrid_strategy.distributed.groups import Groups
from hybrid_strategy.parallel.tensor.apply import TensorShard
from hybrid_strategy.spec.shard import ShardSpec


@dataclass(frozen=True)
class StageCut:
    """Which units stand on which pipeline rank: units `bounds[s] .. bounds[s + 1] - 1` are stage `s`, on rank `owners[s]`."""

    units: list[str]
    bounds: tuple[int, ...]
    owners: Sequence[int]

    def rank_of(self, unit: int) -> int:
        """The pipeline rank of a unit."""
        return self.owners[sum(unit >= bound for bound in self.bounds[1:])]


@dataclass(frozen=True)
class Names:
    """What the un-split module says of its parameters, noted before it is cut.

    Attributes:
        first: the first name of every name of a shared parameter.
        outside: first names of parameters outside of the submodule that is cut.
        holders: pipeline ranks by first name, where several hold it: tied across stages, or outside of them.
    """

    first: Mapping[str, str]
    outside: set[str]
    holders: Mapping[str, tuple[int, ...]]

    @staticmethod
    def of(module: nn.Module, root: nn.Module, cut: StageCut) -> Names:
        firsts = {id(each): name for name, each in module.named_parameters()}
        names = {name: firsts[id(each)] for name, each in module.named_parameters(remove_duplicate=False)}
        inside = {id(each) for each in root.parameters()}
        outside = {name for name, each in module.named_parameters() if id(each) not in inside}
        return Names(names, outside, _holders(module, root, cut, firsts))

    def is_first_holder(self, name: str, pipeline_rank: int) -> bool:
        """Is this the pipeline rank that counts and writes the parameter?"""
        return pipeline_rank == min(self.holders.get(self.first.get(name, name), (pipeline_rank,)))


def _holders(module: nn.Module, root: nn.Module, cut: StageCut, firsts: Mapping[int, str]) -> dict[str, tuple[int, ...]]:
    """Pipeline ranks of the parameters that stand on several."""
    everywhere = set(cut.owners)
    ranks: dict[str, set[int]] = {}
    in_units: set[int] = set()
    for index, unit in enumerate(cut.units):
        inside = root.get_submodule(unit)
        in_units.update(id(each) for each in inside.modules())
        for parameter in inside.parameters():
            ranks.setdefault(firsts[id(parameter)], set()).add(cut.rank_of(index))
    outside = [each for part in module.modules() if id(part) not in in_units for each in part._parameters.values()]
    ranks.update({firsts[id(each)]: everywhere for each in outside if each is not None})  # also where a unit has it, too
    return {name: tuple(sorted(each)) for name, each in ranks.items() if len(each) > 1}


class Describe:
    """The spec of each parameter: its tensor-parallel piece, and whether this rank is the one that counts it."""

    def __init__(self, groups: Groups, shards: Mapping[str, TensorShard], names: Names) -> None:
        self._groups, self._shards, self._names = groups, shards, names

    def __call__(self, name: str, parameter: Tensor) -> ShardSpec:
        coordinate = self._groups.coordinate
        first = self._names.is_first_holder(name, coordinate.pipeline_parallel)
        shard = self._shards.get(name)
        if shard is None or shard.dim is None:
            spec = ShardSpec.whole(name, tuple(parameter.shape), first and coordinate.tensor_parallel == 0)
            return replace(spec, partial_gradient=shard is not None and shard.partial_gradient)
        offsets = [0] * len(shard.full_shape)
        offsets[shard.dim] = shard.start
        return ShardSpec(name, shard.full_shape, tuple(offsets), shard.local_shape, first)
