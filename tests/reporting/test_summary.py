"""The closing summary."""

from __future__ import annotations

import io

from hybrid_strategy.reporting.console import make_console
from hybrid_strategy.reporting.summary import Closing, print_summary


def _text(result: dict, command: str = "") -> str:
    stream = io.StringIO()
    print_summary(Closing(result, "/runs/a b/" + "x" * 150, command), make_console(stream))
    return stream.getvalue()


def test_it_tells_quality_speed_and_how_to_go_on():
    result = {
        "steps": 300,
        "seconds": 123.0,
        "first_validation_loss": 8.0,
        "last_validation_loss": 4.0,
        "tokens_per_second": 5123.4,
        "wandb": {"dir": "/runs/a b/wandb/offline-run-1"},
    }
    text = _text(result, "hybrid train name='[x]' resume=/runs/x")
    assert "300 in 2 min 3 s" in text
    assert "8.0000 -> 4.0000 (50.0% of the first)" in text
    assert "5,123" in text
    assert "run folder: /runs/a b/" + "x" * 150 + "\n" in text  # whole, to be copied
    assert "resume: hybrid train name='[x]' resume=/runs/x\n" in text
    assert "wandb sync '/runs/a b/wandb/offline-run-1'" in text


def test_what_is_not_known_is_left_out():
    text = _text({"steps": 3})
    for word in ("validation loss", "tokens/s", "resume", "W&B"):
        assert word not in text


def test_an_online_run_is_a_link_and_a_failed_one_says_why():
    assert "W&B: https://wandb.ai/x" in _text({"wandb": {"url": "https://wandb.ai/x", "dir": "/d"}})
    assert "W&B: not logged: no space" in _text({"wandb": {"problem": "no space"}})


def test_a_run_that_diverged_has_a_summary():
    """As `result.json` holds it: numbers that are not finite are text there."""
    assert "8.0000 -> nan" in _text({"first_validation_loss": 8.0, "last_validation_loss": "nan"})
    assert "nan" in _text({"first_validation_loss": "nan", "last_validation_loss": "nan"})
    assert "0.0000 -> 1.0000" in _text({"first_validation_loss": 0.0, "last_validation_loss": 1.0})
