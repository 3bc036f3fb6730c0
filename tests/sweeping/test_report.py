"""The report of a sweep: one small file that needs nothing else, with all that was found and nothing that a name can break."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hybrid_strategy.files import json_of
from hybrid_strategy.sweeping.book import Book
from hybrid_strategy.sweeping.layouts import Skipped
from hybrid_strategy.sweeping.points import Point
from hybrid_strategy.sweeping.report import page
from hybrid_strategy.sweeping.report.losses import comparable
from hybrid_strategy.sweeping.report.page import report
from hybrid_strategy.sweeping.results import result_rows, write_results
from tests.support.sweep_points import ended_point

_VOID = {"meta", "link", "br", "wbr", "img", "input"}
_NASTY = "<script>alert('1')</script> & \"two\""


class _Tags(HTMLParser):
    """Fails where a tag is closed that is not the one that is open; keeps the text and every address."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.text = ""
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def _page(book: Book) -> _Tags:
    text = report(book)
    tags = _Tags()
    tags.feed(text)
    assert tags.open == []
    assert "script" not in tags.seen
    assert tags.addresses == ["data:,"]
    assert not re.search(r"url\(|@import|https?://", text)
    for drawn in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(drawn)
    assert len(text.encode()) < 300_000
    return tags


def test_what_was_found_stands_in_it(tmp_path: Path):
    points = (
        ended_point(tmp_path, "tp1", {"tensor_parallel_size": 1, "ranks": 1}, 2.0, tokens_per_second=100.0),
        ended_point(tmp_path, "tp2", {"tensor_parallel_size": 2, "ranks": 2}, 2.0005, tokens_per_second=180.0),
        ended_point(tmp_path, "tp4", {"tensor_parallel_size": 4, "ranks": 4}, 2.2, tokens_per_second=300.0),
        ended_point(
            tmp_path, "tp8", {"tensor_parallel_size": 8}, 2.0, state="oom", reason=f"rank 1: {_NASTY}", traceback=_NASTY, rank=1
        ),
    )
    skipped = (Skipped("tp3", "refused", "3 heads " + _NASTY, {"tensor_parallel_size": 3}),)
    book = Book(tmp_path, points, skipped, {"command": f"hybrid train -m name='{_NASTY}'"})
    text = _page(book).text
    assert "Difference from tp1" in text
    assert "Swept: strategy.tensor_parallel_size = 1, 2, 4, 8" in text
    assert "Held fixed: 1,024 tokens a step, seed 1" in text
    assert "Best: tp2" in text, "equal losses: the faster one"
    assert "hybrid train strategy.tensor_parallel_size=2 name=tp2" in text
    assert "90 +100%" in text, "measured beside forecast"
    assert "1 rank 100% (tp1); 2 ranks 90% (tp2); 4 ranks 75% (tp4)" in text
    assert "Outside a band of ±0.1% around tp1: tp4 (+10.0%); 1 inside" in text
    assert text.count(_NASTY) == 4, "reason, traceback, reason of the skipped one, command; as text"
    assert [row["point"] for row in result_rows(book)] == ["tp2", "tp1", "tp4", "tp8", "tp3"]
    write_results(book)
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {"results.csv", "results.json", "report.html"}


def test_it_stays_small_however_many_points_there_are(tmp_path: Path):
    points = tuple(
        ended_point(tmp_path, f"tp{tp}_number-{number}", {"tensor_parallel_size": tp, "ranks": tp}, 2.0 + number / 1000)
        for tp in (1, 2, 4, 8)
        for number in range(60)
    )
    skipped = tuple(Skipped(f"point{number}", "memory", "it does not fit " * 20) for number in range(3000))
    text = _page(Book(tmp_path, points, skipped, {})).text
    assert "40 more points are in results.csv" in text
    assert "2850 more are in results.csv" in text


@pytest.mark.parametrize("count", [0, 1])
def test_a_sweep_with_next_to_nothing_has_a_page(tmp_path: Path, count: int):
    points = tuple(ended_point(tmp_path, "failed", {}, float("nan"), state="failed", reason="why") for _ in range(count))
    text = _page(Book(tmp_path, points, (), {})).text
    assert "No point ended well" in text


def test_losses_are_compared_only_where_they_must_agree(tmp_path: Path):
    one = ended_point(tmp_path, "one", {"sharding": "ddp"}, 2.0)
    two = ended_point(tmp_path, "two", {"sharding": "zero1"}, 2.0)
    assert comparable([one, two]) == ""
    assert comparable([one, ended_point(tmp_path, "three", {"tokens_per_step": 4}, 2.0)]) == "tokens per step is swept"
    rate = {"optimizer.weight_decay": "0.1"}
    other = Point(**{**vars(two), "swept": rate})
    assert comparable([one, other]) == "optimizer.weight_decay is swept"


def test_what_one_point_sets_alone_is_swept_too(tmp_path: Path):
    points = (ended_point(tmp_path, "plain", {}, 2.0), ended_point(tmp_path, "cut", {"sharding": "zero1"}, 2.0))
    assert "Swept: strategy.sharding = zero1, or not given" in _page(Book(tmp_path, points, (), {})).text


def test_a_curve_that_leaves_the_band_has_a_colour_wherever_it_is_ranked(tmp_path: Path):
    losses = [2.0 + number / 1e5 for number in range(8)] + [2.5]
    points = tuple(ended_point(tmp_path, f"p{number}", {}, loss) for number, loss in enumerate(losses))
    text = report(Book(tmp_path, points, (), {}))
    left = re.search(r"<h3>Difference from p0</h3>.*?</figure>", text, re.DOTALL)
    assert left
    assert re.search(r'<li><i class="c\d"></i>p8</li>', left[0])
    assert '<path class="band"' in left[0]
    assert "<title>p0</title>" not in left[0], "the reference is the line at 0"


def test_a_point_that_diverged_has_ended_and_is_the_last(tmp_path: Path):
    for other in (float("nan"), float("-inf")):
        folder = tmp_path / str(other)
        points = (
            ended_point(folder, "diverged", {}, float("nan"), last_validation_loss=str(other)),
            ended_point(folder, "no speed", {}, 2.0, tokens_per_second="nan"),
            ended_point(folder, "fine", {}, 2.0),
        )
        book = Book(folder, points, (), {})
        assert [row["point"] for row in result_rows(book)] == ["fine", "no speed", "diverged"]
        assert not re.search(r"\b(NaN|-?Infinity)\b", json_of(result_rows(book))), "no reader of JSON knows it"
        assert [row["reason"] for row in result_rows(book) if row["point"] == "diverged"] == ["the loss is not finite"]
        assert f"diverged ok 2 {other}" in " ".join(re.sub(r"<[^>]*>", " ", report(book)).split())


def test_a_square_of_the_heat_map_is_its_best_point(tmp_path: Path):
    """Speeds are not known of every model; where they are of none there is no map."""
    two = {"tensor_parallel_size": 2}
    points = (
        ended_point(tmp_path, "late", {}, 2.0, state="timeout", tokens_per_second=9e9),
        ended_point(tmp_path, "good", {}, 2.0, tokens_per_second=None),
        ended_point(tmp_path, "silent", two, 2.0, tokens_per_second=None),
    )
    assert "Speed by layout" not in report(Book(tmp_path, points, (), {}))
    text = report(Book(tmp_path, (*points, ended_point(tmp_path, "fast", two, 2.0, tokens_per_second=5.0)), (), {}))
    assert re.findall(r"<g><title>(.*?)</title>", text)[:2] == ["ok", "5 fast"]


def test_names_have_room_on_every_screen(tmp_path: Path):
    name = "tp2_" + "x" * 60
    points = (ended_point(tmp_path, name, {"tensor_parallel_size": 2}, 2.0), ended_point(tmp_path, "tp1", {}, 2.0))
    text = report(Book(tmp_path, points, (Skipped("tp3", "refused", "why"),), {}))
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    assert len(re.findall(r'<div class="scroll"><table', text)) == text.count("<table") == 2
    assert f'<td class="name">tp2_<wbr>{"x" * 60}</td>' in text
    assert f"<title>100 {name}</title>" in text, "whole, where the square of the heat map has no room for it"
    assert ": rank None" not in text


def _colours(scheme: str) -> dict[str, str]:
    style = (Path(page.__file__).parent / "page.css").read_text()
    light, dark = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    found = re.findall(r"--([\w-]+): (#\w{6})", light + (dark if scheme == "dark" else ""))
    return dict(found)


def _contrast(one: str, other: str, share: float = 1.0, below: str = "#000000") -> float:
    """Of two colours (WCAG 2.2); the second covers a `share` of what is below it."""

    def light(*channels: float) -> float:
        linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05

    def channels(text: str) -> list[float]:
        return [int(text[index : index + 2], 16) / 255 for index in (1, 3, 5)]

    mixed = [share * high + (1 - share) * low for high, low in zip(channels(other), channels(below), strict=True)]
    low, high = sorted((light(*channels(one)), light(*mixed)))
    return high / low


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_can_be_read(scheme: str):
    """4.5 for text and 3 for lines are level AA of WCAG 2.2 (1.4.3, 1.4.11)."""
    colours = _colours(scheme)
    page_colour = colours["page"]
    for name in ("text", "soft", "bad", "good"):
        assert _contrast(colours[name], page_colour) >= 4.5, name
        assert _contrast(colours[name], colours["panel"]) >= 4.5, name
        assert _contrast(colours[name], colours["accent"], 0.12, page_colour) >= 4.5, f"{name} in the winner's row"
    assert _contrast(colours["text"], colours["heat"], 0.72, page_colour) >= 4.5, "in the darkest square"
    for name in ("c0", "c1", "c2", "c3", "c4", "c5", "rest"):
        assert _contrast(colours[name], page_colour) >= 3.0, name
