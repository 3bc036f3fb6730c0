"""The backward pass in two halves, for zero-bubble schedules (arXiv:2401.10241 section 2).

The gradient of a linear layer's weight needs two tensors: the layer's input and the gradient of its output. While a table with
weight passes is played, `F.linear` is a function whose backward pass puts these two aside; the weight pass multiplies them. All
other gradients are made in the first half, which is an ordinary backward pass and goes through the graph once: those of inputs,
and of weights that cost little (norms, biases, embeddings) or are not used by `F.linear` (convolutions, products written out).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import has_torch_function

_linear = F.linear


@dataclass
class WeightWork:
    """What is left to do for a stage and micro-batch after its input half.

    Attributes:
        products: weights `[out, in]` of linear layers with the input `[.., in]` and the gradient `[.., out]` of each use.
        outputs: what is still to be differentiated as a whole, with `gradients`.
    """

    products: list[tuple[nn.Parameter, Tensor, Tensor]] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)


_open: list[WeightWork] = []
"""Where products are put aside; a list and not of one thread, because autograd has a thread for each GPU."""


def backward_input(outputs: list[Tensor], gradients: list[Tensor | None], inputs: list[Tensor]) -> WeightWork:
    """Gradients of `inputs` (into their `.grad`). Where no input wants one, as on the first stage, all is left for later."""
    if not outputs or not inputs:
        return WeightWork(outputs=outputs, gradients=gradients)
    work = WeightWork()
    _open.append(work)
    try:
        # told what is wanted, autograd leaves alone the weights that get nothing yet, and the hooks on them
        torch.autograd.backward(outputs, gradients, inputs=_leaves(outputs))
    finally:
        _open.pop()
    return work


def _leaves(outputs: list[Tensor]) -> list[Tensor]:
    """What `outputs` depend on, but for weights that are used in nothing but products that can be put aside."""
    todo: list[Any] = [output.grad_fn for output in outputs]
    seen: set[Any] = set()
    leaves: dict[int, Tensor] = {id(output): output for output in outputs if output.grad_fn is None}
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            leaves[id(node.variable)] = node.variable
        aside = getattr(node, "can_wait", False)
        todo += [each for index, (each, _) in enumerate(node.next_functions) if not (aside and index == _WEIGHT)]
    return list(leaves.values())


def backward_weight(work: WeightWork, coming: Callable[[nn.Parameter], None] = lambda weight: None) -> None:
    """Gradients of the weights, added to their `.grad`; `coming` is told of each that waited, in a backward pass's order."""
    if work.outputs:
        torch.autograd.backward(work.outputs, work.gradients)
    of_weight: dict[nn.Parameter, list[tuple[Tensor, Tensor]]] = {}
    for weight, x, gradient in work.products:
        of_weight.setdefault(weight, []).append((x, gradient))
    work.products.clear()
    while of_weight:  # what has been multiplied is given up
        weight = next(iter(of_weight))
        coming(weight)
        first, *others = (_product(x, gradient).to(weight.dtype) for x, gradient in of_weight.pop(weight))
        torch.autograd.backward(weight, sum(others, first))  # through hooks on the weight, once


def _product(x: Tensor, gradient: Tensor) -> Tensor:
    """`[.., in]`, `[.., out]` -> the gradient `[out, in]`."""
    return gradient.reshape(-1, gradient.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


@contextmanager
def weights_later(wanted: bool) -> Iterator[None]:
    """Meanwhile gradients of linear layers' weights can be put aside; around forward and backward passes, which may recompute."""
    before: Callable[..., Tensor] = F.linear
    F.linear = _splittable if wanted else before
    try:
        yield
    finally:
        F.linear = before


def _splittable(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, with its argument names."""
    leaf = isinstance(weight, nn.Parameter) and weight.requires_grad and torch.is_grad_enabled()
    # where the input wants no gradient, the first half would not come by
    if not leaf or not input.requires_grad or has_torch_function((input, weight)):
        return _linear(input, weight, bias)
    kind = input.device.type
    if torch.is_autocast_enabled(kind) and input.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        input, bias = input.to(dtype), None if bias is None else bias.to(dtype)
    result: Tensor = _Linear.apply(input, weight, bias)  # type: ignore[no-untyped-call]
    return result


_WEIGHT = 1
"""Its place among the inputs of `_Linear`."""


class _Linear(torch.autograd.Function):
    """Differentiable twice where nothing is put aside, such as for a penalty on gradients within the step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight  # recomputation would hand out a copy
        ctx.can_wait = True
        return _linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        later = None
        if of_weight and _open:
            _open[-1].products.append((ctx.weight, x, gradient))
        elif of_weight:
            later = _product(x, gradient).to(weight.dtype)
        into_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0) if of_bias else None
        return gradient @ weight.to(gradient.dtype) if of_x else None, later, into_bias
