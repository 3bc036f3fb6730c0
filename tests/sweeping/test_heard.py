"""Every setting below `hydra` that a launcher of ours would ignore is refused by key; those that it hears are not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybrid_strategy.cli.main import main

RUN = ("train", "model=llama_tiny", "trainer=cpu", "strategy=single", "logger=csv", "name=s", "hydra/launcher=slurm")
DRY = "hydra.launcher.dry_run=true"


@pytest.fixture(autouse=True)
def _in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        ("+hydra.job.env_set.FOO=1", "hydra.job.env_set is .* Set hydra.launcher.environment"),
        ("hydra.job.env_copy=[HOME]", "hydra.job.env_set is .* without hydra.job.env_copy"),
        ("hydra.job.chdir=true", "hydra.job.chdir is True: only Hydra's own launchers hear it. Leave it out"),
        ("hydra.sweep.subdir='x${hydra.job.num}'", "hydra.sweep.subdir is .* Leave it out"),
        ("hydra.output_subdir=mine", "hydra.output_subdir is 'mine': .* Leave it out"),
        ("hydra.run.dir=mine", "hydra.run.dir is 'mine': it is no folder of a sweep. Set hydra.sweep.dir or paths.run_dir"),
    ],
)
def test_what_a_sweep_would_ignore_is_refused(override: str, advice: str, capsys) -> None:
    assert main([*RUN, "-m", "seed=1,2", DRY, override]) == 2
    assert re.search(advice, capsys.readouterr().err)
    assert not Path("outputs").exists()


def test_a_single_run_has_no_folder_of_a_sweep(capsys) -> None:
    assert main([*RUN, DRY, "hydra.sweep.dir=mine"]) == 2
    assert "hydra.sweep.dir is 'mine': it is no folder of a single run. Set hydra.run.dir" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("further", "folder"),
    [
        (("-m", "seed=1,2", "hydra.sweep.dir=mine"), "mine/seed-1"),
        (("-m", "seed=1,2", "paths.run_dir=mine"), "mine/seed-1"),
        (("hydra.run.dir=mine", "hydra.job.chdir=false", "hydra.output_subdir=null"), "mine"),
        (("-m", "seed=1,2", "hydra.job.env_set={}"), "outputs/sweeps/s/seed-1"),
        (("-m", "seed=1,2", "hydra.run.dir=other", "hydra.sweep.dir=mine"), "mine/seed-1"),
        (("hydra.run.dir=mine", "hydra.sweep.dir=other"), "mine"),
    ],
)
def test_what_is_heard_is_taken(further: tuple[str, ...], folder: str, tmp_path: Path, capsys) -> None:
    assert main([*RUN, DRY, *further]) == 0
    assert f"{tmp_path}/{folder}/slurm/job.sh" in capsys.readouterr().out
