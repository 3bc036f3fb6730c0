"""`hybrid train` for real: worker processes, run folder, resume, failures, sweeps."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import LearningRateMonitor

from hybrid_strategy.cli import train as cli_train
from hybrid_strategy.cli.fit import _allowed
from hybrid_strategy.cli.train import _launch, resume_command
from hybrid_strategy.config.build import build_all, build_trainer
from hybrid_strategy.config.compose import Source, run_config
from hybrid_strategy.config.messages import quoted
from hybrid_strategy.config.plan import plan_of
from hybrid_strategy.launch.job import Job

OWN = ["model._target_=own_module.OwnModule", "data._target_=own_module.OwnData", "logger=csv"]
TINY = [
    "model=llama_tiny",
    "data.sequence_length=32",
    "data.global_batch_size=8",
    "data.max_bytes=200000",
    "trainer.limit_val_batches=2",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own_module.py").write_text((Path(__file__).parent / "own_module.py").read_text())
    (tmp_path / "text.txt").write_text("\n".join(f"line {number} of some text, {number * 7919 % 1000}" for number in range(5000)))
    return tmp_path


def _environment(folder: Path) -> dict[str, str]:
    dropped = ("WANDB_API_KEY", "WANDB_MODE", "WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return kept | {"NETRC": str(folder / "no-netrc"), "HYBRID_STRATEGY_CACHE": str(folder / "cache")}


def _hybrid(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hybrid_strategy.cli.main", *arguments]
    return subprocess.run(command, cwd=folder, env=_environment(folder), capture_output=True, text=True, check=False, timeout=170)


def _rows(run_dir: Path) -> list[dict[str, str]]:
    header, *lines = (run_dir / "metrics.csv").read_text().splitlines()
    return [dict(zip(header.split(","), line.split(","), strict=True)) for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_a_run_leaves_all_it_promises_and_can_be_resumed(folder: Path):
    overrides = [
        *TINY,
        "data.files=[text.txt]",
        "strategy=pp2",
        "trainer.max_steps=4",
        "trainer.log_every_n_steps=1",
        'name="a=b c"',
    ]
    found = _hybrid(folder, "train", *overrides)
    assert found.returncode == 0, found.stderr
    (run_dir,) = (folder / "outputs" / "a=b c").iterdir()
    for name in (
        "config.yaml",
        "plan.json",
        "metrics.csv",
        "result.json",
        "checkpoints/step000004.ckpt",
        "logs/rank0.log",
        "logs/rank1.log",
    ):
        assert (run_dir / name).exists(), name
    assert len(list((run_dir / "wandb").glob("offline-run-*"))) == 1
    assert json.loads((run_dir / "plan.json").read_text())["stage_units"][1][-1] == "lm_head"
    result = json.loads((run_dir / "result.json").read_text())
    assert result["steps"] == 4
    assert result["first_validation_loss"] > result["last_validation_loss"]
    assert [row["step"] for row in _rows(run_dir) if row["train_loss"]] == ["0", "1", "2", "3"]
    assert "\x1b" not in found.stdout
    for text in ("bubble", "validation loss", "tokens/s", f"run folder: {run_dir}", "wandb sync"):
        assert text in found.stdout
    assert "Traceback" not in found.stdout + found.stderr

    (command,) = [line for line in found.stdout.splitlines() if line.startswith("resume: ")]
    words = shlex.split(command.removeprefix("resume: "))
    assert words[:2] == ["hybrid", "train"]
    resumed = _hybrid(folder, *words[1:], "logger=csv")
    assert resumed.returncode == 0, resumed.stderr
    assert f"resuming from {run_dir}/checkpoints/step000004.ckpt" in resumed.stdout
    (second,) = [each for each in (folder / "outputs" / "a=b c").iterdir() if each != run_dir]
    assert [row["step"] for row in _rows(second) if row["train_loss"]] == ["4", "5", "6", "7"]

    refused = _hybrid(folder, "train", *TINY, quoted(f"paths.run_dir={second}").strip("'"))
    assert refused.returncode == 2
    assert f"paths.run_dir is '{second}': the folder holds the results of another run. metrics.csv is there." in refused.stderr


class Writer:
    """Ranks that log as Lightning's logger does: into a new file."""

    name = "writer"

    def __init__(self, steps: range) -> None:
        self._steps = steps

    def run(self, job: Job) -> None:
        rows = "".join(f"{step},{step / 2}\n" for step in self._steps)
        (job.run_dir / "metrics.csv").write_text(f"step,train_loss\n{rows}")


def test_a_run_that_goes_on_in_its_own_folder_keeps_the_rows_it_had(tmp_path: Path):
    for steps in (range(4), range(3, 6)):
        _launch(Writer(steps), Job("", tmp_path, 1))
    assert [row["step"] for row in _rows(tmp_path)] == ["0", "1", "2", "3", "4", "5"]
    assert [each.name for each in tmp_path.iterdir()] == ["metrics.csv"]


@pytest.mark.slow
def test_the_first_failing_rank_is_what_the_user_sees(folder: Path):
    model = ["model.fail_rank=1", "model.fail_step=2", "callbacks.checkpoint.every_n_train_steps=1"]
    run_dir = folder / "outputs" / "train" / "again"
    killed = run_dir / "checkpoints" / "step000001.ckpt.partial-0a1b2c3d"
    killed.mkdir(parents=True)
    here = ("resume=auto", f"paths.run_dir={run_dir}")
    found = _hybrid(folder, "train", *OWN, *model, "strategy=dp2", "trainer.max_steps=5", *here)
    assert not killed.exists()  # what an attempt left that was killed in a save
    assert found.returncode == 1
    assert "ValueError: made to fail" in found.stderr
    assert found.stderr.count("Traceback") == 1
    assert f"rank 1 failed; log: {run_dir}/logs/rank1.log" in found.stderr
    assert f"resume={run_dir}" in found.stderr


@pytest.mark.slow
def test_a_module_that_cannot_be_made_is_refused_in_one_line(folder: Path):
    found = _hybrid(folder, "train", *OWN, "model.no_such_argument.x=1", "model._target_=own_module.OwnDat")
    assert found.returncode == 2
    assert found.stderr.startswith("model._target_ is 'own_module.OwnDat': there is no OwnDat in ")
    assert "Did you mean 'OwnData'?" in found.stderr
    assert not (folder / "outputs").exists()
    assert "Traceback" not in found.stderr


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_null_is_a_value_where_lightning_has_another_default_and_a_run_needs_no_logger(
    monkeypatch: pytest.MonkeyPatch,
):
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    config = run_config(Source(("experiment=quickstart", "strategy=single", "logger=none", "trainer=cpu")))
    assert build_trainer(config, plan_of(config), [], []).check_val_every_n_epoch is None
    kept = _allowed(config, [*build_all(config.callbacks, "callbacks").values()])
    assert not any(isinstance(each, LearningRateMonitor) for each in kept)
    assert len(kept) == len(config.callbacks) - 1


def test_a_sweep_goes_on_after_a_failed_point_and_each_has_a_run_of_its_own(folder: Path):
    texts = {"a": "x=1, y #2", "b": "ünï ☃ $HOME", "c": 'it\'s "so"'}
    given = [f'model.{name}="{text}"'.replace('"so"', '\\"so\\"') for name, text in texts.items()]
    fixed = ["trainer.max_steps=2", "trainer.limit_val_batches=0", "logger=wandb", "strategy=single", f"model.record={folder}"]
    found = _hybrid(folder, "train", "-m", *OWN[:2], *fixed, "model.fail_rank=-1,0", *given)
    assert found.returncode == 5, found.stderr
    assert "rank 0: ValueError: made to fail" in found.stdout
    sweep = folder / "outputs" / "sweeps" / "train"
    first, failed = sweep / "fail_rank--1", sweep / "fail_rank-0"
    assert [json.loads((each / "result.json").read_text())["state"] for each in (first, failed)] == ["ok", "failed"]
    assert "ValueError: made to fail" in (failed / "output.log").read_text()
    for run_dir, rank in ((first, "-1"), (failed, "0")):
        assert f"fail_rank: {rank}" in (run_dir / "config.yaml").read_text()
        assert len(list((run_dir / "wandb").glob("offline-run-*"))) == 1
    assert json.loads((folder / "given0.json").read_text()) == texts


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="whether a process has ended is read from /proc")
def test_ctrl_c_saves_and_ends_a_run_within_5_seconds(folder: Path):
    command = [sys.executable, "-m", "hybrid_strategy.cli.main", "train", *OWN, "trainer.max_epochs=-1", "strategy=dp2"]
    parent = subprocess.Popen(
        [*command, "logger=csv_wandb", "callbacks.progress.plain_seconds=0"],
        cwd=folder,
        env=_environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    for line in parent.stdout:
        if line.startswith("step ") and not line.startswith("step 0"):
            break
    started = time.monotonic()
    parent.send_signal(signal.SIGINT)
    _, err = parent.communicate(timeout=30)
    assert time.monotonic() - started < 5
    assert parent.returncode == 75
    assert "SIGINT: stopping after the step at hand" in err
    assert "stopped by SIGINT after step " in err
    assert "resume: hybrid train " in err
    run_dir = Path(next(line for line in err.splitlines() if line.startswith("run folder: ")).partition(": ")[2])
    said = json.loads((run_dir / "preempted.json").read_text())
    assert said["signal"] == "SIGINT"
    assert (Path(said["checkpoint"]) / "manifest.json").is_file()
    time.sleep(1.0)
    left = subprocess.run(["pgrep", "-f", str(folder)], capture_output=True, text=True, check=False).stdout.split()
    assert left == []


def test_what_goes_on_with_a_point_of_another_launcher_is_a_run_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    commands = []
    monkeypatch.setattr(cli_train, "train", lambda config, folder, given: commands.append(resume_command(given, folder)))
    others = ("hydra/launcher=basic", "hydra/sweeper=basic")
    assert cli_train.run(["-m", "model=llama_tiny", "trainer=cpu", "logger=csv", "seed=1,2", "name=s", *others]) == 0
    run = "hybrid train model=llama_tiny trainer=cpu logger=csv"
    assert commands == [f"{run} seed={seed} name=s resume={tmp_path}/outputs/sweeps/s/{seed - 1}" for seed in (1, 2)]
