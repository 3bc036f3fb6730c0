"""Whole or split features: what a layer is given must be what its rule expects, or a product fails without a word of the rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn

from hybrid_strategy.errors import ConfigError, ModelError, message
from hybrid_strategy.parallel.tensor.region import Region

Note = Callable[[ConfigError], None]


def watch_widths(model: nn.Module, styles: Mapping[str, str], region: Region, note: Note) -> None:
    """Lets every Linear and norm of `model`, which is sliced already, look at the last dimension of its input at each call.

    Args:
        note: is told of what is raised, which the model may catch.
    """
    for name, module in model.named_modules():
        style = styles.get(name, "")
        if isinstance(module, nn.Linear):
            held = module.in_features
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            held = module.normalized_shape[-1]
        else:
            continue
        if style == "rowwise":
            module.register_forward_pre_hook(partial(_expect_part, note, name, held))
        else:
            module.register_forward_pre_hook(partial(_expect_whole, note, name, style, held, region.chunk(held)[1]))


def _expect_part(note: Note, name: str, held: int, module: nn.Module, args: tuple[Any, ...]) -> None:
    given = _width(args)
    if given > held:
        rule = "its input must come split from a colwise layer"
        numbers = f"It is given all {given} features, and this rank holds the weights of {held} of them"
        advice = f"Set colwise for the layers that make its input, or colwise for {name!r} if it is the first of the two"
        _refuse(note, ModelError(message(f"tensor[{name!r}]", "rowwise", rule, numbers, advice)))


def _expect_whole(note: Note, name: str, style: str, held: int, part: int, module: nn.Module, args: tuple[Any, ...]) -> None:
    given = _width(args)
    if given == part and part < held:
        rule = "its input must be whole, and comes split from a colwise layer"
        advice = f"Set rowwise for {name!r}" if isinstance(module, nn.Linear) else "Set rowwise for the Linear before it"
        advice += ", or take the colwise rule away"
        numbers = f"It is given {given} of {held} features"
        _refuse(note, ModelError(message(f"tensor[{name!r}]", style or None, rule, numbers, advice)))


def _refuse(note: Note, refusal: ModelError) -> NoReturn:
    note(refusal)
    raise refusal


def _width(args: tuple[Any, ...]) -> int:
    return args[0].shape[-1] if args and isinstance(args[0], Tensor) and args[0].ndim else 0
