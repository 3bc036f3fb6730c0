"""A sample of the checkpoint benchmarks, so that their commands run and their figures stay what they were."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    """Imports a benchmark as its command would."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))

    def loaded(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return loaded


def test_two_of_the_reshard_matrix(load) -> None:
    matrix = load("reshard_matrix")
    cases = [("dp2_zero3", "pp2_interleaved"), ("tp2_sp", "dp2_zero3")]
    found = matrix.run(cases)
    assert found == dict.fromkeys(cases, "")
    assert matrix.table(found).count("ok") == 2
    assert len(matrix.pairs(None)) >= 144


@pytest.mark.parametrize("only", ["meta.pt altered", "full_in_background"])
def test_a_fault(only: str, load) -> None:
    found = load("fault_injection").run(only)
    assert set(found.values()) <= {""}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_killed_run(load) -> None:
    kill = load("kill_test")
    case = kill.Killed(0, "dp2_zero1", "pp2", True, "committing", "one", 1, 2, 0.004)
    assert kill.run([case]) == {case: ""}


def test_runs_are_drawn_so_that_every_phase_and_victim_comes(load) -> None:
    kill = load("kill_test")
    cases = [kill.Killed.draw(number, 1) for number in range(60)]
    assert {(case.phase, case.who) for case in cases} == {(phase, who) for phase in kill.PHASES for who in kill.VICTIMS}
    assert sum(case.layout != case.then for case in cases) == 30
    assert cases == [kill.Killed.draw(number, 1) for number in range(60)]


def test_ratios_pair_each_save_with_the_steps_before_it(load) -> None:
    stall = load("save_stall")
    quiet, beside = [(1.0, 0)] * 12, [(1.2, 1), (1.1, 1), (1.3, 1)]
    second = [(2.0, 0)] * 12 + [(0.0, -1), (2.2, 2)]
    assert stall.ratios([*quiet, (0.0, -1), *beside, *second]) == pytest.approx([1.2, 1.1])
