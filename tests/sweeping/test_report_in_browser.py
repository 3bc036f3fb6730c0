"""The report in a real browser, at a desk and on a phone, light and dark: a silent console, no requests, nothing cut off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybrid_strategy.sweeping.book import Book
from hybrid_strategy.sweeping.layouts import Skipped
from hybrid_strategy.sweeping.points import Point
from hybrid_strategy.sweeping.results import write_results
from tests.support.browser import BROWSER, browser
from tests.support.sweep_points import ended_point

_LONG = "x" * 90
_NASTY = "<script>alert('1')</script>&amp;\"größe\"学習"

_LOOK = """(() => {
  const wide = document.documentElement.clientWidth, drawn = [];
  for (const svg of document.querySelectorAll('svg')) {
    const frame = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll('text')].map(each => [each, each.getBoundingClientRect()]);
    texts.forEach(([one, a], index) => {
      const square = (one.closest('g')?.querySelector('rect') ?? svg).getBoundingClientRect();
      if (a.left < square.left || a.right > square.right || a.bottom > frame.bottom) drawn.push('cut: ' + one.textContent);
      for (const [other, b] of texts.slice(index + 1))
        if (a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom)
          drawn.push(one.textContent + ' over ' + other.textContent);
    });
  }
  const outside = [...document.querySelectorAll('body *')]
    .filter(each => !each.closest('.scroll *') && each.getBoundingClientRect().right > wide + 0.5)
    .map(each => each.outerHTML.slice(0, 80));
  const letters = [...document.querySelectorAll('svg text')].map(each => each.getBoundingClientRect().height);
  return {drawn, outside, width: document.documentElement.scrollWidth, smallest: Math.min(...letters),
    page: getComputedStyle(document.body).backgroundColor, figures: document.querySelectorAll('svg').length,
    scripts: document.scripts.length, bold: document.querySelectorAll('td b').length};
})()"""


def _points(folder: Path) -> tuple[Point, ...]:
    made = [
        ended_point(
            folder,
            f"dp4_tp{tensor}_pp{pipeline}_zero1_m16",
            {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, "ranks": tensor * pipeline, "sharding": "zero1"},
            2.0 + tensor / 1e5,
            tokens_per_second=123_456.0 * tensor * pipeline,
        )
        for tensor in (1, 2, 4, 8)
        for pipeline in (1, 2, 4, 8)
    ]
    made.append(ended_point(folder, f"left_{_LONG}", {"ranks": 8}, 2.5, tokens_per_second=9e9))
    made.append(ended_point(folder, _NASTY.replace("/", ""), {"tensor_parallel_size": 2}, 2.0, tokens_per_second=8e9))
    for state in ("oom", "failed", "timeout", "preempted", "pending"):
        made.append(
            ended_point(folder, state, {}, 2.0, state=state, reason=f"rank 1: {_NASTY} {_LONG}", traceback=_LONG * 9, rank=1)
        )
    return tuple(made)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], dict[str, Any]]:
    if BROWSER is None:
        pytest.skip("there is no browser: chromium is not on PATH")
    folder = tmp_path_factory.mktemp("browser")
    skipped = (
        Skipped(
            f"tp16_{_LONG}", "refused", f"{_NASTY} <b>{_LONG}</b>", {"tensor_parallel_size": 16, "pipeline_parallel_size": 1}
        ),
    )
    book = Book(folder / f"sweep-{_LONG}", _points(folder), skipped, {"command": f"hybrid train -m name={_LONG}{_NASTY}"})
    book.folder.mkdir()
    write_results(book)
    found = {}
    with browser(folder / "profile") as tab:
        for width in (1280, 390):
            for scheme in ("light", "dark"):
                tab.open(book.folder / "report.html", width, scheme)
                looked = tab.value(_LOOK)
                found[width, scheme] = {**looked, "messages": tab.messages, "requests": tab.requests}
    return found


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_readable(seen, width: int, scheme: str):
    found = seen[width, scheme]
    assert found["messages"] == []
    assert [each for each in found["requests"] if not each.startswith("data:")] == found["requests"][:1]
    assert found["width"] <= width, "the page is wider than its window"
    assert found["outside"] == []
    assert found["drawn"] == []
    assert found["smallest"] >= 10, "pixels"
    assert found["figures"] == 4
    assert (found["scripts"], found["bold"]) == (0, 0), "what points are called is text"
    assert found["page"] == {"light": "rgb(253, 253, 252)", "dark": "rgb(20, 23, 26)"}[scheme]
