"""Points of a sweep that have ended, as their folders tell it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid_strategy.sweeping.points import Point, Resources


def ended_point(folder: Path, name: str, facts: Mapping[str, Any], loss: float, **result: Any) -> Point:
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
