"""What `benchmarks/parity.py` makes of a report, and that every layout it names is a preset."""

from __future__ import annotations

import runpy
from pathlib import Path

from torch.utils.data import DataLoader

from tests.support.gate import gate
from tests.support.stacks import Blocks, Rows

ROOT = Path(__file__).resolve().parents[2]
PARITY = runpy.run_path(str(ROOT / "benchmarks" / "parity.py"))


def test_a_report_gives_every_figure() -> None:
    report = gate(Blocks, DataLoader(Rows([3] * 16), batch_size=8), {"sharding": "zero1"}, devices=2)
    found = PARITY["figures"]("dp2_zero1", report.to_dict())
    assert [each["name"] for each in found] == [f"dp2_zero1: {name}" for name in (*PARITY["GOALS"], "same")]
    weights, loss, gradients, same = (each["value"] for each in found)
    assert (weights, same) == (0, 1)
    assert 0 <= loss <= 1e-6
    assert 0 <= gradients <= 1e-5


def test_every_layout_is_a_preset() -> None:
    assert [name for name in PARITY["LAYOUTS"] if not (ROOT / "conf" / "strategy" / f"{name}.yaml").is_file()] == []
