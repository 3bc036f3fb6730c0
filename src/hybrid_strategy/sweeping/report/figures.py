"""The figures of the report, each with a sentence that says how to read it; one that has nothing to show is left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from hybrid_strategy.sweeping import states
from hybrid_strategy.sweeping.book import Book
from hybrid_strategy.sweeping.points import Point
from hybrid_strategy.sweeping.report.charts import Chart, Line, line_chart, short
from hybrid_strategy.sweeping.report.heat import Cell, heat_map
from hybrid_strategy.sweeping.report.losses import Band, Curve, band_of, comparable, curves_of, differences
from hybrid_strategy.sweeping.report.scaling import Measured, Scaling, scalings
from hybrid_strategy.sweeping.rows import Row

_PLACES = 5000
"""Places of all loss curves together, in each of the two figures."""

_COLOURED, _COLOURED_OUTSIDE = 6, 3
"""Curves with a colour of their own: the best ones, and so many at most of those that leave the band."""

_TENSOR, _PIPELINE = "tensor_parallel_size", "pipeline_parallel_size"


def figures(best: Sequence[Point], rows: Mapping[str, Row], book: Book) -> list[str]:
    """Heat map, scaling and loss curves.

    Args:
        best: points that ended well, best first.
        rows: of all points by name.
    """
    parts = [_heat(rows, book), *(_scaling(each) for each in scalings(_measured(best, rows))), *_losses(best)]
    shown = [part for part in parts if part]
    return [f'<h2>Figures</h2><div class="charts">{"".join(shown)}</div>'] if shown else []


def _measured(points: Sequence[Point], rows: Mapping[str, Row]) -> list[Measured]:
    speeds = [(point, rows[point.name].tokens_per_second) for point in points]
    return [Measured(point, speed) for point, speed in speeds if speed]


def _figure(title: str, drawn: str, caption: str) -> str:
    return f"<figure><h3>{escape(title)}</h3>{drawn}<figcaption>{caption}</figcaption></figure>"


def _heat(rows: Mapping[str, Row], book: Book) -> str:
    """Speed over tensor x pipeline parallelism, the best of each square; what did not end well says how it ended."""
    cells: dict[tuple[int, int], tuple[float | None, str]] = {}
    for point in sorted(book.points, key=lambda each: _merit(rows[each.name])):
        row, place = rows[point.name], (int(point.facts[_TENSOR]), int(point.facts[_PIPELINE]))
        speed = row.tokens_per_second if row.state == states.OK else None
        cells[place] = (speed, point.name if speed else row.state)
    for each in book.skipped:
        values = {str(key).rpartition(".")[2]: value for key, value in each.values.items()}
        if str(values.get(_TENSOR, "")).isdigit() and str(values.get(_PIPELINE, "")).isdigit():
            cells.setdefault((int(values[_TENSOR]), int(values[_PIPELINE])), (None, each.kind))
    if len(cells) < 2 or not any(speed for speed, _ in cells.values()):
        return ""
    made = [
        Cell(f"{tensor}", f"{pipeline}", *_told(cells.get((tensor, pipeline))))
        for tensor in sorted({each[0] for each in cells})
        for pipeline in sorted({each[1] for each in cells})
    ]
    drawn = heat_map("tokens/s by tensor and pipeline parallel size", "tp", "pipeline parallel size", made)
    return _figure("Speed by layout", drawn, "Tokens/s of the fastest point of each square, with its name; else how it ended.")


def _merit(row: Row) -> tuple[bool, float]:
    """Of a point among those of its square; speeds are not known of every model."""
    well = row.state == states.OK
    return well, row.tokens_per_second or 0.0 if well else 0.0


def _told(cell: tuple[float | None, str] | None) -> tuple[float | None, str, str]:
    if cell is None:
        return None, "", ""
    speed, name = cell
    return (speed, short(float(f"{speed:.3g}")), name) if speed else (None, name, "")


def _scaling(found: Scaling) -> str:
    first = found.sizes[0]
    alone = first.tokens_per_second / first.ranks
    places = {size.ranks: float(index) for index, size in enumerate(found.sizes)}
    lines = [
        Line("measured", tuple((places[each.ranks], each.tokens_per_second) for each in found.sizes), 0, dots=True),
        Line(
            "as many times the smallest", tuple((places[each.ranks], alone * each.ranks) for each in found.sizes), 1, dashed=True
        ),
    ]
    forecast = [(places[each.ranks], each.forecast_tokens_per_second) for each in found.sizes]
    if all(speed for _, speed in forecast):
        lines.append(Line("forecast", tuple((x, float(speed or 0.0)) for x, speed in forecast), 2, dashed=True, dots=True))
    names = tuple((places[each.ranks], str(each.ranks)) for each in found.sizes)
    chart = Chart(f"{found.kind} scaling", "ranks", "tokens/s", tuple(lines), x_ticks=names, from_zero=True)
    words = "; ".join(f"{_ranks(each.ranks)} {each.efficiency:.0%} ({escape(each.name)})" for each in found.sizes)
    caption = f"{escape(found.what)}, the fastest point of each size. Efficiency, speed a rank against the smallest: {words}."
    return _figure(f"{found.kind.capitalize()} scaling", line_chart(chart), caption)


def _ranks(number: int) -> str:
    return f"{number} rank" + ("s" if number > 1 else "")


def _losses(best: Sequence[Point]) -> list[str]:
    """The curves, and where they must agree how far they are from the reference: a band of 0.1 % shows in the second one only."""
    curves, by_tokens = curves_of(best, max(20, min(200, _PLACES // max(1, len(best)))))
    if not curves:
        return []
    why = comparable(best)
    band = None if why else band_of(best, curves)
    colours = _colours(curves, band)
    label = "tokens" if by_tokens else "steps"
    lines = tuple(Line(curve.name, curve.points, colours.get(curve.name)) for curve in curves)
    chart = Chart("training loss", label, "loss", lines, band.points if band else ())
    drawn = [_figure(f"Training loss by {label}", line_chart(chart), _verdict(band, why))]
    return [*drawn, _agreement(curves, band, label, colours)] if band else drawn


def _colours(curves: Sequence[Curve], band: Band | None) -> dict[str, int]:
    """Name -> colour of the curves that have one, the same in both figures."""
    apart = [name for name, _ in band.outside[:_COLOURED_OUTSIDE]] if band else []
    named = dict.fromkeys([*apart, *(curve.name for curve in curves)])
    chosen = set(list(named)[:_COLOURED])
    return {name: number for number, name in enumerate(each.name for each in curves if each.name in chosen)}


def _agreement(curves: Sequence[Curve], band: Band, label: str, colours: Mapping[str, int]) -> str:
    """Every curve as its difference from the reference in percent, over the band."""
    reference = next(curve for curve in curves if curve.name == band.reference)
    found = [(curve.name, differences(curve, reference)) for curve in curves if curve is not reference]
    lines = tuple(Line(name, tuple((x, 100 * off) for x, off in points), colours.get(name)) for name, points in found if points)
    high = 100 * band.tolerance
    area = tuple((x, -high, high) for x in (reference.points[0][0], reference.points[-1][0]))
    chart = Chart("difference of training losses", label, "difference, %", lines, area)
    caption = f"Each curve against that of {escape(band.reference)}, with the band of ±{band.tolerance:.1%}."
    return _figure(f"Difference from {band.reference}", line_chart(chart), caption)


def _verdict(band: Band | None, why: str) -> str:
    if band is None:
        return f"The losses need not agree: {escape(why)}." if why else "Best points first."
    of = f"a band of ±{band.tolerance:.1%} around {escape(band.reference)}"
    if not band.outside:
        return f"Points compute the same in different ways: all other {band.inside} curves lie within {of}."
    left = ", ".join(f"{escape(name)} ({off:+.1%})" for name, off in band.outside[:8])
    more = f" and {len(band.outside) - 8} more" if len(band.outside) > 8 else ""
    return f'<b class="bad">Outside</b> {of}: {left}{more}; {band.inside} inside.'
