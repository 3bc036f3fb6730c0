"""What a load brought back and what it did not, as data and as lines to print. Nothing is left out in silence."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Certificate:
    """The account of one load.

    Attributes:
        checkpoint: the folder.
        restored: (what, detail) of everything that was brought back.
        not_restored: (what, why) of everything that was not.
        missing: keys asked for that the checkpoint does not have; they keep the values they had.
        unexpected: keys of the checkpoint, in the sections asked for, that nobody asked for.
    """

    checkpoint: str
    restored: tuple[tuple[str, str], ...] = ()
    not_restored: tuple[tuple[str, str], ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        return not (self.not_restored or self.missing or self.unexpected)

    def with_restored(self, what: str, detail: str = "") -> Certificate:
        """With one thing more that was brought back."""
        return replace(self, restored=(*self.restored, (what, detail)))

    def with_not_restored(self, what: str, why: str) -> Certificate:
        """With one thing more that was not."""
        return replace(self, not_restored=(*self.not_restored, (what, why)))

    def lines(self) -> list[str]:
        """For printing; every missing and unexpected name is in it."""
        head = f"Restored from {self.checkpoint}" + (": complete" if self.complete else "")
        body = [f"  restored      {what}{f': {detail}' if detail else ''}" for what, detail in self.restored]
        body += [f"  NOT restored  {what}: {why}" for what, why in self.not_restored]
        body += [f"  MISSING       {key} is not in the checkpoint; it keeps its present value" for key in self.missing]
        body += [f"  UNEXPECTED    {key} is in the checkpoint but has no place here" for key in self.unexpected]
        return [head, *body]
