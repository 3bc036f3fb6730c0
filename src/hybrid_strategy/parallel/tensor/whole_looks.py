"""What split features would be like with all of them together: shapes without memory, to tell a model's own errors from ours.

Every operation on a rank's share is done a second time on tensors of the whole's shape that have no values, in steps that are
looked at. What fails on the share and on these alike would fail in one process as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from hybrid_strategy.parallel.marked import call_plainly, without_values
from hybrid_strategy.parallel.trees import Path, map_tensors, tensors_of


class Share(Protocol):
    """A rank's share of some features."""

    shape: torch.Size
    whole: Tensor | None
    flat: bool

    def numel(self) -> int: ...

    def dim(self) -> int: ...


@dataclass(frozen=True)
class Looks:
    """How a call would end with all features.

    Attributes:
        results: what it would return, by their places.
        error: what it would raise.
    """

    results: Mapping[Path, Tensor] = field(default_factory=dict)
    error: Exception | None = None

    def fails_as(self, error: Exception) -> bool:
        """Would it fail in the same way?"""
        return self.error is not None and type(self.error) is type(error)

    def of(self, path: Path) -> Tensor | None:
        return self.results.get(path)


def looks_of_call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], kind: type[Any]) -> Looks:
    """How the call would end; nothing where that is not known.

    Args:
        kind: class of the shares among the arguments.
    """
    known = True

    def enlarge(_: Path, tensor: Any) -> Tensor:
        nonlocal known
        if not isinstance(tensor, kind):
            return without_values(tensor)
        known &= tensor.whole is not None
        return tensor.whole if tensor.whole is not None else without_values(tensor)

    given = map_tensors(enlarge, (args, dict(kwargs)))
    if not known:
        return Looks()
    try:
        with torch.no_grad():
            return Looks(dict(tensors_of(call_plainly(func, *given))))
    except Exception as error:  # whatever it would raise
        return Looks(error=error)


def whole_features(result: Tensor, whole: Tensor | None, source: Share, flat: bool) -> Tensor | None:
    """What `result`, made of `source`, would be like; `whole` is what the same call makes of all features.

    A call may count what a rank has (`view(b, s, x.shape[-1] // width, width)`), and would then count more of them.

    Args:
        flat: are features the last dimension of the result?
    """
    if source.whole is None or not source.numel() or source.whole.numel() % source.numel():
        return None
    times = source.whole.numel() // source.numel()
    if whole is not None and _fits(tuple(result.shape), tuple(whole.shape), times, flat):
        return whole
    dim = result.dim() - 1 if flat else source.dim() - 1
    known = flat or (source.flat and tuple(result.shape[:dim]) == tuple(source.shape[:dim]) and result.dim() > dim)
    if not known or result.numel() != source.numel():
        return None
    shape = [size * times if place == dim else size for place, size in enumerate(result.shape)]
    return torch.empty(shape, dtype=result.dtype, device="meta")


def _fits(part: tuple[int, ...], whole: tuple[int, ...], times: int, flat: bool) -> bool:
    """Is there one dimension at most that is longer in the whole, the last one where the features are that?"""
    longer = [place for place, (few, many) in enumerate(zip(part, whole, strict=False)) if few != many]
    if len(part) != len(whole) or len(longer) > 1 or any(part[place] * times != whole[place] for place in longer):
        return False
    return not flat or longer == [len(part) - 1]
