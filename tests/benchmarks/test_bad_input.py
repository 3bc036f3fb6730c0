"""Bad overrides and sweep files, drawn by chance: one clear error, exit code 2, nothing written, nothing submitted."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")


@pytest.fixture(scope="module")
def bad_input() -> ModuleType:
    sys.path.insert(0, BENCHMARKS)
    try:
        import bad_input
    finally:
        sys.path.remove(BENCHMARKS)
    return bad_input


def test_bad_input_is_refused(bad_input: ModuleType, tmp_path: Path) -> None:
    """A sample; all 200 are `benchmarks/bad_input.py`."""
    wrong = []
    for number, case in enumerate(bad_input.cases(18)):
        problem = bad_input.run(case, tmp_path / str(number))
        if problem:
            wrong.append(f"{case}: {problem}")
    assert not wrong, "\n".join(wrong)


def test_kinds_come_in_turn_and_a_seed_is_a_sample(bad_input: ModuleType) -> None:
    assert len({case.kind for case in bad_input.cases(6)}) == 6
    assert list(bad_input.cases(20, seed=3)) == list(bad_input.cases(20, seed=3))
    assert list(bad_input.cases(20, seed=3)) != list(bad_input.cases(20, seed=4))


def test_something_that_is_right_is_noticed(bad_input: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the figure would be worth nothing: a good input is no bad one."""
    good = bad_input.Case("type", ("hydra/launcher=slurm", "seed=1,2", "hydra.launcher.dry_run=true"))
    assert bad_input.run(good, tmp_path).startswith("exit code 0")
