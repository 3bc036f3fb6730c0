"""Does an optimizer still compute the same when its parameters lie in pieces? Found out by trying it on a small one.

An optimizer that works element by element gives two halves of a matrix what it gives the whole. One that factors matrices
(Adafactor), orthogonalises them (Muon) or scales by a parameter's norm (LAMB) does not, and would be silently wrong on pieces.
One that couples parameters (LBFGS) is wrong wherever a rank lacks some of them.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from hybrid_strategy.errors import ConfigError, message
from hybrid_strategy.spec.layout import Layout
from hybrid_strategy.strategy.optimizer_states import check_names

_ELEMENT_BY_ELEMENT = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
_STEPS = 2


def check_optimizers(optimizers: Sequence[Optimizer], layout: Layout, names: Collection[str] = ()) -> None:
    """Refuses optimizers that would compute something else in this layout than on one device, or could not be saved.

    Args:
        names: of all parameters of the un-split model.

    Raises:
        ConfigError: it needs whole parameters, or all of them at once, and the layout splits them; or names clash.
    """
    check_names(names, optimizers)
    dims = _split_dims(layout)
    if not dims and layout.pipeline_parallel_size == 1:
        return
    for optimizer in optimizers:
        kind = type(optimizer)
        if kind.__module__.startswith("torch.optim") and kind.__name__ in _ELEMENT_BY_ELEMENT:
            continue
        found = "parameters together" if kind is LBFGS else _try(optimizer, dims)
        if found is not None:
            raise ConfigError(_refusal(kind.__name__, found, layout))


def _split_dims(layout: Layout) -> tuple[int, ...]:
    """Along which dimensions ranks hold pieces of a matrix."""
    if layout.tensor_parallel_size > 1:
        return (0, 1)
    return (0,) if layout.state_shards > 1 else ()


def _refusal(kind: str, found: str, layout: Layout) -> str:
    rule = f"it needs whole {found}, and ranks of this layout hold pieces"
    if found == "parameters together":
        advice = "Use an optimizer that works element by element (AdamW, SGD), or sharding='ddp' with data parallelism alone"
    else:
        advice = "Use an optimizer that works element by element (AdamW, SGD), or sharding='ddp' without tensor parallelism"
    return message("optimizer", kind, rule, f"The layout is {layout.name}", advice)


def _try(optimizer: Optimizer, dims: tuple[int, ...]) -> str | None:
    """What the optimizer needs whole: `matrices`, `parameters together`, or nothing (`None`)."""
    try:
        for dim in dims:
            if not _same(_result(optimizer, [[0]], None), _result(optimizer, [[0]], dim)):
                return "matrices"
        if not _same(_result(optimizer, [[0, 1]], None), _result(optimizer, [[0], [1]], None)):
            return "parameters together"
    except Exception as error:  # somebody else's optimizer may ask for anything: then its user must know better
        kind = type(optimizer).__name__
        rank_zero_warn(f"{kind} could not be tried on pieces of a parameter ({error}); make sure it works element by element.")
    return None


def _same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(left, right, strict=True))


def _result(optimizer: Optimizer, owners: list[list[int]], split: int | None) -> list[Tensor]:
    """Two matrices after some steps, each optimizer of `owners` having those of its list, in halves along `split` or whole."""
    values: dict[int, list[nn.Parameter]] = {}
    for members in owners:
        parts = {index: _matrix(index, split) for index in members}
        clone = _clone(optimizer, [each for pieces in parts.values() for each in pieces] if split is None else [])
        clones = [clone] if split is None else [_clone(optimizer, [each]) for pieces in parts.values() for each in pieces]
        for step in range(_STEPS):
            for index, pieces in parts.items():
                for piece, gradient in zip(pieces, _halves(_pattern(index + 2 + step), split), strict=True):
                    piece.grad = gradient.clone()
            for each in clones:
                each.step()
        values.update(parts)
    return [torch.cat([each.detach() for each in values[index]], dim=split or 0) for index in sorted(values)]


def _pattern(index: int) -> Tensor:
    return torch.sin(torch.arange(24.0).view(6, 4) * (index + 1.3)) * (index + 1)


def _halves(matrix: Tensor, split: int | None) -> list[Tensor]:
    return [matrix] if split is None else [each.contiguous() for each in matrix.chunk(2, dim=split)]


def _matrix(index: int, split: int | None) -> list[nn.Parameter]:
    return [nn.Parameter(each.clone()) for each in _halves(_pattern(index), split)]


def _clone(optimizer: Optimizer, parameters: list[nn.Parameter]) -> Any:
    """The same optimizer on other parameters; with a rate that is not 0, as a warm-up may begin with."""
    clone = copy.copy(optimizer)
    clone.state = defaultdict(dict)
    group = {key: value for key, value in optimizer.param_groups[0].items() if key not in ("params", "param_names")}
    if isinstance(group.get("lr"), float):
        group["lr"] = 0.1
    clone.param_groups = [{**group, "params": parameters}]
    return clone
