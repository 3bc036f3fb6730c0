"""No secret is in any file of a sweep, in whatever way its points come by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_strategy.cli.main import main

SECRET = "s3cr3t-value"
KEY = ("+logger.mine._target_=builtins.dict", "+logger.mine.api_key=${oc.env:MINE_API_KEY}")
SWEEP = ("train", "-m", "model=llama_tiny", "trainer=cpu", "logger=csv", "name=s", "--config-dir", "own")


@pytest.fixture(autouse=True)
def _in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINE_API_KEY", SECRET)


@pytest.mark.parametrize("launcher", ["local", "slurm"])
@pytest.mark.parametrize("value", ["${logger.mine.api_key}", "${oc.select:logger.mine.api_key}", "${oc.env:MINE_API_KEY}"])
def test_the_launcher_of_one_point_is_no_place_for_one(value: str, launcher: str, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "own" / "experiment"
    folder.mkdir(parents=True)
    (folder / "first.yaml").write_text("# @package _global_\nseed: 1\n")
    (folder / "second.yaml").write_text(f"# @package _global_\nhydra: {{launcher: {{environment: {{MINE: '{value}'}}}}}}\n")
    further = ("hydra.launcher.dry_run=true",) if launcher == "slurm" else ()
    assert main([*SWEEP, *KEY, "experiment=first,second", f"hydra/launcher={launcher}", *further]) == 2
    said = "".join(capsys.readouterr())
    assert "hydra.launcher.environment.MINE is set to a secret" in said
    assert SECRET not in said
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize("sweeper", ["grid", "basic"])
def test_points_of_hydras_own_launchers_are_looked_at_before_hydra_writes_their_files(sweeper, tmp_path, capsys) -> None:
    folder = tmp_path / "own" / "experiment"
    folder.mkdir(parents=True)
    (folder / "first.yaml").write_text("# @package _global_\nseed: 1\n")
    (folder / "second.yaml").write_text(
        f"# @package _global_\nlogger: {{mine: {{_target_: builtins.dict, api_key: {SECRET}}}}}\n"
    )
    assert main([*SWEEP, "experiment=first,second", "hydra/launcher=basic", f"hydra/sweeper={sweeper}", "strategy=nothing"]) == 2
    assert main([*SWEEP, "experiment=first,second", "hydra/launcher=basic", f"hydra/sweeper={sweeper}"]) == 2
    assert "logger.mine.api_key is set to a secret" in capsys.readouterr().err
    assert not list(tmp_path.glob("outputs/**/config.yaml"))
