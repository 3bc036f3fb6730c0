"""Split logits answer every question as the whole tensor would, with the same gradient, and gather only where columns mix."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid_strategy.errors import ModelError
from hybrid_strategy.parallel.tensor.logits import VocabParallelLogits
from hybrid_strategy.parallel.tensor.span import VocabSpan
from hybrid_strategy.spec.shard import even_chunk
from tests.support.collectives import CountCollectives
from tests.support.ranks import run_ranks

BATCH, LENGTH = 3, 4


def make(vocab: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The whole logits, this rank's leaf, the split logits around it, labels of which two are ignored."""
    generator = torch.Generator().manual_seed(4)
    whole = (3 * torch.randn(BATCH, LENGTH, vocab, dtype=torch.float64, generator=generator)).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (BATCH, LENGTH), generator=generator)
    labels[0, 1] = labels[2, 3] = -100
    size, rank = dist.get_world_size(), dist.get_rank()
    span = VocabSpan(dist.group.WORLD, rank, tuple(even_chunk(vocab, size, each)[1] for each in range(size)))
    local = whole.detach()[..., span.start : span.start + span.width].clone().requires_grad_()
    return whole, local, VocabParallelLogits.wrap(local, span), labels


def _loss(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x.flatten(0, 1), y.flatten())


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "flatten": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()),
    "view -1, V": lambda x, y: F.cross_entropy(x.view(-1, x.size(-1)), y.view(-1)),
    "reshape to V by shape": lambda x, y: F.cross_entropy(x.reshape((x.shape[0] * x.shape[1], x.shape[2])), y.reshape(-1)),
    "view rows, -1": lambda x, y: F.cross_entropy(torch.reshape(x, (BATCH * LENGTH, -1)), y.flatten()),
    "float, contiguous": lambda x, y: F.cross_entropy(x.float().contiguous().flatten(0, -2), y.flatten()),
    "to dtype": lambda x, y: F.cross_entropy(x.to(torch.float32).flatten(0, 1), y.flatten()),
    "next token slice": lambda x, y: F.cross_entropy(x[..., :-1, :].contiguous().flatten(0, 1), y[:, 1:].flatten()),
    "slice, column unsaid": lambda x, y: F.cross_entropy(x[:, :-1].reshape(-1, x.shape[-1]), y[:, 1:].reshape(-1)),
    "one row": lambda x, y: F.cross_entropy(x[1, 2], y[1, 2]),
    "last position": lambda x, y: F.cross_entropy(x[:, -1], y[:, -1]),
    "kept rows": lambda x, y: F.cross_entropy(x[y != -100], y[y != -100]),
    "rows by index": lambda x, y: F.cross_entropy(x[:, torch.tensor([2, 0])].flatten(0, 1), y[:, torch.tensor([2, 0])].flatten()),
    "module": lambda x, y: nn.CrossEntropyLoss()(x.flatten(0, 1), y.flatten()),
    "sum": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum") / 7,
    "none": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)[:, :3].sum(),
    "ignore index 0": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.clamp(min=0).flatten(), ignore_index=0),
    "keywords": lambda x, y: F.cross_entropy(input=x.flatten(0, 1), target=y.flatten(), ignore_index=-100),
    "classes second": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "classes second by permute": lambda x, y: F.cross_entropy(x.permute(0, 2, 1), y, reduction="none").mean(),
    "chunks": lambda x, y: sum(
        F.cross_entropy(a.flatten(0, 1), b.flatten()) for a, b in zip(x.split(2), y.split(2), strict=True)
    ),
    "chunk": lambda x, y: sum(
        F.cross_entropy(a.flatten(0, 1), b.flatten()) for a, b in zip(x.chunk(2, 1), y.chunk(2, 1), strict=True)
    ),
    "scaled": lambda x, y: F.cross_entropy((x * 0.5).flatten(0, 1) / 2, y.flatten()),
    "soft cap": lambda x, y: F.cross_entropy((torch.tanh(x / 5.0) * 5.0).flatten(0, 1), y.flatten()),
    "unsqueezed": lambda x, y: F.cross_entropy(x[0].unsqueeze(0).flatten(0, 1), y[0]),
}
"""Losses that are computed on the split logits: the only collective is the gather of two numbers a row."""

GATHERED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax": lambda x, y: x.softmax(-1),
    "log_softmax and nll_loss": lambda x, y: F.nll_loss(F.log_softmax(x.flatten(0, 1), -1), y.flatten()),
    "label smoothing": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), label_smoothing=0.1),
    "weight": lambda x, y: F.cross_entropy(
        x.flatten(0, 1), y.flatten(), weight=torch.linspace(0.5, 1, x.shape[-1], dtype=x.dtype)
    ),
    "probabilities": lambda x, y: F.cross_entropy(x.flatten(0, 1), torch.ones_like(x.flatten(0, 1))),
    "sum": lambda x, y: x.sum(),
    "arithmetic": lambda x, y: (1 - x) * x + torch.arange(x.shape[-1]),
    "scale by tensor": lambda x, y: x * torch.linspace(0, 1, x.shape[-1]),
    "two of them": lambda x, y: torch.cat([x, 2 * x.exp()]) + torch.stack([x, x]).flatten(0, 1),
    "columns": lambda x, y: x[..., 1:3],
    "one column": lambda x, y: x[:, :, 2],
    "new last dimension": lambda x, y: x[..., None],
    "gather": lambda x, y: x.gather(-1, y.clamp(min=0).unsqueeze(-1)),
    "mix all": lambda x, y: x.flatten() * 2,
    "view columns": lambda x, y: x.view(BATCH, -1),
    "unsqueeze last": lambda x, y: x.unsqueeze(-1),
    "einsum": lambda x, y: torch.einsum("bsv,bsv->b", x, x),
    "transposed softmax": lambda x, y: x.transpose(1, 2).softmax(1),
    "split columns": lambda x, y: x.split([1, x.shape[-1] - 1], dim=-1)[1],
    "loop": lambda x, y: torch.stack([row.amax(-1) for row in x]),
    "mse": lambda x, y: F.mse_loss(x, torch.zeros_like(x)),
    "in place": lambda x, y: _in_place(x.clone()),
    "assigned": lambda x, y: _assigned(x.clone()),
    "own function": lambda x, y: _Square.apply(x),
    "dropout of nothing": lambda x, y: F.dropout(x, 0.0),
}
"""Anything else works on the gathered logits."""


def _in_place(x: Tensor) -> Tensor:
    x.div_(2.0)
    x += 1
    return F.softmax(x, dim=-1) * x.shape[-1]


def _assigned(x: Tensor) -> Tensor:
    x[..., 0] = -1e4
    return F.log_softmax(x.flatten(0, 1), dim=-1)[:, 1:]


class _Square(torch.autograd.Function):
    """Reaches the logits without passing torch's public functions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def compare(vocab: int, name: str, operation: Callable[[Tensor, Tensor], Tensor]) -> dict[str, int]:
    """Value, type and gradient of the operation on split and whole logits; returns the collectives it called."""
    whole, local, split, labels = make(vocab)
    expected = operation(whole, labels)
    with CountCollectives() as called:
        got = operation(split, labels)
    assert type(got) is Tensor, (name, type(got))
    assert got.dtype == expected.dtype
    exact = {"rtol": 1e-12, "atol": 1e-12} if expected.dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(got, expected, **exact, msg=lambda text: f"{name}: {text}")
    weights = torch.linspace(0.3, 1.0, expected.numel()).view(expected.shape)
    (expected * weights).sum().backward()
    (got * weights).sum().backward()
    start, width = split.span.start, split.span.width
    torch.testing.assert_close(local.grad, whole.grad[..., start : start + width], **exact, msg=lambda text: f"{name}: {text}")
    return dict(called.counts)


def check_losses(vocab: int) -> None:
    for name, operation in LOSSES.items():
        called = compare(vocab, name, operation)
        losses = 2 if name.startswith("chunk") else 1
        assert called == {"all_gather_into_tensor": losses}, (name, called)


def check_gathered(vocab: int) -> None:
    for name, operation in GATHERED.items():
        called = compare(vocab, name, operation)
        assert set(called) == {"all_gather_into_tensor"}, (name, called)


@pytest.mark.parametrize(("size", "vocab"), [(2, 7), (2, 8), (4, 7), (4, 10)])
def test_losses_without_a_gather(size: int, vocab: int) -> None:
    run_ranks(check_losses, size, vocab)


@pytest.mark.parametrize(("size", "vocab"), [(2, 7), (4, 10)])
def test_everything_else_gathers(size: int, vocab: int) -> None:
    run_ranks(check_gathered, size, vocab)


def check_questions() -> None:
    whole, _, split, _ = make(7)
    assert isinstance(split, Tensor)
    assert torch.is_tensor(split)
    with CountCollectives() as called:
        for ask in (
            lambda x: x.shape,
            lambda x: (x.size(), x.size(-1), x.size(dim=1), len(x)),
            lambda x: (x.dim(), x.ndim, x.numel(), x.stride(), x.is_contiguous()),
            lambda x: (x.dtype, x.device, x.layout, x.requires_grad, x.is_floating_point(), torch.is_floating_point(x)),
            lambda x: (x.detach().requires_grad, x.grad, x.element_size(), x.is_cuda, x.is_meta),
            lambda x: (x.view(-1, 7).shape, x.float().dtype, x.transpose(0, 2).shape, x[:, 1].shape, x.half().shape),
            lambda x: x.flatten(0, 1).requires_grad,
        ):
            assert ask(split) == ask(whole)
        assert repr(split).startswith("VocabParallelLogits(shape=(3, 4, 7), dtype=torch.float64, columns ")
        assert f"{split}" == str(split) == repr(split)
        assert split.grad_fn is None
        assert split.is_leaf
        assert split.view(-1, 7).grad_fn is not None
    assert not called.counts
    assert torch.equal(split.argmax(-1), whole.argmax(-1))
    assert np.array_equal(split.detach().numpy(), whole.detach().numpy())
    assert split.detach().tolist() == whole.tolist()
    assert bool((split == whole).all())
    assert torch.equal(copy.deepcopy(split.detach()), whole)
    assert torch.equal(pickle.loads(pickle.dumps(split.detach())), whole)
    assert torch.equal(split.full_tensor(), whole)
    assert torch.equal(split.detach().cpu(), whole)
    with pytest.raises(ModelError, match="logits is 'data_ptr'"):
        split.data_ptr()


def test_questions_cost_nothing() -> None:
    run_ranks(check_questions, 2)


def check_hooks() -> None:
    whole, local, split, labels = make(7)
    shapes: list[Any] = []
    logits = split * 2.0
    logits.register_hook(lambda grad: shapes.append(grad.shape))
    logits.register_hook(lambda grad: grad * 3.0)
    logits.retain_grad()
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    expected = F.cross_entropy((whole * 2.0).flatten(0, 1), labels.flatten())
    expected.backward()
    start, width = split.span.start, split.span.width
    torch.testing.assert_close(local.grad, 3 * whole.grad[..., start : start + width])
    torch.testing.assert_close(logits.grad.full_tensor(), 1.5 * whole.grad)
    assert shapes == [(3, 4, 7)]


def test_hooks_see_the_gradient_of_the_whole() -> None:
    run_ranks(check_hooks, 2)


def check_full_backward_hook() -> None:
    """torch hangs a node of its own behind the output of such a module."""
    whole, local, split, labels = make(7)

    class Head(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return split.like(x)

    head, seen = Head(), []
    head.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0].shape))
    F.cross_entropy(head(local).flatten(0, 1), labels.flatten()).backward()
    F.cross_entropy(whole.flatten(0, 1), labels.flatten()).backward()
    start, width = split.span.start, split.span.width
    torch.testing.assert_close(local.grad, whole.grad[..., start : start + width])
    assert seen == [(3, 4, 7)]


def test_full_backward_hook() -> None:
    run_ranks(check_full_backward_hook, 2)


def check_precision() -> None:
    """Types as torch has them; values within a rounding of those computed in float64 from the same logits."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for enabled in (False, True):
            whole, local, split, labels = make(7, dtype)
            exact = whole.detach().double().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                like = F.cross_entropy(whole.flatten(0, 1), labels.flatten())
                got = F.cross_entropy(split.flatten(0, 1), labels.flatten())
            expected = F.cross_entropy(exact.flatten(0, 1), labels.flatten())
            assert (got.dtype, local.dtype) == (like.dtype, dtype)
            rounding = {"rtol": 2 * torch.finfo(got.dtype).eps, "atol": 1e-7}
            torch.testing.assert_close(got.double(), expected, **rounding)
            expected.backward()
            got.backward()
            assert local.grad.dtype == dtype
            start, width = split.span.start, split.span.width
            rounding = {"rtol": 2 * torch.finfo(dtype).eps, "atol": torch.finfo(dtype).eps / 10}
            torch.testing.assert_close(local.grad.double(), exact.grad[..., start : start + width], **rounding)


def test_precision() -> None:
    run_ranks(check_precision, 2)


def check_edges() -> None:
    whole, local, split, labels = make(7)
    nothing = torch.full_like(labels, -100).flatten()
    loss = F.cross_entropy(split.flatten(0, 1), nothing)
    loss.backward()
    assert loss.isnan()
    assert torch.equal(local.grad, torch.zeros_like(local))
    huge = split * 1e5
    torch.testing.assert_close(
        F.cross_entropy(huge.flatten(0, 1), labels.flatten()), F.cross_entropy((whole * 1e5).flatten(0, 1), labels.flatten())
    )
    with pytest.raises((IndexError, RuntimeError)):
        F.cross_entropy(split.flatten(0, 1), torch.full((BATCH * LENGTH,), 7))
    with pytest.raises(ValueError, match="batch_size"):
        F.cross_entropy(split.flatten(0, 1), labels.flatten()[1:])
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        split.view(-1, 9)
    with torch.no_grad():
        assert not F.cross_entropy(split.flatten(0, 1), labels.flatten()).requires_grad
    with torch.inference_mode():
        fresh = split.like(local.clone())
        torch.testing.assert_close(fresh.softmax(-1), whole.softmax(-1))
        assert F.cross_entropy(fresh.flatten(0, 1), labels.flatten()).isfinite()


def test_edges() -> None:
    run_ranks(check_edges, 2)


def losses_bits() -> Tensor:
    _, _, split, labels = make(10, torch.float32)
    return F.cross_entropy(split.flatten(0, 1), labels.flatten(), reduction="none").detach()


def test_every_rank_has_the_same_bits() -> None:
    first, *others = run_ranks(losses_bits, 4)
    assert all(torch.equal(first, other) for other in others)


def check_one_rank() -> None:
    _, local, split, _ = make(7)
    assert split is local


def test_one_rank_needs_no_shell() -> None:
    run_ranks(check_one_rank, 1)
