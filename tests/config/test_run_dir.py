"""The run folder: decided once, unique, safe for any name."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_strategy.config.compose import Source, run_config


def test_two_runs_of_one_second_have_two_folders():
    assert len({run_config(Source()).paths.run_dir for _ in range(4)}) == 4


@pytest.mark.parametrize("name", ["a b", "a=b", "a/b", "ü", "$HOME", ".. /x", "#1"])
def test_the_folder_bears_the_name(name: str):
    run_dir = Path(run_config(Source((f'name="{name}"', "paths.output_dir=/tmp/out"))).paths.run_dir or "")
    assert run_dir.parent.parent == Path("/tmp/out")
    assert run_dir.is_absolute()


def test_a_folder_that_is_given_is_taken(tmp_path: Path):
    assert run_config(Source((f"paths.run_dir={tmp_path}/x",))).paths.run_dir == f"{tmp_path}/x"


def test_paths_follow_the_run_folder():
    config = run_config(Source(("paths.run_dir=/tmp/x",)))
    assert config.callbacks["checkpoint"]["dirpath"] == "/tmp/x/checkpoints"
    assert config.logger["csv"]["save_dir"] == config.logger["wandb"]["save_dir"] == "/tmp/x"


def test_hydras_own_interpolations_resolve():
    assert run_config(Source(("tags=['${hydra:job.name}', '${hydra:runtime.output_dir}']", "paths.run_dir=/tmp/x"))).tags == (
        "hybrid",
        "/tmp/x",
    )
