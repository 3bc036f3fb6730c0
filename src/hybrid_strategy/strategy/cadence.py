"""Which steps are looked at closely: checks that cost something are made there."""

from __future__ import annotations


class Cadence:
    """The steps 1, 2, 4, 8, ... of a run, and the first of each epoch.

    Attributes:
        looks: is the step at hand one of them?
        steps: steps begun since `restart`.
    """

    def __init__(self) -> None:
        self.looks, self.steps = False, 0

    def restart(self) -> None:
        """A run begins."""
        self.looks, self.steps = False, 0

    def looks_at(self, kind: str) -> bool:
        """Is a step of this kind, at hand now, one of them?"""
        return kind == "train" and self.looks

    def begin(self, of_epoch: bool) -> None:
        """A training step begins, on all ranks; `of_epoch`: the first of its epoch.

        >>> cadence, looked = Cadence(), []
        >>> for step in range(1, 10):
        ...     cadence.begin(of_epoch=step == 7)
        ...     looked += [step] * cadence.looks
        >>> looked
        [1, 2, 4, 7, 8]
        """
        self.steps += 1
        self.looks = of_epoch or not self.steps & (self.steps - 1)
