"""One point as a row: what its folder says of it, whether it waits, runs or has ended."""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import isfinite
from typing import Any

from hybrid_strategy.files import as_number, read_json
from hybrid_strategy.sweeping import states
from hybrid_strategy.sweeping.attempts import STATUS_FILE, read_state
from hybrid_strategy.sweeping.causes import consequence_only, failed_rank
from hybrid_strategy.sweeping.points import Point

RESULT_FILE = "result.json"


@dataclass(frozen=True)
class Row:
    """What tables, lines and reports say of a point. None: not known (yet)."""

    name: str
    state: str
    note: str = ""
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    forecast_difference: float | None = None
    peak_memory_bytes: float | None = None
    seconds: float | None = None
    seconds_left: float | None = None


def row_of(point: Point) -> Row:
    """Reads the point's folder. A rank's failure shows at once, before its peers have been ended."""
    state = read_state(point.folder)
    status, result = read_json(point.folder / STATUS_FILE) or {}, read_json(point.folder / RESULT_FILE) or {}
    word, note = state.state, state.reason
    if word == states.RUNNING and not consequence_only(point.folder, point.resources.world_size):
        cause = failed_rank(point.folder, point.resources.world_size)
        if cause is not None:
            word, note = cause.state, cause.reason
    if state.requeues and not note:
        note = f"requeued {state.requeues} x"
    ended = word in states.ENDED
    speed = _number(result.get("tokens_per_second") if ended else None, status.get("tokens_per_second"))
    speed = speed if speed is not None and isfinite(speed) else None
    loss = _number(result.get("last_validation_loss"), status.get("loss"))
    if not note and loss is not None and not isfinite(loss):
        note = "the loss is not finite"
    return Row(
        name=point.name,
        state=word,
        note=note,
        step=_whole(result.get("steps") if word == states.OK else status.get("step")),
        total_steps=_whole(status.get("total_steps")),
        loss=loss,
        tokens_per_second=speed,
        forecast_difference=difference(point, speed),
        peak_memory_bytes=_number(result.get("peak_memory_bytes"), status.get("peak_memory_bytes")),
        seconds=state.seconds(time.time()),
        seconds_left=_number(status.get("seconds_left")) if word == states.RUNNING else None,
    )


def difference(point: Point, tokens_per_second: float | None) -> float | None:
    """Measured speed over the forecast one, less 1; None where there is no forecast, or one that is a guess."""
    expected = None if point.facts.get("forecast_doubt") else point.facts.get("forecast_tokens_per_second")
    return tokens_per_second / expected - 1 if tokens_per_second and expected else None


def _number(*values: Any) -> float | None:
    return next((number for number in map(as_number, values) if number is not None), None)


def _whole(value: Any) -> int | None:
    return int(value) if isinstance(value, (int, float)) else None
