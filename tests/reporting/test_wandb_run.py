"""W&B never stops a run: no server, no package, a run that will not start, an upload that does not end."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hybrid_strategy.checkpoint.stop_request import REQUEST
from hybrid_strategy.reporting import wandb_run
from hybrid_strategy.reporting.wandb_run import WandbRunLogger, resolve_mode
from hybrid_strategy.reporting.wandb_tables import environment, plan_tables, rank_table, summary_of
from hybrid_strategy.spec.batch import BatchSpec
from hybrid_strategy.spec.layout import Layout
from hybrid_strategy.spec.plan import Plan
from tests.support.wandb_files import config, history, runs

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))


def _use(logger: WandbRunLogger) -> None:
    logger.log_hyperparams({"model": {"layers": 2, "none": None}, "list": [1, 2]})
    logger.log_metrics({"loss": 1.0}, step=0)
    logger.experiment.summary.update({"x": 1})


def test_offline_without_a_key_one_run_with_the_nested_configuration(tmp_path: Path):
    logger = WandbRunLogger(save_dir=str(tmp_path), name="mine", tags=["a"], group=None)
    _use(logger)
    assert dict(logger.experiment.config) == {"model": {"layers": 2, "none": None}, "list": [1, 2]}
    logger.finish()
    logger.finish()
    where = logger.where()
    assert where["mode"] == "offline"
    assert where["url"] is None
    assert [str(path) for path in (tmp_path / "wandb").glob("offline-run-*")] == [where["dir"]]


@pytest.mark.parametrize(("written", "after"), [(False, 0), (True, 2)])
def test_a_signal_that_ends_wandbs_helper_loses_no_row(tmp_path, monkeypatch: pytest.MonkeyPatch, written: bool, after: int):
    """Slurm signals every process of a step, and the rank trains on to the end of its step."""
    monkeypatch.setattr(wandb_run, "_FLUSH_SECONDS", 0.05 if written else 3600.0)
    logger = WandbRunLogger(save_dir=str(tmp_path), mode="offline")
    _use(logger)
    time.sleep(0.5 if written else 0.0)
    helpers = subprocess.run(["pgrep", "-P", str(os.getpid()), "wandb-core"], capture_output=True, text=True, check=True).stdout
    started = [each for each in gc.get_objects() if type(each) is subprocess.Popen and str(each.pid) in helpers.split()]
    monkeypatch.setattr(REQUEST, "signal_number", signal.SIGTERM)
    for helper in helpers.split():
        os.kill(int(helper), signal.SIGTERM)
        while Path(f"/proc/{helper}/fd/0").exists():
            time.sleep(0.01)
    for step in range(1, 1 + after):
        logger.log_metrics({"loss": 1.0}, step=step)
    logger.finish()
    parts = runs(tmp_path)
    assert len({part.name.split("-")[3] for part in parts}) == 1
    rows = [*(row for part in parts[:-1] for row in history(part, patience_seconds=0.0)), *history(parts[-1])]
    steps = [row["trainer/global_step"] for row in rows if "loss" in row]
    assert steps == list(range(1 + after))
    assert config(parts[-1])["list"] == [1, 2]
    for each in started:  # nobody else waits for the helper that was ended
        each.wait(10)


def test_tables_summary_and_environment_without_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    key = "0123456789" * 4
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    plan = Plan(Layout(tensor_parallel_size=2), BatchSpec(8), 0.0, (("embed", "head"),), (3, 4), 7)
    logger = WandbRunLogger(save_dir=str(tmp_path), mode="offline")
    logger.log_hyperparams({"env": environment()})
    ranks = [{"rank": 0, "host": "node1", "peak_memory_bytes": 3}, {"rank": 1, "host": "node2", "peak_memory_bytes": 4}]
    for table in (*plan_tables(plan, None), rank_table(ranks)):
        logger.log_rows(table.name, table.columns, table.rows)
    result = {"steps": 3, "ranks": ranks, "measured": {"step_seconds": 0.5}, "forecast": None, "checkpoint": None}
    logger.conclude(summary_of(result))
    run = logger.experiment
    assert run.config["env"]["slurm_job_id"] == "7"
    assert run.config["env"]["torch"]
    assert (run.summary["result/steps"], run.summary["measured/step_seconds"]) == (3, 0.5)
    logger.finish()
    found = {}
    for path in (tmp_path / "wandb").rglob("*.table.json"):
        found[path.name.partition("_")[0]] = json.loads(path.read_text())
    assert found["stages"]["data"] == [[0, 2, "embed, head"]]
    assert [row[0] for row in found["ranks"]["data"]] == [0, 1]
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert written
    assert not [each for each in written if key.encode() in each]


def test_two_runs_of_one_process_are_two_runs(tmp_path: Path):
    ids = set()
    for number in range(2):
        logger = WandbRunLogger(save_dir=str(tmp_path / str(number)))
        logger.log_hyperparams({"number": number})
        assert dict(logger.experiment.config) == {"number": number}
        logger.finish()
        ids.add(logger.where()["id"])
    assert len(ids) == 2


def test_a_server_that_does_not_answer_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    logger = WandbRunLogger(save_dir=str(tmp_path))
    start = logger._init

    def unreachable(wandb, mode):
        if mode == "online":
            raise ConnectionError("no route to host")
        return start(wandb, mode)

    monkeypatch.setattr(logger, "_init", unreachable)
    with pytest.warns(UserWarning, match=r"W&B cannot be reached \(no route to host\): this run is logged offline"):
        _use(logger)
    logger.finish()
    assert logger.where()["mode"] == "offline"


def test_a_run_that_cannot_start_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    logger = WandbRunLogger(save_dir=str(tmp_path))
    monkeypatch.setattr(logger, "_init", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.warns(UserWarning, match="W&B does not work \\(no space left\\)"):
        _use(logger)
    logger.finish()
    assert logger.where() == {"problem": "no space left"}


def test_a_missing_package_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", False)
    with pytest.warns(UserWarning, match="W&B does not work"):
        logger = WandbRunLogger(save_dir=str(tmp_path))
    _use(logger)
    logger.finish()
    assert "problem" in logger.where()
    assert logger.save_dir == str(tmp_path)
    assert logger.name == "hybrid-strategy"


def test_an_upload_that_does_not_end_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    leavers = []
    monkeypatch.setattr(wandb_run.atexit, "register", leavers.append)
    logger = WandbRunLogger(save_dir=str(tmp_path), finish_timeout=0.2)
    finish, released = logger.experiment.finish, threading.Event()
    monkeypatch.setattr(logger.experiment, "finish", lambda: released.wait(60))
    started = time.monotonic()
    with pytest.warns(UserWarning, match=r"still uploading after 0\.2 s.*wandb sync "):
        logger.finish()
    assert time.monotonic() - started < 30
    released.set()
    assert leavers == [wandb_run._leave]
    finish()


def test_other_ranks_have_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from lightning_utilities.core.rank_zero import rank_zero_only

    monkeypatch.setattr(rank_zero_only, "rank", 1)
    logger = WandbRunLogger(save_dir=str(tmp_path))
    logger.log_hyperparams({"a": 1})
    logger.log_metrics({"loss": 1.0})
    logger.finish()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("mode", "environment", "expected"),
    [
        ("auto", {}, "offline"),
        ("auto", {"WANDB_API_KEY": "x"}, "online"),
        ("auto", {"WANDB_API_KEY": "x", "WANDB_MODE": "offline"}, "offline"),
        ("auto", {"WANDB_MODE": "dryrun"}, "offline"),
        ("auto", {"WANDB_MODE": "disabled"}, "disabled"),
        ("online", {"WANDB_MODE": "offline"}, "online"),
        ("disabled", {"WANDB_API_KEY": "x"}, "disabled"),
    ],
)
def test_mode(mode: str, environment: dict, expected: str, monkeypatch: pytest.MonkeyPatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert resolve_mode(mode) == expected


def test_a_stored_key_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "netrc"
    file.write_text("machine api.wandb.ai login user password secret\n")
    file.chmod(0o600)
    monkeypatch.setenv("NETRC", str(file))
    assert resolve_mode("auto") == "online"


def test_this_module_is_not_imported_by_the_command_line():
    code = "import hybrid_strategy.cli.train, sys; assert not {'wandb', 'torch', 'lightning'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
