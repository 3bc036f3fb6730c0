"""Features that a colwise layer leaves split: what mixes them before a rowwise layer has summed them up is another model's.

In steps that are looked at outputs of colwise layers know that they are split, and so does what is computed of them. What would
need all features (a norm over the width, a softmax or a loss over classes, cutting a fused layer's output into its parts) is
refused by name, and so is a model that returns them. What fails on them is refused as well, unless it would fail on all
features in the same way: that is the model's own affair, which may catch it and go another way. A refusal that it catches is
not forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from hybrid_strategy.errors import ConfigError, ModelError, message
from hybrid_strategy.parallel.marked import PASSES_THROUGH, MarkedTensor, call_plainly, makes_of_values
from hybrid_strategy.parallel.shell import operation_name
from hybrid_strategy.parallel.tensor.whole_looks import looks_of_call, whole_features
from hybrid_strategy.parallel.trees import iterate_tensors, map_tensors

_SECOND = ("mean", "sum", "var", "std", "var_mean", "std_mean", "logsumexp", "softmax", "log_softmax", "prod", "amax", "amin")
_OF_DIM: Mapping[str, int] = {
    **dict.fromkeys((*_SECOND, "max", "min", "argmax", "argmin", "cumsum", "narrow", "unbind"), 1),
    **dict.fromkeys(("norm", "chunk", "split", "tensor_split", "topk", "normalize", "vector_norm"), 2),
}
"""What works along a dimension, and the place of that argument."""
_OVER_CLASSES = ("cross_entropy", "nll_loss", "layer_norm", "rms_norm")
_PARTS = ("chunk", "split", "tensor_split", "narrow", "__getitem__")
_PRODUCTS = ("matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "einsum", "linear", "scaled_dot_product_attention")
_VIEWS = ("view", "reshape", "flatten", "unflatten", "transpose", "permute", "movedim", "unsqueeze", "squeeze", "swapaxes")


class SplitFeatures(MarkedTensor):
    """What is computed of it is one, too, until a rowwise layer takes it.

    Attributes:
        layers: names of the colwise layers that have made it.
        widths: how many features of each this rank has.
        flat: are the features its last dimension? Not where they are cut into heads.
        head: how many features a head has, where they are cut into heads; else 0.
        whole: what it would be like with all features, without memory; `None` where that is not known.
        watch: how all of them are watched.
    """

    layers: tuple[str, ...]
    widths: frozenset[int]
    flat: bool
    head: int
    whole: Tensor | None
    watch: FeatureWatch

    @classmethod
    def computed(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        name = operation_name(func)
        given = [each for each in iterate_tensors((args, kwargs)) if isinstance(each, SplitFeatures)]
        if _mixes(name, args, kwargs):
            refuse(given[0], name)
        whole = looks_of_call(func, args, kwargs, SplitFeatures)
        try:
            result = call_plainly(func, args, kwargs)
        except PASSES_THROUGH:
            raise
        except Exception as error:
            if whole.fails_as(error):
                raise
            refuse(given[0], name, error)
        if not makes_of_values(name, result) or name.startswith("get_"):
            return result
        if (name == "to" or name.endswith("_as")) and not isinstance(args[0], SplitFeatures):
            return result  # the others are there for their shape or type
        return map_tensors(lambda path, each: _inherited(name, each, given, whole.of(path)), result)


def _inherited(name: str, result: Tensor, given: list[SplitFeatures], whole: Tensor | None) -> Tensor:
    if type(result) is not Tensor:
        return result
    widths = frozenset[int]().union(*(each.widths for each in given))
    flat = name not in _PRODUCTS and result.dim() > 0 and result.shape[-1] in widths
    if flat and name in _VIEWS:
        source = given[0]
        joined = source.shape[result.dim() - 1 :]
        joins_heads = result.shape[:-1] == source.shape[: result.dim() - 1] or result.shape[-1] != source.shape[-1]
        within = result.shape[-1] == source.head and 1 not in joined  # pairs of one head
        merged = result.dim() < source.dim() and joins_heads and not within
        flat = merged or (source.flat and result.dim() <= source.dim() and name not in ("transpose", "permute", "movedim"))
    elif flat:
        flat = any(each.flat for each in given)
    head = 0 if flat else _head(result, given)
    split = made_by(result, tuple(dict.fromkeys(layer for each in given for layer in each.layers)), widths, given[0].watch)
    split.flat, split.head, split.whole = flat, head, whole_features(result, whole, given[0], flat)
    return split


def _head(result: Tensor, given: list[SplitFeatures]) -> int:
    """Features of a head: known before, or those that a cut of the last dimension leaves behind the number of heads."""
    source = given[0]
    if source.flat and result.dim() > source.dim() and result.shape[: source.dim() - 1] == source.shape[:-1]:
        return source.shape[-1] // max(1, result.shape[source.dim() - 1])
    return max(each.head for each in given)


def made_by(tensor: Tensor, layers: tuple[str, ...], widths: frozenset[int], watch: FeatureWatch) -> SplitFeatures:
    """The same tensor, which knows that its last dimension is split."""
    split: Any = tensor.as_subclass(SplitFeatures)
    split.layers, split.widths, split.flat, split.head, split.whole, split.watch = layers, widths, True, 0, None, watch
    return split  # type: ignore[no-any-return]


def _mixes(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Does the function work over features of which other ranks have the rest?"""
    subject = args[0] if args else kwargs.get("input")
    if not isinstance(subject, SplitFeatures):
        return False
    if name in ("cross_entropy", "nll_loss"):
        return True
    if not subject.flat:
        return False
    if name in _OVER_CLASSES:
        return True
    if name == "__getitem__":
        return _cuts_last(args[1], subject.dim())
    if name in ("view", "reshape", "unflatten"):
        return _counts_parts(name, args, kwargs)
    if name not in _OF_DIM:
        return False
    place = _OF_DIM[name]
    dims = kwargs["dim"] if "dim" in kwargs else args[place] if len(args) > place else None
    last = {-1, subject.dim() - 1}
    return bool(last & set(dims)) if isinstance(dims, tuple | list) else type(dims) is int and dims in last


def _counts_parts(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Is the last dimension cut into so many parts of any width (`view(b, s, heads, -1)`)? A rank has fewer, not thinner ones.

    Where the width is a number (`view(b, s, heads, width // heads)`), the plan must tell how many heads the model has.
    """
    rest = (*args[1:], *kwargs.values())
    sizes = rest[-1] if rest and isinstance(rest[-1], tuple | list) else rest
    if not all(isinstance(each, int) for each in sizes):
        return False
    whole = args[0] if args else kwargs["input"]
    before = () if name == "unflatten" else tuple(whole.shape[:-1])
    last = name != "unflatten" or rest[0] in (-1, whole.dim() - 1)
    cut = tuple(sizes[len(before) :])
    if not last or tuple(sizes[: len(before)]) != before:
        return False
    if -1 in cut:
        return any(each > 1 for each in cut[: cut.index(-1)])
    return len(cut) > 1 and cut[0] in whole.watch.counts


def _cuts_last(index: Any, ndim: int) -> bool:
    """Does an index take a piece of the last dimension?"""
    parts = index if isinstance(index, tuple) else (index,)
    last = parts[-1]
    reaches = any(each is Ellipsis for each in parts) or len(parts) == ndim
    return reaches and isinstance(last, slice) and last.step in (None, 1) and last != slice(None)


def refuse(split: SplitFeatures, operation: str, error: Exception | None = None) -> NoReturn:
    """Refuses what needs all features.

    Raises:
        ModelError: always.
    """
    layer = split.layers[0]
    rule = f"its features are split over the ranks until a rowwise layer takes them, and {operation} is given them before"
    held = f"This rank has {', '.join(map(str, sorted(split.widths)))} of them"
    if error is None and operation in ("view", "reshape", "unflatten"):
        advice = f"Cut what {layer!r} makes by the width of a head, as in view(b, s, -1, width), or make Linears of a fused layer"
    elif operation in _PARTS:
        advice = f"Make a Linear of its own of each part that {layer!r} makes, or take its rule and those of its block away"
    elif operation in ("cross_entropy", "nll_loss", "the caller of the model"):
        advice = f"Set vocab_head for {layer!r}, whose output looks whole, rowwise for the layer behind it, or take its rule away"
    else:
        advice = f"Set rowwise for the layer behind it, or take the rule of {layer!r} and those of its block away"
    numbers = held if error is None else f"{held}; {type(error).__name__}: {error}"
    refusal = ModelError(message(f"tensor[{layer!r}]", "colwise", rule, numbers, advice))
    split.watch.note(refusal)
    raise refusal from error


def plain(value: Any) -> Any:
    """The nested value with plain tensors."""
    return map_tensors(lambda _, each: each.as_subclass(Tensor) if isinstance(each, SplitFeatures) else each, value)


@dataclass(frozen=True)
class FeatureWatch:
    """How outputs of colwise layers are watched.

    Attributes:
        refused: where refusals are noted while a step is looked at; `None` in other steps.
        counts: numbers of heads of the whole model, of which no rank has as many.
    """

    refused: Callable[[], list[ConfigError] | None]
    counts: frozenset[int] = frozenset()

    @property
    def looks(self) -> bool:
        return self.refused() is not None

    def note(self, refusal: ConfigError) -> None:
        """The model may catch it."""
        refused = self.refused()
        if refused is not None:
            refused.append(refusal)


def watch_features(model: nn.Module, styles: Mapping[str, str], widths: Mapping[str, int], watch: FeatureWatch) -> None:
    """Lets outputs of colwise layers know that they are split, in steps that are looked at.

    Args:
        widths: how many features such a layer makes on all ranks together.
    """

    def mark(name: str) -> Callable[..., Any]:
        def note(_layer: nn.Module, _args: Any, output: Tensor) -> Tensor | None:
            if not watch.looks or type(output) is not Tensor:
                return None
            split = made_by(output, (name,), frozenset([output.shape[-1]]), watch)
            split.whole = torch.empty((*output.shape[:-1], widths[name]), dtype=output.dtype, device="meta")
            return split

        return note

    def take(_layer: nn.Module, args: tuple[Any, ...]) -> Any:
        return plain(args) if any(isinstance(each, SplitFeatures) for each in args) else None

    def leave(_model: nn.Module, _args: Any, output: Any) -> None:
        for each in iterate_tensors(output):
            if isinstance(each, SplitFeatures):
                refuse(each, "the caller of the model")

    for name, style in styles.items():
        if style == "colwise":
            model.get_submodule(name).register_forward_hook(mark(name))
        elif style == "rowwise":
            model.get_submodule(name).register_forward_pre_hook(take)
    model.register_forward_hook(leave)
