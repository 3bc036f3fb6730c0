"""The loss that Lightning calls backward on: its backward hands over the gradients that the schedule has already made.

Lightning's order is training_step -> zero_grad -> backward. A schedule makes its gradients inside training_step, so they are held
aside there; this loss puts them in place when, and with the factor with which, Lightning asks for them. So zero_grad, loss
scaling, accumulation and every hook stay where Lightning has them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, receive: Callable[[Tensor], None]) -> Tensor:
        ctx.receive = receive
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        ctx.receive(gradients[0])
        return None, None, None


def loss_with_hand_over(loss: Tensor, receive: Callable[[Tensor], None]) -> Tensor:
    """A loss equal to `loss` whose backward calls `receive(d)`, `d` being the gradient that arrives at it."""
    anchor = torch.zeros((), device=loss.device, requires_grad=True)
    with torch.enable_grad():
        result: Tensor = _HandOver.apply(anchor, loss.detach(), receive)  # type: ignore[no-untyped-call]
    return result
