"""A heat map as inline SVG: a square for each row and column, with its value and a name written into it."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT, _LEFT, _TOP, _EDGE = 112, 64, 70, 40, 8
_LETTERS, _LINES = 14, 2
"""Of a name: what goes into a square."""

_SMALLEST = 0.85
"""The map shrinks so far at most on a narrow screen, else its letters could not be read; then it scrolls in itself."""


@dataclass(frozen=True)
class Cell:
    """One square: `value` gives its shade, None: none; `text` and the name `further` are written into it."""

    row: str
    column: str
    value: float | None
    text: str
    further: str = ""


def heat_map(title: str, row_name: str, column_name: str, cells: Sequence[Cell]) -> str:
    """Rows and columns in the order in which the cells name them."""
    rows, columns = list(dict.fromkeys(each.row for each in cells)), list(dict.fromkeys(each.column for each in cells))
    parts = _heads(row_name, rows, column_name, columns)
    values = [each.value for each in cells if each.value is not None]
    low, span = (min(values), (max(values) - min(values)) or 1.0) if values else (0.0, 1.0)
    for each in cells:
        shade = 0.0 if each.value is None else 0.12 + 0.6 * (each.value - low) / span
        parts.append(_square(each, _LEFT + _WIDTH * columns.index(each.column), _TOP + _HEIGHT * rows.index(each.row), shade))
    width, height = _LEFT + _WIDTH * len(columns) + _EDGE, _TOP + _HEIGHT * len(rows) + _EDGE
    size = f"min-width:{_SMALLEST * width:.0f}px;max-width:{width}px"
    head = f'<svg viewBox="0 0 {width} {height}" style="{size}" role="img" aria-label="{escape(title, quote=True)}">'
    return f'<div class="scroll plain">{head}{"".join(parts)}</svg></div>'


def _heads(row_name: str, rows: Sequence[str], column_name: str, columns: Sequence[str]) -> list[str]:
    parts = [_text(_LEFT + _WIDTH * len(columns) / 2, 14, column_name)]
    parts += [_text(_LEFT + _WIDTH * (index + 0.5), 32, name) for index, name in enumerate(columns)]
    middles = [_TOP + _HEIGHT * (index + 0.5) + 4 for index in range(len(rows))]
    parts += [_text(_LEFT - 8, y, f"{row_name} {name}", anchor="end") for y, name in zip(middles, rows, strict=True)]
    return parts


def _square(cell: Cell, x: int, y: int, shade: float) -> str:
    middle, names = x + _WIDTH / 2, folded(cell.further, _LETTERS, _LINES)
    parts = [
        f'<rect class="cell" x="{x + 2}" y="{y + 2}" width="{_WIDTH - 4}" height="{_HEIGHT - 4}" fill-opacity="{shade:.2f}"/>'
    ]
    parts += [_text(middle, y + (22 if names else _HEIGHT // 2 + 4), cell.text, "strong")] if cell.text else []
    parts += [_text(middle, y + 38 + 14 * index, name, "small") for index, name in enumerate(names)]
    return f"<g><title>{escape(f'{cell.text} {cell.further}'.strip())}</title>{''.join(parts)}</g>"


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "middle") -> str:
    return f'<text{f" class={kind!r}" if kind else ""} x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(text)}</text>'


def folded(text: str, wide: int, lines: int) -> list[str]:
    """A name in lines of so many narrow letters, broken at its marks where it has some; what is left over is cut off.

    >>> folded("dp4_tp2_pp8_zero1_m16", 14, 2), folded("a" * 9, 4, 2)
    (['dp4_tp2_pp8_', 'zero1_m16'], ['aaaa', 'aaa…'])
    """
    made: list[str] = []
    while text and len(made) < lines:
        cut = _fitting(text, wide)
        if cut < len(text) and len(made) == lines - 1:
            return [*made, text[: _fitting(text, wide - 1)] + "…"]
        if cut < len(text):
            cut = max(text.rfind(mark, 0, cut) for mark in "_- ") + 1 or cut
        made.append(text[:cut])
        text = text[cut:]
    return made


def _fitting(text: str, wide: int) -> int:
    """How many characters fit; those of East Asian scripts are twice as wide. At least one does."""
    used = 0
    for index, letter in enumerate(text):
        used += 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        if used > wide:
            return max(1, index)
    return len(text)
