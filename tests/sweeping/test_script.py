"""The script of a point: what Slurm is asked for follows from layout and settings; a setting that cannot be is refused."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybrid_strategy.errors import ConfigError
from hybrid_strategy.sweeping.local import local_settings
from hybrid_strategy.sweeping.points import Point, Resources, command_of
from hybrid_strategy.sweeping.settings import LayoutsSettings, LocalSettings, SlurmSettings, settings_of
from hybrid_strategy.sweeping.slurm import commands
from hybrid_strategy.sweeping.slurm.script import script_of
from hybrid_strategy.sweeping.slurm.submission import Submission

POINT = Point("tp2", Path("/here/tp2"), (), {}, (), Resources(2, 4, gpus=True), {}, "d")


def _script(**values: Any) -> list[str]:
    return script_of(POINT, settings_of(SlurmSettings, values, "hydra.launcher"), "s", "a:b").splitlines()


def test_what_the_layout_needs_and_what_the_site_asks_for() -> None:
    lines = _script(
        account="mine",
        partition="gpu",
        qos="long",
        time="1-02:00:00",
        sbatch={"exclusive": True, "exclude": "node[1-2]", "comment": "two words", "nice": None},
        srun=["--container-image=image.sqsh", "--mpi=none x"],
        setup=["module load cuda"],
        environment={"NCCL_DEBUG": "INFO $x", "OF_THE_SITE": None},
        python="/opt/python",
    )
    asked = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    for option in ("--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4", "--time=1560", "--account=mine", "--partition=gpu"):
        assert option in asked
    for option in ("--qos=long", "--exclusive", "--exclude=node[1-2]", '--comment="two words"', "--requeue", "--signal=USR1@120"):
        assert option in asked
    assert not [each for each in asked if "nice" in each]
    assert lines.index("module load cuda") < next(n for n, line in enumerate(lines) if " srun " in line)
    assert {"export NCCL_DEBUG='INFO $x'", "unset OF_THE_SITE"} <= set(lines)
    (started,) = [line for line in lines if " srun " in line]
    assert "--kill-on-bad-exit=1" in started
    assert "--container-image=image.sqsh '--mpi=none x'" in started


def test_what_is_said_in_one_place_only_is_taken_from_there() -> None:
    lines = _script(sbatch={"partition": "b"}, environment={"MASTER_PORT": 29500, "RANK": None}, srun=["--mpi=none", "-l"])
    assert "#SBATCH --partition=b" in lines
    assert "export MASTER_PORT=29500" in lines


@pytest.mark.parametrize("name", ["RANK", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "A=B", ""])
def test_variables_that_a_point_on_this_machine_would_not_see_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^hydra.launcher.environment.{name} is '1': "):
        local_settings({"environment": {name: "1"}})


def test_no_gpus_no_requeues() -> None:
    text = "\n".join(_script(gpu_option=None, max_requeues=0))
    assert "gpus" not in text
    assert "#SBATCH --no-requeue" in text


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"time": 1}, "hydra.launcher.signal_seconds is 120.*The time limit is 60 s. Set 30, or a longer time"),
        ({"max_parallel": 0}, "hydra.launcher.max_parallel is 0: it must be 1 or more"),
        ({"max_requeues": -1}, "hydra.launcher.max_requeues is -1"),
        ({"cpus_per_task": 0}, "hydra.launcher.cpus_per_task is 0"),
        ({"time": "soon"}, "hydra.launcher.time is 'soon'"),
        ({"sbatch": {"--no such": 1}}, "it is no option of sbatch"),
        ({"sbatch": {"nodes": 3}}, "hydra.launcher.sbatch.nodes is 3: the script says it itself.*set strategy and cluster"),
        ({"sbatch": {"--output": "x"}}, "hydra.launcher.sbatch.output is 'x'.*leave it at slurm/batch.log"),
        ({"sbatch": {"gpus-per-node": 1}}, "Set hydra.launcher.gpu_option"),
        ({"environment": {"NOT A NAME": 1}}, "it is no name of a variable"),
        ({"environment": {"A=B": 1}}, "it is no name of a variable"),
        ({"environment": {"RANK": 1}}, "hydra.launcher.environment.RANK is 1: the launcher gives each process its own"),
        (
            {"partition": "a", "sbatch": {"partition": "b"}},
            "sbatch.partition is 'b': the script says it itself.*launcher.partition",
        ),
        ({"cpus_per_task": 2, "sbatch": {"cpus-per-task": 4}}, "Set hydra.launcher.cpus_per_task"),
        ({"sbatch": {"tasks-per-node": 4}}, "set strategy and cluster"),
        ({"srun": ["-N", "3"]}, r"hydra.launcher.srun\[0\] is '-N': .*set strategy and cluster"),
        ({"srun": ["--mpi=none", "--ntasks=3"]}, r"hydra.launcher.srun\[1\] is '--ntasks=3': .*set strategy and cluster"),
        ({"srun": ["-o", "x.log"]}, "leave it at slurm/batch.log"),
        ({"partition": ""}, "hydra.launcher.partition is '': it is empty. Set a value, or hydra.launcher.partition=null"),
        ({"account": 'say "so"'}, "cannot hold line breaks or double quotes"),
    ],
)
def test_what_cannot_be_is_refused_by_name(values: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        _script(**values)


@pytest.mark.parametrize("name", ["two words", "odd $x `y` 'q' ü 5%j", "plain"])
@pytest.mark.parametrize("array", [True, False])
def test_every_option_of_every_script_is_one_word_whatever_the_name(
    name: str, array: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "submit", lambda script, options=(): "7")
    points = [replace(POINT, name=each, folder=tmp_path / name / each) for each in ("a", "b")]
    Submission(settings_of(SlurmSettings, {"array": array}, "hydra.launcher"), tmp_path / name, "a:b").submit(points)
    scripts = list(tmp_path.rglob("*.sh"))
    assert len(scripts) == 2 + array
    for script in scripts:
        options = [line.removeprefix("#SBATCH ") for line in script.read_text().splitlines() if line.startswith("#SBATCH ")]
        assert [each for each in options if len(shlex.split(each)) != 1] == []
        assert [each for each in options if f"--job-name={name}" in shlex.split(each)[0]]


@pytest.mark.parametrize(
    ("alive", "dependencies"),
    [
        ((), [None, None, "j0", "j1"]),
        (("1_1",), [None, "1_1", "j0", "j1"]),
        (("1_1", "1_2", "5"), ["1_1:1_2", "1_1:1_2:5", "j0", "j1"]),
    ],
)
def test_jobs_that_are_alive_count_among_those_at_once(
    alive: tuple[str, ...], dependencies: list[str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []

    def submit(script: Path, options: Sequence[str] = ()) -> str:
        asked.append(options[0].removeprefix("--dependency=afterany:") if options else None)
        return f"j{len(asked) - 1}"

    monkeypatch.setattr(commands, "submit", submit)
    points = [replace(POINT, name=each, folder=tmp_path / each) for each in "abcd"]
    settings = settings_of(SlurmSettings, {"max_parallel": 2, "array": False}, "hydra.launcher")
    Submission(settings, tmp_path, "a:b", alive).submit(points)
    assert asked == dependencies


def test_what_cannot_stand_in_a_script_is_told_by_the_setting_that_it_comes_from(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^name is 's\"q\.tp2': a line of the script cannot hold"):
        script_of(POINT, SlurmSettings(), 's"q', "a:b")


@pytest.mark.parametrize(
    ("values", "refused"),
    [
        ({"environment": {"WANDB_API_KEY": "0123"}}, True),
        ({"environment": {"hf_token": "0123"}}, True),
        ({"setup": ["module load cuda; export WANDB_API_KEY='0123'"]}, True),
        ({"setup": ["export WANDB_API_KEY=$(cat ~/key)", 'export HF_TOKEN="$TOKEN"']}, False),
        ({"environment": {"WANDB_API_KEY": None, "TOKENIZERS_PARALLELISM": "false", "MONKEY": 1}}, False),
    ],
)
def test_no_secret_comes_into_files_that_are_shown_to_others(values: dict[str, Any], refused: bool) -> None:
    if not refused:
        settings_of(SlurmSettings, values, "hydra.launcher")
        return
    with pytest.raises(ConfigError, match="a secret would stand in") as error:
        settings_of(SlurmSettings, values, "hydra.launcher")
    assert "0123" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "values"), [(LocalSettings, {"max_parallel": -1}), (LayoutsSettings, {"top": 0}), (LayoutsSettings, {"slack": 0.5})]
)
def test_numbers_out_of_range_are_refused(kind: type, values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="or more"):
        settings_of(kind, values, "hydra.x")


def test_a_command_to_paste_leaves_out_what_does_nothing_at_its_point() -> None:
    point = replace(POINT, overrides=("++strategy.schedule=GPipe", "strategy=tp2"), idle=("strategy.schedule=1F1B",))
    assert command_of(point) == "hybrid train strategy.schedule=1F1B strategy=tp2 name=tp2"
