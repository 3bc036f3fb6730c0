"""Compares the records of a layout with those of one process, tensor by tensor."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hybrid_strategy.errors import RunError, message
from hybrid_strategy.parity.clues import Clue, clue_of, fit
from hybrid_strategy.parity.files import CLIPPED, GRADIENTS, INITIAL, WEIGHTS
from hybrid_strategy.parity.noise import Noise
from hybrid_strategy.parity.records import Piece, RunRecord, Whole, difference, distance, put_together
from hybrid_strategy.parity.request import ParityRequest
from hybrid_strategy.parity.tally import LOSS, NORM, OWNERS, REPLICAS, Miss, Place, Tally
from hybrid_strategy.parity.tolerance import tolerance_of

_FLOOR = 0.1
"""A tensor is held to its factor where its largest gradient is above this share of what an element may be off."""

_ERRORS = 6.0
"""Standard errors that a factor may lie off 1 where the rest of the tensor is noise."""

_MANY = 16
"""Elements that a tensor must have for its factor to be told from noise."""

_TELLING = 10.0
"""A wrong factor shows in tensors whose largest element is so many times what it may be off."""


class Comparison:
    """Compares two runs of one request; what it finds is in `tally`.

    Raises:
        RunError: the runs did not take the same number of steps.
    """

    def __init__(self, request: ParityRequest, reference: RunRecord, layout: RunRecord) -> None:
        self.reference, self.layout = reference, layout
        self.bounds, self.sizes = tolerance_of(request.precision), request.layout
        self.steps = min(reference.num_steps, layout.num_steps)
        self.tally = Tally()
        if self.steps == 0 or reference.num_steps != layout.num_steps:
            rule = "both runs must take the same optimizer steps"
            numbers = f"one process finished {reference.num_steps}, the layout {layout.num_steps}"
            raise RunError(message("steps", request.steps, rule, numbers, "Check the data and its limits"))
        self._clips_by_value = request.options.trainer.get("gradient_clip_algorithm") == "value"
        self._scales = self._largest_gradients()

    def run(self) -> None:
        """Compares everything there is."""
        shared = self._compare_names()
        for step in range(self.steps):
            self._compare_numbers(step)
        for index, name in enumerate(self.reference.names):
            if name in shared:
                self._compare_tensor(index, name)

    def _largest_gradients(self) -> dict[tuple[str, int], float]:
        """(kind, step) -> the largest gradient of the whole model in one process.

        Clipping by value shortens the large gradients and leaves the small ones as far apart as they were, so there it is the
        largest before.
        """
        scales = {}
        for step in range(self.steps):
            scales[GRADIENTS, step] = self._largest(GRADIENTS, step)
            if self.reference.ranks[0].steps[step]["clipped"]:
                kind = GRADIENTS if self._clips_by_value else CLIPPED
                scales[CLIPPED, step] = self._largest(kind, step)
        return scales

    def _largest(self, kind: str, step: int) -> float:
        values = (self.reference.whole(name, kind, step).value for name in self.reference.names)
        return max((_reach(each) for each in values if each is not None), default=0.0)

    # ------------------------------------------------------------------------------------------------ names and numbers

    def _compare_names(self) -> set[str]:
        """The parameters that both runs have; what only one has is a miss."""
        want, got = self.reference.names, self.layout.names
        for index, name in enumerate(want):
            if name not in got:
                self._miss(Place(-1, INITIAL, index, name), float("inf"), 0.0, Clue(name, absent=True))
        for name in got:
            if name not in want:
                self._miss(Place(-1, INITIAL, len(want), name), float("inf"), 0.0, Clue(name, extra=True))
        return set(want) & set(got)

    def _compare_numbers(self, step: int) -> None:
        """Loss of every batch and gradient norm, as every rank has them."""
        losses = next(iter(self.reference.losses(step)))[1]
        for _, own in self.layout.losses(step):
            if len(own) != len(losses):
                rule, numbers = "both runs must read the same number of batches in a step", f"one process read {len(losses)}"
                raise RunError(message("batches", len(own), rule, numbers, "Check the length of the data"))
            for want, got in zip(losses, own, strict=True):
                self._compare_number(Place(step, LOSS), want, got, self.bounds.loss)
        norm = next(iter(self.reference.norms(step)))[1]
        for _, value in self.layout.norms(step):
            self._compare_number(Place(step, NORM), norm, value, self.bounds.norm)

    def _compare_number(self, place: Place, want: float, got: float, bound: float) -> None:
        apart = difference(torch.tensor(got, dtype=torch.float64), torch.tensor(want, dtype=torch.float64))
        relative = apart / abs(want) if want else apart
        self.tally.add(place.kind, relative, bound)
        if not relative <= bound:
            self._miss(place, relative, bound, Clue(place.kind, ratio=got / want if want else None))

    # --------------------------------------------------------------------------------------------------------- tensors

    def _compare_tensor(self, index: int, name: str) -> None:
        before = self._compare_initial(index, name)
        noise = Noise.over(before)
        for step in range(self.steps):
            used = self._compare_gradient(Place(step, GRADIENTS, index, name))
            if (CLIPPED, step) in self._scales:
                used = self._compare_gradient(Place(step, CLIPPED, index, name))
            if used is not None:
                noise.add_gradients(*used)
            before = self._compare_weight(Place(step, WEIGHTS, index, name), before, noise)

    def _compare_initial(self, index: int, name: str) -> Tensor:
        """Bit for bit, in the same precision, every element owned once. Returns the value in one process."""
        want, got = _value(self.reference.whole(name, INITIAL)), self.layout.whole(name, INITIAL)
        place = Place(-1, INITIAL, index, name)
        apart = _furthest(got, want)
        self.tally.add(INITIAL, apart, 0.0)
        if apart or not got.is_complete:
            self._miss(place, apart, 0.0, clue_of(got, want, 0.0, self.sizes))
        elif _value(got).dtype != want.dtype:
            self._miss(place, 0.0, 0.0, Clue(name, dtypes=(str(_value(got).dtype), str(want.dtype))))
        owners = self.layout.owners(name)
        wrong = float((owners - 1).abs().max()) if owners.numel() else 0.0
        self.tally.add(OWNERS, wrong, 0.0)
        if wrong:
            self._miss(Place(-1, OWNERS, index, name), wrong, 0.0, Clue(name, owners=(int(owners.min()), int(owners.max()))))
        return want

    def _compare_gradient(self, place: Place) -> tuple[Tensor, Tensor] | None:
        """Returns the gradient in one process and in the layout, where both are there."""
        name = str(place.parameter)
        want, got = self.reference.whole(name, place.kind, place.step).value, self.layout.whole(name, place.kind, place.step)
        if want is None:
            if got.value is not None:
                self._miss(place, float("inf"), 0.0, Clue(name, extra=True))
            return None
        scale = self._scales[place.kind, place.step]
        bound = self.bounds.gradient * scale
        apart = _furthest(got, want) if got.is_complete else float("inf")
        self._add(place, apart, bound, scale)
        off = self._factor_is_off(got, want, bound)
        if not apart <= bound or off:
            self._miss(place, _relative(apart, scale), self.bounds.gradient, clue_of(got, want, bound, self.sizes))
        elif _reach(want) > _TELLING * bound:
            self.tally.tell(place)
        self._compare_copies(place, got, want, (self.bounds.replica * scale, scale))
        return (want, got.value) if got.value is not None and got.is_complete else None

    def _factor_is_off(self, got: Whole, want: Tensor, bound: float) -> bool:
        """Is a tensor of small gradients right element by element and yet wrong by a factor?"""
        if got.value is None or want.numel() < _MANY or _reach(want) <= _FLOOR * bound:
            return False
        found = fit(got.value, want)
        return found is not None and abs(found.ratio - 1.0) > self.bounds.ratio + _ERRORS * found.error

    def _compare_weight(self, place: Place, before: Tensor, noise: Noise) -> Tensor:
        """Returns the weight after the step in one process."""
        name = str(place.parameter)
        want, got = _value(self.reference.whole(name, WEIGHTS, place.step)), self.layout.whole(name, WEIGHTS, place.step)
        noise.add_move(max(difference(before, want), _furthest(got, before)))
        allowed = noise.allowed + self.bounds.weight * _reach(want)
        apart, bound = _worst(got, want, allowed)
        self.tally.add(WEIGHTS, apart, bound)
        if not apart <= bound or not got.is_complete:
            self._miss(place, apart, bound, self._update_clue(got, want, before, allowed))
        elif difference(before, want) > _TELLING * _reach(allowed):
            self.tally.tell(place)
        self._compare_copies(place, got, want, (_reach(allowed), _reach(want)))
        return want

    def _update_clue(self, got: Whole, want: Tensor, before: Tensor, allowed: Tensor) -> Clue:
        """The clue of what the optimizer did, not of where it ended: a wrong learning rate is a factor of the former."""
        moved = [Piece(p.rank, p.spec, None if p.value is None else p.value.double() - before[p.spec.slices]) for p in got.pieces]
        return clue_of(put_together(got.name, moved), want.double() - before.double(), allowed, self.sizes)

    def _compare_copies(self, place: Place, got: Whole, want: Tensor, limits: tuple[float, float]) -> None:
        """Ranks that hold the same elements; `limits`: how far they may lie apart, and what that is relative to."""
        if not got.has_copies:
            return
        bound, scale = limits
        apart, allowed = _relative(got.spread, scale), _relative(bound, scale)
        self.tally.add(REPLICAS, apart, allowed)
        if not got.spread <= bound:
            found = replace(place, kind=REPLICAS)
            self._miss(found, apart, allowed, clue_of(got, want, bound / 2, self.sizes))

    def _add(self, place: Place, apart: float, bound: float, scale: float) -> None:
        self.tally.add(place.kind, _relative(apart, scale), _relative(bound, scale))

    def _miss(self, place: Place, apart: float, bound: float, clue: Clue) -> None:
        self.tally.miss(Miss(place, apart, bound, clue))


def _value(whole: Whole) -> Tensor:
    if whole.value is None:
        raise RunError(message(whole.name, None, "no rank wrote its value down", "", "Run the check again"))
    return whole.value


def _furthest(got: Whole, want: Tensor) -> float:
    """Largest difference of any rank's piece from what one process has."""
    return max((difference(each.value, want[each.spec.slices]) for each in got.pieces if each.value is not None), default=0.0)


def _worst(got: Whole, want: Tensor, allowed: Tensor) -> tuple[float, float]:
    """The difference, and what is allowed there, at the element furthest from its bound; the least where all are equal."""
    worst = (0.0, 1.0)
    for piece in got.pieces:
        if piece.value is None or not piece.value.numel():
            continue
        where = piece.spec.slices
        apart = distance(piece.value, want[where])
        share = torch.where(apart > 0, apart / allowed[where], torch.zeros_like(apart)).flatten()
        index = int(share.argmax())
        found = float(apart.flatten()[index]), float(allowed[where].flatten()[index])
        if found[0] * worst[1] > worst[0] * found[1]:
            worst = found
    return worst if worst[0] else (0.0, float(allowed.min()) if allowed.numel() else 0.0)


def _reach(tensor: Tensor) -> float:
    """The largest absolute value."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _relative(value: float, scale: float) -> float:
    return value / scale if scale else value
