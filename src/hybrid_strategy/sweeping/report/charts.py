"""Lines over linear axes as inline SVG. Colours are the page's, so that they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 14, 14, 44
_PALETTE = 6
"""Colours that are told apart; further lines are grey, and have their names in a tooltip."""

XY = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One curve. `number` is its colour, None: grey; `dashed`: a reference rather than a measurement."""

    name: str
    points: tuple[XY, ...]
    number: int | None = None
    dashed: bool = False
    dots: bool = False


@dataclass(frozen=True)
class Chart:
    """What is drawn. `band`: (x, low, high) of an area behind the lines; `x_ticks` where they are not to be chosen."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    band: tuple[tuple[float, float, float], ...] = ()
    x_ticks: tuple[tuple[float, str], ...] = ()
    from_zero: bool = False


def colour(number: int | None) -> str:
    """The class of a line's colour."""
    return f"c{number}" if number is not None and number < _PALETTE else "c-rest"


def line_chart(chart: Chart) -> str:
    """The chart with its axes and, where there are few lines, their names below."""
    every = [point for line in chart.lines for point in line.points]
    every += [(x, y) for x, low, high in chart.band for y in (low, high)]
    if not every:
        return ""
    (x_low, x_high), (y_low, y_high) = _range([x for x, _ in every]), _range([y for _, y in every])
    y_low = 0.0 if chart.from_zero else y_low
    place = _Place(x_low, x_high, y_low, y_high)
    parts = [*_grid(place, chart), *_band(place, chart.band)]
    parts += [_line(place, line) for line in sorted(chart.lines, key=lambda line: line.number is not None)]
    return _framed(chart.title, parts) + _legend(chart.lines)


@dataclass(frozen=True)
class _Place:
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - _TOP - _BOTTOM)


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = (high - low) * 0.04 or abs(high) * 0.05 or 1.0
    return low - room, high + room


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers between two others.

    >>> ticks(0.3, 4.9)
    [1.0, 2.0, 3.0, 4.0]
    """
    rough = (high - low) / most
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * each for each in (1, 2, 5, 10) if size * each >= rough)
    first = math.ceil(low / step)
    return [round(number * step, 12) for number in range(first, math.floor(high / step) + 1)]


def short(value: float) -> str:
    """A number beside an axis.

    >>> short(12_500), short(2_000_000), short(0.25), short(3.0)
    ('12.5k', '2M', '0.25', '3')
    """
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


def _grid(place: _Place, chart: Chart) -> list[str]:
    parts = []
    for value in ticks(place.y_low, place.y_high):
        y = place.y(value)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(value)}</text>')
    given = chart.x_ticks or tuple((value, short(value)) for value in ticks(place.x_low, place.x_high))
    for value, text in given:
        parts.append(f'<text x="{place.x(value):.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{escape(text)}</text>')
    parts.append(f'<path class="axis" d="M{_LEFT} {_TOP}V{HEIGHT - _BOTTOM}H{WIDTH - _RIGHT}"/>')
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(chart.x_label)}</text>')
    half = (_TOP + HEIGHT - _BOTTOM) / 2
    turned = f'transform="rotate(-90 14 {half:.0f})"'
    parts.append(f'<text x="14" y="{half:.0f}" text-anchor="middle" {turned}>{escape(chart.y_label)}</text>')
    return parts


def _band(place: _Place, band: Sequence[tuple[float, float, float]]) -> list[str]:
    if not band:
        return []
    upper = [f"{place.x(x):.1f} {place.y(high):.1f}" for x, _, high in band]
    lower = [f"{place.x(x):.1f} {place.y(low):.1f}" for x, low, _ in reversed(band)]
    return [f'<path class="band" d="M{"L".join([*upper, *lower])}Z"/>']


def _line(place: _Place, line: Line) -> str:
    found = [(place.x(x), place.y(y)) for x, y in line.points]
    style = f'class="line {colour(line.number)}"' + (' stroke-dasharray="5 4"' if line.dashed else "")
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in found)
    dots = "".join(f'<circle class="{colour(line.number)}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in found)
    drawn = f'<path {style} d="M{path}"/>' if len(found) > 1 else ""
    return f"<g><title>{escape(line.name)}</title>{drawn}{dots if line.dots or len(found) == 1 else ''}</g>"


def _legend(lines: Sequence[Line]) -> str:
    named = [line for line in lines if line.number is not None and line.number < _PALETTE]
    rest = sum(line.number is None or line.number >= _PALETTE for line in lines)
    items = [
        f'<li><i class="{colour(line.number)}{" dashed" if line.dashed else ""}"></i>{escape(line.name)}</li>' for line in named
    ]
    items += [f'<li><i class="c-rest"></i>{rest} more</li>'] if rest else []
    return f'<ul class="legend">{"".join(items)}</ul>'


def _framed(title: str, parts: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">'
    return f"{head}{''.join(parts)}</svg>"
