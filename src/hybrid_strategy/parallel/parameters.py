"""The parameters of a module as slots: a name, the places it stands in, and the piece of it this rank holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from hybrid_strategy.spec.shard import ShardSpec


@dataclass
class Slot:
    """One parameter of this rank.

    Attributes:
        name: its name in the un-split module.
        places: every (module, attribute) it stands in; more than one where it is shared.
        parameter: what the module computes with: this rank's tensor-parallel piece.
        spec: where `parameter` lies in the whole. Its `owner` leaves data parallelism out.
        shard_spec: what the optimizer holds: `spec` narrowed by the sharding, with the final `owner`.
        holders: pipeline ranks that hold it, where these are several: it stands outside of the stages, or it is tied across
            stages. Its gradient is the sum over them. Empty where one pipeline rank holds it.
    """

    name: str
    places: list[tuple[nn.Module, str]]
    parameter: nn.Parameter
    spec: ShardSpec
    holders: tuple[int, ...] = ()
    shard_spec: ShardSpec = field(init=False)

    def __post_init__(self) -> None:
        self.shard_spec = self.spec

    def put(self, parameter: nn.Parameter) -> None:
        """Makes the module compute with `parameter` in every place."""
        for module, attribute in self.places:
            module._parameters[attribute] = parameter

    def narrow_spec(self, start: int, size: int, owner: bool) -> None:
        """Records that the optimizer holds rows `start .. start + size` of `parameter` (dimension 0)."""
        offsets = (self.spec.offsets[0] + start, *self.spec.offsets[1:])
        self.shard_spec = replace(self.spec, offsets=offsets, sizes=(size, *self.spec.sizes[1:]), owner=owner)


def collect_slots(
    module: nn.Module,
    describe: Callable[[str, Tensor], ShardSpec],
    first_names: Mapping[str, str],
    holders: Mapping[str, tuple[int, ...]],
) -> list[Slot]:
    """Slots of all parameters of `module`, in their order, each parameter once however often it is shared.

    Args:
        module: the LightningModule (its names are the checkpoint's names).
        describe: the spec of a parameter by the name it has on this rank.
        first_names: the first name in the un-split model of a parameter that has several.
        holders: pipeline ranks by first name, for parameters that several hold.
    """
    slots: dict[int, Slot] = {}
    for prefix, owner in module.named_modules(remove_duplicate=True):
        for attribute, parameter in owner._parameters.items():
            if parameter is None:
                continue
            name = f"{prefix}.{attribute}" if prefix else attribute
            if id(parameter) in slots:
                slots[id(parameter)].places.append((owner, attribute))
            else:
                first = first_names.get(name, name)
                spec = replace(describe(name, parameter), name=first)
                slots[id(parameter)] = Slot(first, [(owner, attribute)], parameter, spec, holders.get(first, ()))
    return list(slots.values())


def copy_attributes(source: Tensor, target: Tensor) -> None:
    """What the user has set on one tensor, on another; what a class of tensors keeps of its own there stays."""
    vars(target).update({name: value for name, value in vars(source).items() if name not in vars(target)})


def in_place_of(parameter: nn.Parameter, values: Tensor, *, in_graph: bool = True) -> nn.Parameter:
    """A parameter of other values with the attributes that the user has given to `parameter`.

    Args:
        in_graph: autograd makes gradients for the new one, so that it gets the user's hooks on them, too.
    """
    hooks = list((parameter._backward_hooks or {}).values()) if in_graph else []
    new = nn.Parameter(values, requires_grad=parameter.requires_grad or bool(hooks))
    copy_attributes(parameter, new)
    for hook in hooks:
        new.register_hook(hook)
    new.requires_grad_(parameter.requires_grad)
    return new


def fill(target: Tensor, whole: Tensor, spec: ShardSpec) -> None:
    """Copies a rank's piece of `whole` into `target`."""
    with torch.no_grad():
        target.copy_(whole[spec.slices])
