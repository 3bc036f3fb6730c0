"""What can be said of a module before it is parallelised: its parts, its plan or a proposal, and what is not understood.

One batch is run on this process alone, so that order, unused parameters and possible cuts are seen and not guessed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from hybrid_strategy.errors import ConfigError
from hybrid_strategy.parallel.tensor.check import assign_styles
from hybrid_strategy.parallel.tensor.suggest import layers_of, module_patterns, suggested_rules
from hybrid_strategy.parallel.tracing import bad_cuts, called_often, folded, good_units, proposed_units, traced
from hybrid_strategy.parallel.units import find_carried, find_units
from hybrid_strategy.spec.parallel_plan import ParallelPlan
from hybrid_strategy.strategy.outputs import read_loss
from hybrid_strategy.strategy.target import find_plan, find_target


@dataclass
class Part:
    """A module, or all elements of a list at one place of it."""

    name: str
    kind: str
    count: int
    parameters: int


@dataclass
class Inspection:
    """The answer of `hybrid inspect`.

    Attributes:
        module: name of the submodule that is parallelised.
        plan_from: `given` by the user, or `proposed`.
        carried: units whose outputs a pipeline sends past cuts.
        rules: tensor-parallel style of each pattern.
        plain: layers with parameters that no rule names: every tensor-parallel rank holds them.
        outside: parameters that belong to no unit: every stage holds them.
        tied: groups of names of one parameter; here and below, what is outside of the submodule has the LightningModule's name
            before it.
        unused: trainable parameters without a gradient; frozen ones are those that are not trainable.
        not_understood: what stands in the way, in words.
    """

    module: str
    plan_from: str
    parts: list[Part] = field(default_factory=list)
    units: list[str] = field(default_factory=list)
    carried: list[str] = field(default_factory=list)
    rules: Mapping[str, str] = field(default_factory=dict)
    plain: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    tied: list[list[str]] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    not_understood: list[str] = field(default_factory=list)
    was_run: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Inspector(pl.Callback):
    """Looks at the module while its first training batch is at hand.

    Args:
        module: name of the submodule to parallelise, as the strategy takes it.
        plan: the plan given to the strategy.
    """

    def __init__(self, module: str | None = None, plan: ParallelPlan | None = None) -> None:
        self._name, self._plan = module, plan
        self.found: Inspection | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self.found = inspect(module, self._name, self._plan, batch)


def inspect(module: pl.LightningModule, name: str | None, given: ParallelPlan | None, batch: Any = None) -> Inspection:
    """Looks at `module`; runs its `training_step` on `batch` if there is one."""
    target = find_target(module, name)
    root = module.get_submodule(target) if target else module
    plan = find_plan(module, target, given)
    own = given is not None or any(callable(getattr(each, "parallel_plan", None)) for each in (root, module))
    found = Inspection(target or type(module).__name__, "given" if own else "proposed", _parts(root))
    found.tied = _tied(module, target)
    found.frozen = [key for key, each in _named(module, target).items() if not each.requires_grad]
    _rules(root, plan, found)
    units = list(_checked_units(root, plan, found))
    if batch is not None and not module.automatic_optimization:
        found.not_understood.append(
            "training_step optimizes by hand, so it was not run: order and unused parameters are not known"
        )
    elif batch is not None:
        units = _run(module, target, batch, units, found)
    found.units, found.carried = folded(root, units), folded(root, found.carried)
    found.outside = [key for key, _ in root.named_parameters() if not any(key.startswith(f"{unit}.") for unit in units)]
    return found


def _parts(root: nn.Module) -> list[Part]:
    counts: dict[str, int] = defaultdict(int)
    sizes: dict[str, int] = defaultdict(int)
    patterns = {"": ""}
    for name, module in root.named_modules():
        for key in module._modules:
            inner = "*" if isinstance(module, nn.ModuleList) else key
            patterns[f"{name}.{key}".lstrip(".")] = f"{patterns[name]}.{inner}".lstrip(".")
        counts[patterns[name]] += 1
        sizes[patterns[name]] += sum(each.numel() for each in module.parameters())
    return [Part(name, _kind(each), counts[name], sizes[name]) for name, each in module_patterns(root).items()]


def _kind(module: nn.Module) -> str:
    extra = module.extra_repr() if not list(module.children()) and any(True for _ in module.parameters()) else ""
    return f"{type(module).__name__}({extra})" if extra else type(module).__name__


def _named(module: pl.LightningModule, target: str) -> dict[str, nn.Parameter]:
    """Every parameter once: those of the submodule by their names in it, others by the LightningModule's."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for name, each in module.named_parameters(remove_duplicate=False):
        found.setdefault(id(each), (_short(module, target, name), each))
    return dict(found.values())


def _short(module: pl.LightningModule, target: str, name: str) -> str:
    inner = name.removeprefix(f"{target}.")
    return f"{type(module).__name__}.{name}" if target and inner == name else inner


def _tied(module: pl.LightningModule, target: str) -> list[list[str]]:
    names: dict[int, list[str]] = defaultdict(list)
    for name, each in module.named_parameters(remove_duplicate=False):
        names[id(each)].append(_short(module, target, name))
    return [each for each in names.values() if len(each) > 1]


def _rules(root: nn.Module, plan: ParallelPlan, found: Inspection) -> None:
    found.rules = dict(plan.tensor or suggested_rules(layers_of(root)))
    try:
        styles = assign_styles(root, ParallelPlan(tensor=found.rules), 2) if found.rules else {}
    except ConfigError as error:
        found.not_understood.append(str(error))
        styles = {}
    patterns: dict[str, None] = {}
    for pattern, each in module_patterns(root).items():
        if any(True for _ in each.parameters(recurse=False)) and pattern not in found.rules:
            patterns[pattern] = None
    found.plain = [each for each in patterns if each not in styles]


def _checked_units(root: nn.Module, plan: ParallelPlan, found: Inspection) -> list[str]:
    try:
        units = find_units(root, plan.units) if plan.units else []
        found.carried = [units[index] for index in find_carried(root, units, plan.carried)]
        return units
    except ConfigError as error:
        found.not_understood.append(str(error))
        return []


def _run(module: pl.LightningModule, target: str, batch: Any, units: list[str], found: Inspection) -> list[str]:
    """One forward and backward pass, and one forward pass for each cut; returns the units."""
    root = module.get_submodule(target) if target else module
    with _silent(module):
        with traced(root) as called:
            read_loss(module.training_step(batch, 0), 1.0).loss.backward()
        found.was_run = True
        found.unused = [key for key, each in _named(module, target).items() if each.requires_grad and each.grad is None]
        module.zero_grad(set_to_none=True)
        for name, count in called_often(root, called).items():
            found.not_understood.append(f"{name} is called {count} times in one pass: it can only lie inside one unit")
        proposed = not units
        units = units or proposed_units(root, called)
        never = [unit for unit in units if unit not in called]
        if never:
            found.not_understood.append(
                f"{', '.join(never)}: not called in the pass, so their place among the units is not known"
            )
        module.eval()

        def run() -> Tensor:
            with torch.no_grad():
                return read_loss(module.training_step(batch, 0), 1.0).loss

        if len(units) > 1 and not never:
            own = found.plan_from == "given" or not proposed
            if own:
                bad = bad_cuts(root, units, run, found.carried)
            else:
                units, found.carried, bad = good_units(root, units, run)
            found.not_understood += [f"a cut after {unit} is not right: {why}" for unit, why in bad.items()]
        module.train()
    return units


@contextmanager
def _silent(module: pl.LightningModule) -> Any:
    """Lets the step log nothing: it runs outside of Lightning's own call of it."""

    def nothing(*_arguments: Any, **_options: Any) -> None:
        """Stands for `self.log`."""

    vars(module).update(log=nothing, log_dict=nothing)
    try:
        yield
    finally:
        del vars(module)["log"], vars(module)["log_dict"]
