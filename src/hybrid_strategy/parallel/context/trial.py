"""Does a unit give on parts of a sequence what it gives on the whole? Tried before its first call, on a copy.

A unit that mixes positions in its own way (attention written out, a convolution, positions counted from the length of its input)
would be silently wrong on parts. The copy has weights of a size at which positions matter, which first values may not have; it
computes in float32 on a short sequence, without dropout, and touches neither the unit nor the random state.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hybrid_strategy.errors import ConfigError, ModelError, message
from hybrid_strategy.parallel.context.arguments import UnitCall
from hybrid_strategy.parallel.context.attention import prepare_masks, whole_attention
from hybrid_strategy.parallel.context.collectives import gather_sequence
from hybrid_strategy.parallel.context.region import ContextRegion
from hybrid_strategy.parallel.context.sequence import SplitSequence
from hybrid_strategy.parallel.context.span import SequenceSpan
from hybrid_strategy.parallel.context.unit_copy import copy_with_large_weights, signature_of
from hybrid_strategy.parallel.shell import Shell, whole_of
from hybrid_strategy.parallel.tensor import collectives
from hybrid_strategy.parallel.trees import map_tensors, tensors_of

_CHUNK = 8
"""Positions of a chunk of the short sequence, for each rank of sequence parallelism, which must be able to cut it."""

_TOLERANCE = 1e-2
"""Of the largest value: wrong positions are off by its own size, TF32 and another order of sums by a tenth of this."""


@dataclass(frozen=True)
class _Short:
    """An argument of the trial: whole along the short sequence."""

    whole: Tensor
    dim: int | None
    scattered: bool = False


def try_unit(unit: nn.Module, kind: type[nn.Module], name: str, call: UnitCall, args: Any, kwargs: Any) -> None:
    """Tries a unit on short sequences, unless one like it has been tried.

    Args:
        kind: the unit's class without gates.
        call: its first call, with the arguments `args` and `kwargs`.

    Raises:
        ModelError: its sequences cannot be cut.
    """
    signature = signature_of(unit)
    if signature in call.region.tried:
        return
    call.region.tried.add(signature)
    copied = copy_with_large_weights(unit, kind, call.first.device)
    size = 2 * call.region.size * call.region.tensor_size * _CHUNK
    lengths = [size, call.span.length] if size < call.span.length else [call.span.length]
    trouble = ""
    for length in lengths:  # an argument may not bear to be shortened
        try:
            error = _largest_error(copied, call, length, args, kwargs)
        except ConfigError:
            raise
        except Exception as failure:  # whatever the unit raises
            trouble = f"{type(failure).__name__}: {failure}"
            continue
        if error <= _TOLERANCE:
            return
        trouble = f"On two equal copies the outputs differ by {error:.1%} of the largest value"
        break
    rule = f"{name} ({kind.__name__}) does not give the same on parts of a sequence as on the whole of it"
    advice = (
        "It may mix positions in F.scaled_dot_product_attention only (called by this name), and must take positions, tables and "
        "masks as arguments. Change it, name other ParallelPlan.units, or set 1"
    )
    raise ModelError(message("context_parallel_size", call.region.size, rule, trouble, advice))


def _largest_error(copied: nn.Module, call: UnitCall, length: int, args: Any, kwargs: Any) -> float:
    """The largest difference of the outputs, as a share of the largest value."""
    region, span = call.region, SequenceSpan.of(call.region, length)
    short = _Shortener(call, length)
    prepare_masks(region, length)
    with torch.no_grad(), torch.autocast(call.first.device.type, enabled=False):
        given = call.mapped(args, kwargs, short.argument)
        region.trying = True
        try:
            whole = _run(copied, given, lambda each: _scattered(region, each.whole, each.scattered))
        finally:
            region.trying = False
        with whole_attention(region, recomputed=True):
            parts = _run(copied, given, lambda each: _scattered(region, _part(call, each), each.scattered))
        return _compare(
            [_assembled(region, each, length) for each in whole],
            [_joined(span, _assembled(region, each, length // region.size)) for each in parts],
        )


class _Shortener:
    """Makes the arguments of a trial from those of a call: hidden states are random, the rest is the beginning of what it was."""

    def __init__(self, call: UnitCall, length: int) -> None:
        self._call, self._length = call, length
        self._generator = torch.Generator(call.first.device).manual_seed(0)

    def argument(self, name: str, tensor: Tensor) -> _Short:
        call = self._call
        if isinstance(tensor, SplitSequence) and tensor.whole is None:
            scattered = tensor.span.scattered
            shape = [self._length if dim == tensor.cut_dim else size for dim, size in enumerate(tensor.shape)]
            return _Short(self._random(shape), tensor.cut_dim, scattered)
        plain = (whole_of(tensor) if isinstance(tensor, Shell) else tensor).detach()
        plain = plain.float() if plain.is_floating_point() else plain
        dim = 1 if tensor is call.first else call.sequence_dim(name, plain)
        if dim is None:
            return _Short(self._keys(plain, None), None)
        if tensor is call.first and plain.is_floating_point():
            return _Short(self._random([self._length if each == dim else size for each, size in enumerate(plain.shape)]), dim)
        return _Short(self._keys(plain, dim).narrow(dim, 0, self._length), dim)

    def _random(self, shape: list[int]) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self._call.first.device)

    def _keys(self, tensor: Tensor, dim: int | None) -> Tensor:
        """A mask `[.., s, s]` or `[.., 1, s]` is as long along the keys."""
        last = tensor.dim() - 1
        is_mask = tensor.dtype == torch.bool or tensor.dim() == 4
        long = last > 0 and dim != last and tensor.shape[-1] == self._call.span.length
        return tensor.narrow(last, 0, self._length) if is_mask and long else tensor


def _part(call: UnitCall, argument: _Short) -> Tensor:
    return argument.whole if argument.dim is None else call.cut(argument.whole, argument.dim)


def _scattered(region: ContextRegion, tensor: Tensor, scattered: bool) -> Tensor:
    """The part that a rank of sequence parallelism holds."""
    if not scattered or region.tensor_group is None:
        return tensor
    return tensor.chunk(region.tensor_size, 1)[region.tensor_group.rank()]


class _TensorsStay(TorchFunctionMode):
    """Copies of objects share their tensors, which autograd may know and which are not changed in place."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.__deepcopy__ else func(*args, **(kwargs or {}))


def _is_no_container(value: Any) -> bool:
    return isinstance(value, _Short) or not (isinstance(value, Mapping | list | tuple) or dataclasses.is_dataclass(value))


def _run(copied: nn.Module, given: tuple[tuple[Any, ...], dict[str, Any]], pick: Any) -> list[Tensor]:
    """The outputs; an object such as a cache of keys is copied, so that the call to come finds it as it was."""
    with _TensorsStay():
        args, kwargs = map_tensors(
            lambda _, each: pick(each) if isinstance(each, _Short) else copy.deepcopy(each), given, is_leaf=_is_no_container
        )
    return [whole_of(each) if isinstance(each, Shell) else each for _, each in tensors_of(copied(*args, **kwargs))]


def _assembled(region: ContextRegion, tensor: Tensor, length: int) -> Tensor:
    """What the ranks of sequence parallelism hold of a sequence of `length`, put together."""
    scattered = region.tensor_group is not None and tensor.dim() >= 2 and tensor.shape[1] * region.tensor_size == length
    return collectives.all_gather(tensor, region.tensor_group, 1) if scattered and region.tensor_group else tensor


def _joined(span: SequenceSpan, tensor: Tensor) -> Tensor:
    runs_along = tensor.dim() >= 2 and tensor.shape[1] * span.region.size == span.length
    return gather_sequence(tensor, span, 1) if runs_along else tensor


def _compare(whole: list[Tensor], joined: list[Tensor]) -> float:
    if [each.shape for each in whole] != [each.shape for each in joined]:
        return float("inf")
    errors = [0.0]
    for want, have in zip(whole, joined, strict=True):
        if want.numel():
            want, have = want.double().nan_to_num(), have.double().nan_to_num()
            errors.append(((want - have).abs().max() / want.abs().max().clamp_min(1e-30)).item())
    return max(errors)
