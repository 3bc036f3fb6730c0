"""Does a plan fit the model and the number of ranks? Asked before anything is changed; needs no process group."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from math import gcd

from torch import nn

from hybrid_strategy.errors import LayoutError, ModelError, did_you_mean, message
from hybrid_strategy.parallel.tensor.suggest import module_patterns, without_rules
from hybrid_strategy.registry import find
from hybrid_strategy.spec.parallel_plan import ParallelPlan, matches
from hybrid_strategy.spec.shard import even_chunk


def check_tensor_parallel(plan: ParallelPlan, size: int) -> None:
    """Refuses a size that does not divide the plan's heads; the message lists the sizes that do.

    Raises:
        LayoutError: `size` does not divide one of `plan.heads`.
    """
    common = gcd(*plan.heads.values())
    valid = " or ".join(str(each) for each in range(1, common + 1) if common % each == 0)
    for name, heads in plan.heads.items():
        if heads % size:
            numbers = f"{size} does not divide {heads}"
            advice = f"Set tensor_parallel_size to {valid}"
            raise LayoutError(message("tensor_parallel_size", size, f"it must divide {name}", numbers, advice))


def assign_styles(model: nn.Module, plan: ParallelPlan, size: int, absent: Collection[str] = ()) -> dict[str, str]:
    """Module name -> style, in the model's order, after `plan.tensor`.

    Args:
        absent: names of modules removed by a pipeline cut: a pattern that could only match at or below one of them is no error.

    Raises:
        ModelError: no rules at all, a pattern without a module, two styles for one module, a style that does not suit its
            module, or a dimension too short for `size` ranks.
    """
    if not plan.tensor:
        raise ModelError(without_rules(model, size))
    modules = {name: each for name, each in model.named_modules() if not _below(name, absent)}
    styles: dict[str, str] = {}
    for pattern, style in plan.tensor.items():
        found = [name for name in modules if name and matches(pattern, name)]
        if not found and not any(_could_lie_below(pattern, name) for name in absent):
            rule, advice = "it matches no module of the model", did_you_mean(pattern, module_patterns(model))
            raise ModelError(message("tensor", pattern, rule, "", advice))
        for name in found:
            if styles.setdefault(name, style) != style:
                numbers = f"It also has {styles[name]!r}"
                raise ModelError(message(f"tensor[{name!r}]", style, "one module has one style", numbers, "Remove one rule"))
            _check_module(modules[name], name, style, size)
    return {name: styles[name] for name in modules if name in styles}


def is_inside(name: str, styles: Mapping[str, str]) -> bool:
    """Has the module `name` or an ancestor of it the style `replicate_input`?"""
    parts = name.split(".")
    return any(styles.get(".".join(parts[:end])) == "replicate_input" for end in range(1, len(parts) + 1))


def _check_module(module: nn.Module, name: str, style_name: str, size: int) -> None:
    style = find("parallel.tensor.styles", style_name, f"tensor[{name!r}]")
    style.check(module, name)
    for key, dim in style.sliced.items():
        parameter = getattr(module, key)
        if parameter is None:
            continue
        if not isinstance(parameter, nn.Parameter):
            rule = "only a plain parameter can be sliced"
            raise ModelError(message(f"{name}.{key}", type(parameter).__name__, rule, "", "Leave it out of ParallelPlan.tensor"))
        length = parameter.shape[dim]
        if even_chunk(length, size, size - 1)[1] == 0:
            numbers = f"{name}.{key} has {length} of them, so the last rank would hold none"
            advice = f"Set tensor_parallel_size to {_largest_size(length, size)} or less"
            raise LayoutError(
                message("tensor_parallel_size", size, f"dimension {dim} of every slice needs an entry", numbers, advice)
            )


def _largest_size(length: int, size: int) -> int:
    return next(each for each in range(size, 0, -1) if even_chunk(length, each, each - 1)[1])


def _below(name: str, absent: Collection[str]) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in absent)


def _could_lie_below(pattern: str, name: str) -> bool:
    want, have = pattern.split("."), name.split(".")
    return len(want) >= len(have) and all(fnmatchcase(part, piece) for piece, part in zip(want, have, strict=False))
