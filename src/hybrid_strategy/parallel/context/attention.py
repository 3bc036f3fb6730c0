"""Attention of a part of each sequence to the whole of it, in a model that knows nothing of this.

While a unit runs, `F.scaled_dot_product_attention` is replaced by a function that gathers keys and values over the ranks, as
Llama 3 does (arXiv:2407.21783 section 3.3.2). Beside passing them round a ring this sends the same bytes in one message, leaves
every mask, kernel and dropout as they are, and adds up in the order of one device; under grouped queries they are few.

The whole keys and values are not kept for the backward pass: they are gathered once more there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

from hybrid_strategy.errors import ModelError, message
from hybrid_strategy.parallel.activation_checkpoint import selective_contexts
from hybrid_strategy.parallel.context.collectives import gather_sequence
from hybrid_strategy.parallel.context.region import ContextRegion
from hybrid_strategy.parallel.context.span import SequenceSpan
from hybrid_strategy.parallel.wrapping import Wrapped

SEQUENCE_DIM = -2
"""Of queries, keys and values: `[b, heads, s, d]`."""

_attention = F.scaled_dot_product_attention


@cache
def _causal_mask(queries: int, keys: int) -> Tensor:
    """The mask of the last `queries` positions of `keys`, two numbers; it cannot be made within a dispatch mode."""
    with torch.inference_mode(False):
        return causal_lower_right(queries, keys)


def prepare_masks(region: ContextRegion, length: int) -> None:
    """Makes the masks of sequences of `length`; recomputation cannot make them."""
    chunk = length // (2 * region.size)
    for index in _chunks(region):
        _causal_mask(chunk, (index + 1) * chunk)


def _chunks(region: ContextRegion) -> tuple[int, int]:
    """The two chunks of the sequence, of 2n, that this rank holds."""
    return region.rank, 2 * region.size - 1 - region.rank


def attend_to_whole(module: nn.Module, region: ContextRegion, recomputed: bool) -> None:
    """Makes the attention within `module.forward` see whole sequences.

    Args:
        recomputed: the module is recomputed in the backward pass, gathering included.
    """

    def attending(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with whole_attention(region, recomputed):
            return forward(*args, **kwargs)

    module.forward = Wrapped(module.forward, attending)


@contextmanager
def whole_attention(region: ContextRegion, recomputed: bool) -> Iterator[None]:
    """Replaces the attention function meanwhile; what lies within something recomputed is recomputed too."""
    if region.trying:
        yield
        return
    outer = F.scaled_dot_product_attention
    with _function(WholeAttention(region, recomputed or (isinstance(outer, WholeAttention) and outer.recomputed))):
        yield


@contextmanager
def _function(attention: Callable[..., Tensor]) -> Iterator[None]:
    """Puts `attention` where models look for it; torch's own layers look there too, but for their fast path in evaluation."""
    before, fast = F.scaled_dot_product_attention, torch.backends.mha.get_fastpath_enabled()
    F.scaled_dot_product_attention = attention
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before
        torch.backends.mha.set_fastpath_enabled(fast)


@dataclass(frozen=True)
class WholeAttention:
    """`F.scaled_dot_product_attention` of a part of the queries `[b, heads, s/n, d]` to whole keys and values.

    Attributes:
        region: the ranks.
        recomputed: the backward pass runs this again anyway, so nothing needs to be given up for it.
    """

    region: ContextRegion
    recomputed: bool

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        """Has the arguments of torch's function."""
        queries = query.shape[SEQUENCE_DIM]
        if key.shape[SEQUENCE_DIM] != queries:  # to something else than the sequence, such as an encoder's output
            return _attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
        span = SequenceSpan.of(self.region, queries * self.region.size)
        _check_mask(span, attn_mask, queries)
        run = _Settings(span, attn_mask, dropout_p, is_causal, options)
        if self.recomputed or not torch.is_grad_enabled() or not (key.requires_grad or value.requires_grad):
            return run(query, key, value)
        again: dict[str, Any] = {"preserve_rng_state": dropout_p > 0.0, "context_fn": selective_contexts}
        result: Tensor = checkpoint(run, query, key, value, use_reentrant=False, **again)
        return result


def _check_mask(span: SequenceSpan, mask: Tensor | None, queries: int) -> None:
    """Refuses a mask that is not of this rank's queries and all keys."""
    length, size = span.length, span.region.size
    if mask is None or (mask.shape[-1] in (1, length) and (mask.dim() < 2 or mask.shape[-2] in (1, queries))):
        return
    rule = "an attention mask must be of this rank's queries and of all keys"
    numbers = f"Its shape is {tuple(mask.shape)}, the queries are {queries} and the keys {length}"
    advice = "Make the mask outside of the block and pass it as an argument, or use is_causal=True"
    raise ModelError(message("context_parallel_size", size, rule, numbers, advice))


@dataclass(frozen=True)
class _Settings:
    """A call of attention but for its tensors."""

    span: SequenceSpan
    mask: Tensor | None
    dropout: float
    is_causal: bool
    options: dict[str, Any]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = _gathered(self.span, *_as_computed(key, value))
        if not self.is_causal:
            return _attention(query, key, value, self.mask, self.dropout, False, **self.options)
        with _function(_attention):  # a causal mask looks there for what it is given to
            return self._causal(query, key, value)

    def _causal(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Each chunk of the queries to the keys up to its own last position."""
        chunk = query.shape[SEQUENCE_DIM] // 2
        parts = []
        for index, part in zip(_chunks(self.span.region), query.split(chunk, SEQUENCE_DIM), strict=True):
            seen = (index + 1) * chunk
            keys, values = key.narrow(SEQUENCE_DIM, 0, seen), value.narrow(SEQUENCE_DIM, 0, seen)
            parts.append(_attention(part, keys, values, _causal_mask(chunk, seen), self.dropout, False, **self.options))
        return torch.cat(parts, SEQUENCE_DIM)


def _as_computed(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """In the type that attention computes in: nothing wider is sent."""
    kind = key.device.type
    if not torch.is_autocast_enabled(kind) or key.dtype == torch.float64:
        return key, value
    dtype = torch.get_autocast_dtype(kind)
    return key.to(dtype), value.to(dtype)


def _gathered(span: SequenceSpan, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Whole keys and values `[b, heads, s, d]` in one message."""
    if key.shape != value.shape or key.dtype != value.dtype:
        return gather_sequence(key, span, key.dim() - 2), gather_sequence(value, span, value.dim() - 2)
    both = gather_sequence(torch.stack((key, value)), span, key.dim() - 1)
    return both[0], both[1]
