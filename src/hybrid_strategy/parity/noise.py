"""How far a weight may be off after a step whose gradients were off by so much."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_strategy.parity.records import distance

_AMPLIFIED = 4.0
"""Adam's step is m / sqrt(v): both carry the gradients' difference, over several steps."""

_ROUNDED = 1e-5
"""Share of a tensor's largest move that the optimizer's own arithmetic may be off."""


@dataclass
class Noise:
    """What differences of gradients explain of differences of one weight tensor, element by element.

    An optimizer may blow up a small difference where gradients are small (Adam divides by their size), but it hardly moves a
    weight further than it moves the others of the tensor. So an element may be off by the tensor's largest move, in either run,
    times the relative difference of its gradient, at most twice that move: the step taken the other way.
    """

    apart: Tensor
    power: Tensor
    allowed: Tensor
    steps: int = 0

    @staticmethod
    def over(like: Tensor) -> Noise:
        """Nothing so far, for a tensor of the shape of `like`."""
        nothing = torch.zeros(like.shape, dtype=torch.float64)
        return Noise(nothing, nothing.clone(), nothing.clone())

    def add_gradients(self, want: Tensor, got: Tensor) -> None:
        """The gradients of a step, whole."""
        self.apart = torch.maximum(self.apart, distance(got, want))
        self.power += want.double().square()
        self.steps += 1

    def add_move(self, move: float) -> None:
        """How far the optimizer then moved the weight that it moved most."""
        usual = (self.power / max(self.steps, 1)).sqrt()
        share = torch.where(self.apart > 0, _AMPLIFIED * self.apart / usual, torch.zeros_like(usual)).clamp(max=2.0)
        self.allowed += move * (share + _ROUNDED)
