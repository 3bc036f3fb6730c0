"""Optimizer states by the un-split model's parameter names: out of an optimizer, and into one of another layout."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hybrid_strategy.checkpoint.encoding import plain, same
from hybrid_strategy.checkpoint.loading import SavedTensor
from hybrid_strategy.checkpoint.pieces import OPTIMIZER, Piece, key_path, model_key, optimizer_key, section
from hybrid_strategy.errors import CheckpointError, ConfigError, message
from hybrid_strategy.parallel.parameters import Slot

Named = dict[nn.Parameter, Slot]
_SETTINGS = "settings"
_NOT_SETTINGS = ("params", "param_names")
_KIND = "optimizer_class"
_AGAIN = "@"
_INNER = "_schedulers"
"""Where `SequentialLR` and `ChainedScheduler` keep the schedules they are made of, and their states."""


class _Member(NamedTuple):
    """A parameter in an optimizer.

    Attributes:
        mark: for a parameter that several optimizers hold: which of them this is; nothing for the first.
    """

    optimizer: Optimizer
    group: dict[str, Any]
    parameter: nn.Parameter
    slot: Slot
    mark: str

    @property
    def settings_key(self) -> str:
        return f"{_SETTINGS}.{self.slot.name}{self.mark}"

    @property
    def kind_key(self) -> str:
        return f"{_KIND}.{self.slot.name}{self.mark}"

    @property
    def kind(self) -> str:
        return type(self.optimizer).__qualname__

    def fits(self, values: Mapping[str, Any]) -> bool:
        """The saved states, if any, are those of an optimizer of this class."""
        return bool(values.get(self.kind_key, self.kind) == self.kind)


def state_pieces(optimizers: Sequence[Optimizer], named: Named) -> tuple[dict[str, Piece], dict[str, Any]]:
    """The blocks and the replicated values of all optimizers on this rank.

    Raises:
        CheckpointError: a state whose shape is neither the parameter's nor a single number, of a parameter that is split.
    """
    pieces: dict[str, Piece] = {}
    values: dict[str, Any] = {}
    for each in _members(optimizers, named):
        slot = each.slot
        for key, value in each.optimizer.state.get(each.parameter, {}).items():
            _refuse_state_name(key, each)
            full = optimizer_key(slot.name, f"{key}{each.mark}")
            if not isinstance(value, Tensor) or (value.numel() == 1 and value.dim() == 0):
                values[full] = value
            elif tuple(value.shape) == slot.shard_spec.sizes:
                pieces[full] = Piece(slot.shard_spec, value)
            elif slot.shard_spec.sizes == slot.shard_spec.full_shape:
                pieces[full] = Piece.whole(full, value, slot.shard_spec.owner)
            else:
                raise CheckpointError(
                    message(
                        f"optimizer state {key} of {slot.name}",
                        tuple(value.shape),
                        "a state of a split parameter must have the shape of its piece",
                        f"the piece is {slot.shard_spec.sizes} of {slot.shard_spec.full_shape}",
                        "Use an optimizer that works element by element, or a layout that does not split this parameter",
                    )
                )
    return pieces, values | _settings(optimizers, named)


def check_names(names: Collection[str], optimizers: Sequence[Optimizer]) -> None:
    """Refuses a parameter whose name is the one that checkpoints give to another's states in a second optimizer.

    Args:
        names: of all parameters of the un-split model.

    Raises:
        ConfigError: there is one, the same on every rank.
    """
    for name in sorted(names) if len(optimizers) > 1 else ():
        first, sign, number = name.rpartition(_AGAIN)
        if sign and number.isdecimal() and first in names:
            rule = f"checkpoints keep under it what a further optimizer holds of {first}"
            raise ConfigError(message("parameter name", name, rule, f"There are {len(optimizers)} optimizers", "Rename it"))


def _refuse_state_name(key: Any, member: _Member) -> None:
    """Raises:
    CheckpointError: a state could not be told from another, or from its parameter's name, when it is loaded.
    """
    if not isinstance(key, str) or _AGAIN in key or "." in key:
        rule = f"checkpoints keep it by its name, which must be text without '.' and '{_AGAIN}'"
        raise CheckpointError(message(f"optimizer state of {member.slot.name}", key, rule, f"The optimizer is {member.kind}", ""))


def _settings(optimizers: Sequence[Optimizer], named: Named) -> dict[str, Any]:
    """The hyper-parameters of every parameter: those of its group. A group's number means other groups on other ranks."""
    values: dict[str, Any] = {}
    for each in _members(optimizers, named):
        values[each.settings_key] = _settings_of(each.group)
        values[each.kind_key] = each.kind
    return values


def allocate(optimizers: Sequence[Optimizer], named: Named, saved: Mapping[str, SavedTensor]) -> dict[str, Piece]:
    """Makes empty states for what the checkpoint holds of this rank's parameters; returns the blocks to fill."""
    pieces: dict[str, Piece] = {}
    by_name = _by_name(saved)
    for each in _members(optimizers, named):
        slot, parameter = each.slot, each.parameter
        spec, weight = slot.shard_spec, saved.get(model_key(slot.name))
        for state, tensor in by_name.get((slot.name, each.mark), {}).items():
            key = optimizer_key(slot.name, f"{state}{each.mark}")
            own = tensor.shape == spec.full_shape
            # A state in the precision of its weight follows the weight into another one, as the optimizer would have made it.
            follows = own and weight is not None and tensor.dtype == weight.dtype
            dtype = parameter.dtype if follows else tensor.dtype
            value = torch.zeros(spec.sizes if own else tensor.shape, dtype=dtype, device=parameter.device)
            each.optimizer.state[parameter][state] = value
            pieces[key] = Piece(spec, value) if own else Piece.whole(key, value)
    return pieces


def of_another_class(optimizers: Sequence[Optimizer], named: Named, values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(class here, class in the saved run) of optimizers to which the saved states mean nothing, or something else."""
    found = set()
    for each in _members(optimizers, named):
        if not each.fits(values):
            found.add((each.kind, str(values[each.kind_key])))
    return sorted(found)


def refuse_another_class(path: str, changed: Sequence[tuple[str, str]]) -> None:
    """Raises:
    CheckpointError: the states are those of another optimizer.
    """
    if changed:
        here, there = changed[0]
        rule = f"the checkpoint {path} holds the states of another one, and settings under which they were made"
        advice = (
            "Use that one, set initial_weights to begin with the weights alone, or strict_loading=False to begin its states anew"
        )
        raise CheckpointError(message("optimizer", here, rule, f"It was {there}", advice))


def restore_values(optimizers: Sequence[Optimizer], named: Named, values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Puts step counts and hyper-parameters back, matched by parameter name. States of another class of optimizer are let go.

    Returns:
        (what, why) of settings and states that could not be put back.
    """
    by_name, lines = _by_name(values), list[tuple[str, str]]()
    for each in _members(optimizers, named):
        if not each.fits(values):
            each.optimizer.state.pop(each.parameter, None)
            lines.append((f"optimizer state of {each.slot.name}", f"it is of {values[each.kind_key]}, not of {each.kind}"))
            continue
        for state, value in by_name.get((each.slot.name, each.mark), {}).items():
            each.optimizer.state[each.parameter][state] = _placed(state, value, each)
    for group in _groups(optimizers, named, values):
        if group.odd is None:
            group.restore()
        else:
            first, other = group.members[0].slot.name, group.odd.slot.name
            lines.append((f"settings of the group of {first}", f"{other}, which is in the same group here, had others"))
    return lines


def _placed(state: str, value: Any, member: _Member) -> Any:
    """A single number where the optimizer looks for it: step counts on the host, unless its kernels read them.

    That of a parameter that is a single number itself has its precision.
    """
    if not isinstance(value, Tensor):
        return value
    if state == "step":
        on_device = member.group.get("capturable") or member.group.get("fused")
        return value.clone().to(member.parameter.device if on_device else "cpu")
    is_moment = value.is_floating_point() and member.parameter.dim() == 0
    return value.clone().to(member.parameter.device, member.parameter.dtype if is_moment else value.dtype)


def group_settings(optimizers: Sequence[Optimizer]) -> list[list[dict[str, Any]]]:
    """The hyper-parameters of every group of every optimizer, in order, also of groups without a parameter on this rank."""
    return [[_settings_of(group) for group in optimizer.param_groups] for optimizer in optimizers]


def restore_empty_groups(optimizers: Sequence[Optimizer], named: Named, saved: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Gives groups without a parameter on this rank the settings that the group in their place had: their rate is logged too."""
    for optimizer, groups in zip(optimizers, saved, strict=False):
        if len(groups) != len(optimizer.param_groups):
            continue
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            if not any(each in named for each in group["params"]):
                group.update(settings)


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: each for key, each in group.items() if key not in _NOT_SETTINGS}


def _by_name(values: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """`optimizer.<name>.<state><mark>` -> value, as (name, mark) -> state -> value."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for key, value in values.items():
        if section(key) == OPTIMIZER:
            _, name, state = key_path(key)
            state, sign, number = state.partition(_AGAIN)
            found.setdefault((name, sign + number), {})[state] = value
    return found


class _Group(NamedTuple):
    """Parameters of one group that had settings in the saved run.

    Attributes:
        odd: one that had others than the first, where there is one: the group keeps its own settings then.
    """

    members: list[_Member]
    settings: Mapping[str, Any]
    odd: _Member | None

    def restore(self) -> None:
        """Gives the group the settings of the saved run."""
        copied = {key: value.clone() if isinstance(value, Tensor) else value for key, value in self.settings.items()}
        self.members[0].group.update(copied)


def _groups(optimizers: Sequence[Optimizer], named: Named, values: Mapping[str, Any]) -> list[_Group]:
    """The groups of this rank, with what the checkpoint has of their settings."""
    known: dict[int, list[_Member]] = {}
    for each in _members(optimizers, named):
        if each.fits(values) and each.settings_key in values:
            known.setdefault(id(each.group), []).append(each)
    found = []
    for members in known.values():
        settings = values[members[0].settings_key]
        odd = next((each for each in members if not same(settings, values[each.settings_key])), None)
        found.append(_Group(members, settings, odd))
    return found


def restored_settings(optimizers: Sequence[Optimizer], named: Named, values: Mapping[str, Any]) -> list[str]:
    """Whose settings come from the checkpoint, by name; of a parameter that several optimizers hold once for each."""
    groups = [each for each in _groups(optimizers, named, values) if each.odd is None]
    return [each.settings_key for group in groups for each in group.members]


def overruled_settings(optimizers: Sequence[Optimizer], named: Named, values: Mapping[str, Any]) -> list[str]:
    """What this run sets for its groups where the checkpoint's setting goes on instead. To be called before they are restored.

    A rate that a schedule moves is compared by where it begins.
    """
    found = dict[str, None]()
    for group in _groups(optimizers, named, values):
        there = group.settings if group.odd is None else {}
        here, _ = plain(_settings_of(group.members[0].group))
        moved = "initial_lr" in here and "initial_lr" in there
        for key in here.keys() & there.keys() - ({"lr"} if moved else set()):
            if not same(here[key], there[key]):
                found[f"{key} {there[key]} for {here[key]}"] = None
    return list(found)


def overruled_schedules(schedulers: Sequence[Any], saved: Sequence[Mapping[str, Any]]) -> list[str]:
    """Arguments of this run's schedules where the saved ones go on instead (`T_max`), also of those that one is made of."""
    found = []
    for scheduler, state in zip(schedulers, saved, strict=False):
        arguments = inspect.signature(type(scheduler).__init__).parameters.keys() - {"last_epoch", "schedulers"}
        keys = {name: key for name in arguments for key in (name, f"_{name}") if key in state and hasattr(scheduler, key)}
        here, _ = plain({name: getattr(scheduler, key) for name, key in keys.items()})
        changed = sorted(name for name in here if not same(here[name], state[keys[name]]))
        found += [f"{name} {state[keys[name]]} for {here[name]}" for name in changed]
        found += overruled_schedules(inner_schedules(scheduler), state.get(_INNER, ()))
    return found


def inner_schedules(scheduler: Any) -> list[Any]:
    """The schedules that one is made of (`SequentialLR`)."""
    return list(getattr(scheduler, _INNER, ()))


def new_parameters(optimizers: Sequence[Optimizer], named: Named, values: Mapping[str, Any]) -> list[str]:
    """Parameters that an optimizer has here and had not in the saved run: their states start anew."""
    return [each.slot.name for each in _members(optimizers, named) if each.settings_key not in values]


def fit_to_groups(state: Mapping[str, Any], scheduler: Any) -> dict[str, Any]:
    """The state of a learning-rate scheduler with rank 0's numbers for each of its groups replaced by those of this rank's.

    Ranks of a pipeline hold other groups, in number and order; `initial_lr` and `lr` came back with the groups, by name.

    Raises:
        CheckpointError: it is made of schedules for which there are no states.
    """
    groups, fitted = scheduler.optimizer.param_groups, dict(state)
    parts, saved = inner_schedules(scheduler), fitted.pop(_INNER, [])
    if parts:
        _refuse_other_parts(scheduler, len(parts), len(saved))
        fitted[_INNER] = [fit_to_groups(*pair) for pair in zip(saved, parts, strict=False)]
    for key, value in state.items():
        own = getattr(scheduler, key, None)
        if key == _INNER:
            continue
        if key in ("base_lrs", "_last_lr"):
            setting = "initial_lr" if key == "base_lrs" else "lr"
            fitted[key] = [group.get(setting, group["lr"]) for group in groups]
        elif isinstance(value, list) and isinstance(own, list) and len(own) != len(value):
            fitted[key] = own
        elif isinstance(own, Counter):  # MultiStepLR: it was saved as a plain dict
            fitted[key] = Counter(value)
    return fitted


def _refuse_other_parts(scheduler: Any, here: int, there: int) -> None:
    """Further schedules may follow those of the checkpoint; fewer than it has, or none of it, torch cannot take back."""
    if not 0 < there <= here:
        numbers = f"It has states of {there} such schedules, {here} are here"
        advice = "Use the schedule of the saved run, or set initial_weights to begin with the weights alone"
        rule = "the checkpoint's is not made of these schedules"
        raise CheckpointError(message("learning-rate schedule", type(scheduler).__qualname__, rule, numbers, advice))


def _members(optimizers: Sequence[Optimizer], named: Named) -> Iterator[_Member]:
    """Every parameter that has a name, in every optimizer that holds it."""
    held = Counter[str]()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in (each for each in group["params"] if each in named):
                slot = named[parameter]
                mark = f"{_AGAIN}{held[slot.name]}" if held[slot.name] else ""
                held[slot.name] += 1
                yield _Member(optimizer, group, parameter, slot, mark)
