"""Which submodule is parallelised, and where its plan comes from."""

from __future__ import annotations

import lightning.pytorch as pl
from torch import nn

from hybrid_strategy.errors import ModelError, did_you_mean, message
from hybrid_strategy.spec.parallel_plan import ParallelPlan, matches


def find_target(module: pl.LightningModule, name: str | None) -> str:
    """Name of the submodule to parallelise: `name`, else `model`, else the child with the most parameters.

    It is the module itself (an empty name) where its own `parallel_plan()` names layers that stand directly in it.

    Raises:
        ModelError: there is no submodule of this name.
    """
    children = {child: each for child, each in module.named_children() if any(True for _ in each.parameters())}
    if name is not None:
        known = [each for each, _ in module.named_modules() if each]
        if name not in known:
            raise ModelError(
                message("module", name, "it must be a submodule of the LightningModule", "", did_you_mean(name, known))
            )
        return name
    if "model" in children:
        return "model"
    if not children or _plans_itself(module):
        return ""
    return max(children, key=lambda child: sum(each.numel() for each in children[child].parameters()))


def _plans_itself(module: pl.LightningModule) -> bool:
    rule = getattr(module, "parallel_plan", None)
    plan = rule() if callable(rule) else None
    if not isinstance(plan, ParallelPlan):
        return False
    patterns = (*plan.units, *plan.tensor, *plan.checkpoint_units, *plan.shard_units)
    return any(matches(pattern, name) for pattern in patterns for name, _ in module.named_modules() if name)


def find_plan(module: pl.LightningModule, target: str, given: ParallelPlan | None) -> ParallelPlan:
    """The plan: given to the strategy, else the submodule's or the module's `parallel_plan()`, else what its containers tell."""
    if given is not None:
        return given
    root = module.get_submodule(target) if target else module
    for source in (root, module):
        rule = getattr(source, "parallel_plan", None)
        if callable(rule):
            plan = rule()
            if not isinstance(plan, ParallelPlan):
                wanted = "it must return a hybrid_strategy.ParallelPlan"
                raise ModelError(
                    message("parallel_plan()", type(plan).__name__, wanted, "", "Return ParallelPlan(units=..., tensor=...)")
                )
            return plan
    return _plan_of_layers(root)


def _plan_of_layers(root: nn.Module) -> ParallelPlan:
    """The plan of a model that tells nothing.

    A Sequential calls its children one after another, which is all that a pipeline must know. Of any other model the layers of
    its largest ModuleList are taken as what is sharded and recomputed together.
    """
    if type(root) is nn.Sequential and len(root):
        return ParallelPlan(units=("*",))
    lists = {name: each for name, each in root.named_modules() if isinstance(each, nn.ModuleList) and len(each)}
    if not lists:
        return ParallelPlan()
    largest = max(lists, key=lambda name: sum(each.numel() for each in lists[name].parameters()))
    pattern = f"{largest}.*" if largest else "*"
    return ParallelPlan(shard_units=(pattern,), checkpoint_units=(pattern,))
