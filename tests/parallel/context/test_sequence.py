"""Split sequences answer every question as the whole would, with the same gradient, and gather only where positions mix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hybrid_strategy.parallel.context.region import ContextRegion
from hybrid_strategy.parallel.context.sequence import SplitSequence
from hybrid_strategy.parallel.context.span import SequenceSpan, balanced_positions
from tests.support.collectives import CountCollectives
from tests.support.ranks import run_ranks

ROWS, LENGTH, WIDTH = 3, 8, 5


def test_every_rank_has_the_same_work_under_a_causal_mask() -> None:
    for size in (2, 3, 4):
        held = balanced_positions(24 * size, size)
        assert torch.equal(torch.cat(held).sort().values, torch.arange(24 * size))
        assert len({int((each + 1).sum()) for each in held}) == 1


def _weight(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


_LABELS = torch.randint(0, WIDTH, (ROWS, LENGTH), generator=torch.Generator().manual_seed(8)).masked_fill(
    torch.arange(LENGTH) == 3, -100
)


def _hooked(x: Tensor) -> Tensor:
    doubled = 2 * x
    doubled.register_hook(lambda grad: grad * 3)
    doubled.register_hook(lambda grad: 2 * _weight(*grad.shape))  # a plain whole, cut to this rank's part
    return doubled


# name -> what is made of the whole; where it is a whole again, at the latest at the end, there is one collective
OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "cross entropy": lambda x: F.cross_entropy(x.view(-1, WIDTH), _LABELS.view(-1)),
    "cross entropy of a transpose": lambda x: F.cross_entropy(x.transpose(1, 2), _LABELS),
    "nll": lambda x: F.nll_loss(x.log_softmax(-1).flatten(0, 1), _LABELS.flatten()),
    "summed": lambda x: F.cross_entropy(x.flatten(0, 1), _LABELS.flatten(), reduction="sum", label_smoothing=0.1),
    "shifted": lambda x: F.cross_entropy(x[:, :-1].reshape(-1, WIDTH), _LABELS[:, 1:].reshape(-1)),
    "sliced": lambda x: x[..., 2:7, :],
    "a stretch that some ranks lack": lambda x: x[:, 3:4],
    "last position": lambda x: x[:, -1],
    "arithmetic": lambda x: 2 * x + x * x / 3 - 1,
    "with a table of positions": lambda x: _weight(LENGTH, WIDTH) + x * _weight(ROWS, LENGTH, 1),
    "linear": lambda x: F.linear(x, _weight(2, WIDTH)),
    "norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "root mean square": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),
    "chosen": lambda x: x.log_softmax(-1).gather(-1, _LABELS.clamp(0).unsqueeze(-1)).squeeze(-1),
    "heads": lambda x: x.unsqueeze(2).transpose(1, 2).permute(0, 2, 1, 3),
    "there and back": lambda x: x.view(ROWS * LENGTH, WIDTH).view(ROWS, LENGTH, WIDTH),
    "mean over positions": lambda x: x.mean(1),
    "sum of all": lambda x: x.sum(),
    "softmax over positions": lambda x: x.softmax(1),
    "boolean mask": lambda x: x[_LABELS >= 0],
    "in place": lambda x: x.clone().mul_(2.0),
    "matrix product": lambda x: x @ _weight(WIDTH, 2),
    "hooks": _hooked,
    "second of two": lambda x: torch.cat((_weight(ROWS, 1, WIDTH), x), 1),
}


def compare_here() -> list[str]:
    """Names of operations whose values, gradients or number of collectives differ."""
    region = ContextRegion(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
    span = SequenceSpan.of(region, LENGTH)
    wrong = []
    for name, operation in OPERATIONS.items():
        whole = _weight(ROWS, LENGTH, WIDTH).requires_grad_()
        local = span.own_part(whole.detach(), 1).requires_grad_()
        wanted = operation(whole)
        with CountCollectives() as counted:
            result = operation(SplitSequence.wrap(local, span))
            plain = result.full_tensor() if isinstance(result, SplitSequence) else result
        (wanted * wanted).sum().backward()
        ((plain * plain).sum() / region.size).backward()
        same = result.shape == wanted.shape and torch.allclose(plain, wanted, rtol=1e-10)
        same_gradient = torch.allclose(local.grad, span.own_part(whole.grad, 1), rtol=1e-10)
        if not same or not same_gradient or sum(counted.counts.values()) != 1:
            wrong.append(f"{name}: values {same}, gradient {same_gradient}, {dict(counted.counts)}")
    return wrong


@pytest.mark.parametrize("size", [2, 4])
def test_operations_are_those_of_the_whole(size: int) -> None:
    assert run_ranks(compare_here, size) == [[]] * size


def questions_here() -> list[Any]:
    region = ContextRegion(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
    local = torch.ones(ROWS, LENGTH // region.size, WIDTH, dtype=torch.float64)
    with CountCollectives() as counted:
        shell = SplitSequence.wrap(local, SequenceSpan.of(region, LENGTH))
        answers = [tuple(shell.shape), shell.size(1), shell.dtype, len(shell), shell.dim(), shell.float().dtype, repr(shell)]
        labels_fit = (shell.argmax(-1) == _LABELS).float()
        answers += [type(labels_fit).__name__, sum(counted.counts.values())]
    answers.append(type(shell.to("meta")).__name__)  # on another device it is whole
    return answers


def test_questions_need_no_collective() -> None:
    shape = (ROWS, LENGTH, WIDTH)
    text = "SplitSequence(shape=(3, 8, 5), dtype=torch.float64, 4 of 8 positions on this rank)"
    wanted = [shape, LENGTH, torch.float64, ROWS, 3, torch.float32, text, "SplitSequence", 0, "Tensor"]
    assert run_ranks(questions_here, 2) == [wanted] * 2
