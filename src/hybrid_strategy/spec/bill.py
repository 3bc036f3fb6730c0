"""The communication bill: what one rank sends in a step, by axis and collective, and how much of it is not hidden."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
LEVELS = ("none", "intra_node", "inter_node")


@dataclass(frozen=True)
class BillLine:
    """One kind of message in a step of one rank.

    Attributes:
        axis: the mesh axis it runs along, e.g. `tensor_parallel`.
        what: what is moved, in words.
        collective: one of `COLLECTIVES`.
        group_size: ranks that take part.
        level: the slowest kind of link it crosses, one of `LEVELS`.
        calls: messages of one step.
        payload_bytes: size of the whole tensor of one call.
        sent_bytes: what this rank sends in the step, all calls together.
        seconds: all calls together, as if nothing were overlapped.
        exposed_seconds: the part during which this rank computes nothing.
        formula, source: of `sent_bytes`.
    """

    axis: str
    what: str
    collective: str
    group_size: int
    level: str
    calls: float
    payload_bytes: float
    sent_bytes: float
    seconds: float
    exposed_seconds: float
    formula: str
    source: str

    @property
    def overlapped_seconds(self) -> float:
        return self.seconds - self.exposed_seconds


@dataclass(frozen=True)
class CommunicationBill:
    """All lines of the rank that communicates most."""

    lines: tuple[BillLine, ...]

    @property
    def sent_bytes(self) -> float:
        return sum(line.sent_bytes for line in self.lines)

    @property
    def seconds(self) -> float:
        return sum(line.seconds for line in self.lines)

    @property
    def exposed_seconds(self) -> float:
        return sum(line.exposed_seconds for line in self.lines)

    def along(self, axis: str) -> tuple[BillLine, ...]:
        """The lines of one mesh axis."""
        return tuple(line for line in self.lines if line.axis == axis)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "sent_bytes": self.sent_bytes,
            "seconds": self.seconds,
            "exposed_seconds": self.exposed_seconds,
            "lines": [vars(line) for line in self.lines],
        }
