"""The report of a sweep: one small file that needs nothing else, with all that was found and nothing that a name can break."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hybrid_strategy.sweeping.book import Book
from hybrid_strategy.sweeping.layouts import Skipped
from hybrid_strategy.sweeping.points import Point, Resources
from hybrid_strategy.sweeping.report.losses import comparable
from hybrid_strategy.sweeping.report.page import report
from hybrid_strategy.sweeping.results import result_rows, write_results

_VOID = {"meta", "link", "br", "img", "input"}
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


def _point(folder: Path, name: str, facts: Mapping[str, Any], loss: float, **result: Any) -> Point:
    """A point that has ended, with 40 logged steps whose losses end at `loss`."""
    run = folder / name
    run.mkdir(parents=True)
    state = result.pop("state", "ok")
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "global_batch_size": 8, "tokens_per_step": 1024, "seed": 1}
    known = {**sizes, "precision": "fp32", "layout": name, "forecast_tokens_per_second": 90.0, **facts}
    rows = [f"{step},{loss + (40 - step) / 40}," for step in range(41)]
    (run / "metrics.csv").write_text("\n".join(["step,train_loss,val_loss", *rows, f"40,,{loss}"]) + "\n")
    reached = {"steps": 41, "last_validation_loss": loss, "tokens_per_second": 100.0, **result}
    if state == "ok":
        reached["measured"] = {"step_seconds": 0.5, "bubble_fraction": 0.25}
    (run / "result.json").write_text(json.dumps({"state": state, **reached}))
    (run / "state.json").write_text(json.dumps({"state": state, "reason": result.get("reason", ""), "attempt": 1}))
    swept = {f"strategy.{key}": str(value) for key, value in facts.items() if key in ("tensor_parallel_size", "sharding")}
    ranks = Resources(1, int(facts.get("ranks", 2)))
    known["world_size"] = ranks.world_size
    return Point(name, run, tuple(f"{key}={value}" for key, value in swept.items()), swept, (), ranks, known, "d")


def _page(book: Book) -> _Tags:
    text = report(book)
    page = _Tags()
    page.feed(text)
    assert page.open == []
    assert "script" not in page.seen
    assert page.addresses == ["data:,"]
    assert not re.search(r"url\(|@import|https?://", text)
    for drawn in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(drawn)
    assert len(text.encode()) < 300_000
    return page


def test_what_was_found_stands_in_it(tmp_path: Path):
    points = (
        _point(tmp_path, "tp1", {"tensor_parallel_size": 1, "ranks": 1}, 2.0, tokens_per_second=100.0),
        _point(tmp_path, "tp2", {"tensor_parallel_size": 2, "ranks": 2}, 2.0005, tokens_per_second=180.0),
        _point(tmp_path, "tp4", {"tensor_parallel_size": 4, "ranks": 4}, 2.2, tokens_per_second=300.0),
        _point(
            tmp_path, "tp8", {"tensor_parallel_size": 8}, 2.0, state="oom", reason=f"rank 1: {_NASTY}", traceback=_NASTY, rank=1
        ),
    )
    skipped = (Skipped("tp3", "refused", "3 heads " + _NASTY, {"tensor_parallel_size": 3}),)
    book = Book(tmp_path, points, skipped, {"command": f"hybrid train -m name='{_NASTY}'"})
    text = _page(book).text
    assert "Swept: strategy.tensor_parallel_size = 1, 2, 4, 8" in text
    assert "Held fixed: 1,024 tokens a step, seed 1" in text
    assert "Best: tp2" in text, "equal losses: the faster one"
    assert "hybrid train strategy.tensor_parallel_size=2 name=tp2" in text
    assert "90 +100%" in text, "measured beside forecast"
    assert "1 ranks 100% (tp1); 2 ranks 90% (tp2); 4 ranks 75% (tp4)" in text
    assert "Outside a band of ±0.1% around tp1: tp4 (+10.0%); 1 inside" in text
    assert text.count(_NASTY) == 4, "reason, traceback, reason of the skipped one, command; as text"
    assert [row["point"] for row in result_rows(book)] == ["tp2", "tp1", "tp4", "tp8", "tp3"]
    write_results(book)
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {"results.csv", "results.json", "report.html"}


def test_it_stays_small_however_many_points_there_are(tmp_path: Path):
    points = tuple(
        _point(tmp_path, f"tp{tp}_number-{number}", {"tensor_parallel_size": tp, "ranks": tp}, 2.0 + number / 1000)
        for tp in (1, 2, 4, 8)
        for number in range(60)
    )
    skipped = tuple(Skipped(f"point{number}", "memory", "it does not fit " * 20) for number in range(3000))
    text = _page(Book(tmp_path, points, skipped, {})).text
    assert "40 more points are in results.csv" in text
    assert "2850 more are in results.csv" in text


@pytest.mark.parametrize("count", [0, 1])
def test_a_sweep_with_next_to_nothing_has_a_page(tmp_path: Path, count: int):
    points = tuple(_point(tmp_path, "failed", {}, float("nan"), state="failed", reason="why") for _ in range(count))
    text = _page(Book(tmp_path, points, (), {})).text
    assert "No point ended well" in text


def test_losses_are_compared_only_where_they_must_agree(tmp_path: Path):
    one = _point(tmp_path, "one", {"sharding": "ddp"}, 2.0)
    two = _point(tmp_path, "two", {"sharding": "zero1"}, 2.0)
    assert comparable([one, two]) == ""
    assert comparable([one, _point(tmp_path, "three", {"tokens_per_step": 4}, 2.0)]) == "tokens per step is swept"
    rate = {"optimizer.weight_decay": "0.1"}
    other = Point(**{**vars(two), "swept": rate})
    assert comparable([one, other]) == "optimizer.weight_decay is swept"
