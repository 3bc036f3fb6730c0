"""Points on this machine: whatever one of them does, the next one is untouched and every end has its cause."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from hybrid_strategy.cli.arguments import Arguments
from hybrid_strategy.cli.main import main
from hybrid_strategy.cli.multirun import run_sweep
from hybrid_strategy.cli.train import run as train
from hybrid_strategy.config.compose import Source
from hybrid_strategy.errors import ConfigError, RunError
from hybrid_strategy.sweeping.attempts import read_state, write_state
from hybrid_strategy.sweeping.launchers import RUNNERS
from hybrid_strategy.sweeping.metrics import read_rows
from hybrid_strategy.sweeping.session import Session
from tests.sweeping import fake_point as fake

FAKE = (sys.executable, str(Path(fake.__file__)))
BASE = ("model=llama_tiny", "trainer=cpu", "strategy=dp2", "logger=csv", "name=s", "hydra.launcher.poll_seconds=0.02")


@pytest.fixture(autouse=True)
def _in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


def _sweep(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> tuple[int, str]:
    """The code and what was printed."""
    out = io.StringIO()
    console = Console(file=out, width=200, color_system=None)

    def session(_: Console, command: str, single: bool, target: str, entry: tuple[str, ...]) -> Session:
        return Session(console, command, single, target, FAKE)

    monkeypatch.setattr("hybrid_strategy.cli.multirun.Session", session)
    given = Arguments(Source((*BASE, *overrides)), None, True, ())
    return run_sweep(given, lambda config, folder: None, "nowhere:nothing"), out.getvalue()


def _result(name: str) -> dict[str, object]:
    value: dict[str, object] = json.loads((Path("outputs/sweeps/s") / name / "result.json").read_text())
    return value


def test_every_end_has_its_cause_and_the_others_their_results(monkeypatch, tmp_path):
    kinds = (fake.OK, fake.RAISES, fake.OUT_OF_MEMORY, fake.DIES, fake.REFUSES, fake.SAVES)
    code, text = _sweep(monkeypatch, f"seed={','.join(map(str, kinds))}")
    assert code == 5
    states = {kind: _result(f"seed-{kind}")["state"] for kind in kinds}
    assert states == dict(zip(kinds, ("ok", "failed", "oom", "failed", "failed", "preempted"), strict=True))
    assert _result(f"seed-{fake.RAISES}")["reason"] == "rank 1: ValueError: made to fail"
    assert "raise error" in str(_result(f"seed-{fake.RAISES}")["traceback"])
    assert "made to fail" in (tmp_path / f"outputs/sweeps/s/seed-{fake.RAISES}/output.log").read_text()
    assert _result(f"seed-{fake.DIES}")["reason"] == "rank 1: ended by SIGKILL (often: out of memory)"
    assert _result(f"seed-{fake.REFUSES}")["reason"] == "rank 0: sharding is 'zero1': no."
    assert "seed-101: failed" in text
    assert "1 ok, 3 failed, 1 oom, 1 preempted" in text

    failed = Path(f"outputs/sweeps/s/seed-{fake.RAISES}")
    write_state(failed, replace(read_state(failed), job="7"))  # as if Slurm had run it
    first = {kind: float(str(_result(f"seed-{kind}")["wall_seconds"])) for kind in kinds}
    code, text = _sweep(monkeypatch, f"seed={','.join(map(str, kinds))}")  # only what did not end well is run again
    attempts = {kind: _result(f"seed-{kind}")["attempts"] for kind in kinds}
    assert attempts == {kind: 1 if kind == fake.OK else 2 for kind in kinds}
    assert _result(f"seed-{fake.SAVES}")["state"] == "ok"
    both, saves = (
        float(str(_result(f"seed-{fake.SAVES}")["wall_seconds"])),
        read_state(Path(f"outputs/sweeps/s/seed-{fake.SAVES}")),
    )
    assert saves.earlier_seconds == pytest.approx(first[fake.SAVES])
    assert both == pytest.approx(first[fake.SAVES] + saves.ended - saves.started)  # of all attempts, without what lies between
    assert read_state(failed).job == ""
    assert "1 finished before" in text
    rows = read_rows(Path(f"outputs/sweeps/s/seed-{fake.SAVES}"))
    assert [row["step"] for row in rows] == ["0", "5", "7", "9"]
    config = Path(f"outputs/sweeps/s/seed-{fake.SAVES}/config.yaml").read_text()
    assert "preempted-step000007.ckpt" in config

    started = f"outputs/sweeps/s/seed-{fake.SAVES}"  # another sweep starts there; a point with checkpoints of its own goes on
    for _ in range(2):
        _sweep(monkeypatch, f"seed={fake.RAISES},{fake.SAVES}", f"resume={started}", "name=t")
    for name, folder in ((fake.RAISES, started), (fake.SAVES, f"outputs/sweeps/t/seed-{fake.SAVES}")):
        found = Path(f"outputs/sweeps/t/seed-{name}/config.yaml").read_text()
        assert f"resume: {tmp_path}/{folder}/checkpoints/preempted-step000007.ckpt" in found


@pytest.mark.parametrize("kind", [fake.HANGS, fake.DEAF])
def test_a_point_over_its_time_ends_and_the_next_one_runs(monkeypatch, kind):
    monkeypatch.setattr("hybrid_strategy.sweeping.local._GRACE_SECONDS", 0.5)
    code, text = _sweep(monkeypatch, f"seed={kind},{fake.OK}", "hydra.launcher.time=0.05")
    assert code == 5
    result = _result(f"seed-{kind}")
    assert result["state"] == "timeout"
    assert result["reason"] == "it did not end within 3 s; step 7"
    assert _result(f"seed-{fake.OK}")["state"] == "ok"
    assert "1 ok, 1 timeout" in text
    assert not Path(f"/proc/{Path(f'outputs/sweeps/s/seed-{kind}/pid').read_text()}").exists()


def test_each_point_has_its_own_limit_and_variables(monkeypatch):
    monkeypatch.setattr("hybrid_strategy.sweeping.local._GRACE_SECONDS", 0.5)
    sets = "hydra.sweeper.points=[{seed: 103, hydra.launcher.time: 0.05}, {seed: 100, hydra.launcher.environment.MINE: here}]"
    code, text = _sweep(monkeypatch, sets)
    assert code == 5
    assert "1 ok, 1 timeout" in text
    assert str(_result("seed-103")["reason"]).startswith("it did not end within 3 s")
    seen = [json.loads(Path(f"outputs/sweeps/s/seed-{each}/environment.json").read_text()) for each in (103, 100)]
    assert [each.get("MINE") for each in seen] == [None, "here"]


def test_interpolations_of_the_command_line_are_of_the_place_they_are_for(monkeypatch):
    monkeypatch.setenv("MINE_API_KEY", "s3cr3t-value")
    own = ("+logger.mine._target_=builtins.dict", "+logger.mine.api_key=${oc.env:MINE_API_KEY}", "+logger.mine.a=${.api_key}")
    assert _sweep(monkeypatch, "seed=100,108", *own)[0] == 0
    files = [each for each in Path("outputs").rglob("*") if each.is_file() and each.name != "environment.json"]  # the fake's own
    assert not [each for each in files if "s3cr3t" in each.read_text()]
    assert set(json.loads(Path("outputs/sweeps/s/seed-100/point.json").read_text())["swept"]) == {"seed"}


@pytest.mark.parametrize("setting", ["max_parallel: 2", "poll_seconds: 9", "time: soon"])
def test_what_is_of_the_whole_sweep_is_refused_at_a_point_and_so_is_what_is_wrong_there(monkeypatch, setting):
    with pytest.raises(ConfigError, match=f"hydra.launcher.{setting.partition(':')[0]} is .*(for the whole sweep|it is minutes)"):
        _sweep(monkeypatch, f"hydra.sweeper.points=[{{seed: 1}}, {{seed: 2, hydra.launcher.{setting}}}]")
    assert not Path("outputs").exists()


def test_nothing_of_a_distributed_process_reaches_a_point(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "THEIRS"):
        monkeypatch.setenv(name, "7")
    before = dict(os.environ)
    code, _ = _sweep(monkeypatch, "seed=100,108", 'hydra.launcher.environment={MINE: "a $b", THEIRS: null}')
    assert code == 0
    assert dict(os.environ) == before
    for name in ("seed-100", "seed-108"):
        seen = json.loads((Path("outputs/sweeps/s") / name / "environment.json").read_text())
        assert not {"RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "THEIRS"} & set(seen)
        assert seen["MINE"] == "a $b"


def test_points_side_by_side_as_cores_allow(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
    started = time.monotonic()
    monkeypatch.setattr("hybrid_strategy.sweeping.local._GRACE_SECONDS", 0.2)
    code, _ = _sweep(
        monkeypatch,
        f"seed={fake.HANGS}",
        "optimizer.weight_decay=0.1,0.2",
        "hydra.launcher.time=0.05",
        "hydra.launcher.max_parallel=4",
    )
    assert code == 5
    begun = [read_state(Path(f"outputs/sweeps/s/weight_decay-{value}")).started for value in ("0.1", "0.2")]
    assert abs(begun[0] - begun[1]) < 1
    assert time.monotonic() - started < 30


def test_results_hold_every_point_and_every_skipped_one(monkeypatch):
    code, text = _sweep(monkeypatch, "strategy.tensor_parallel_size=1,3", f"seed={fake.OK},{fake.RAISES}")
    assert code == 5
    assert "2 skipped" in text
    results = json.loads(Path("outputs/sweeps/s/results.json").read_text())["results"]
    assert [each["state"] for each in results] == ["ok", "failed", "skipped", "skipped"]
    assert all("num_attention_heads" in each["reason"] for each in results[2:])
    assert Path("outputs/sweeps/s/results.csv").read_text().count("\n") >= 5


def test_a_sweep_without_a_valid_point_starts_nothing(monkeypatch):
    with pytest.raises(ConfigError, match="none of 2 points can be run"):
        _sweep(monkeypatch, "strategy.tensor_parallel_size=3,5")
    assert not Path("outputs").exists()


def test_what_this_machine_cannot_run_is_skipped_with_its_reason(monkeypatch):
    code, text = _sweep(monkeypatch, "strategy=glob([single,hybrid])", "cluster.num_nodes=1,2", "cluster.devices=1")
    assert code == 0
    assert text.count("it needs 2 nodes, and the local launcher starts the processes of one. Set hydra/launcher=slurm.") == 1
    code, text = _sweep(monkeypatch, "strategy.data_parallel_size=2,5000", "data.global_batch_size=10000", "name=many")
    assert code == 0
    assert "so many processes on one machine would stop it" in text


@pytest.mark.parametrize(
    "wrong",
    [
        "sed=1,2",
        "seed=1,x",
        "strategy=tp2,nope",
        "trainer.max_steps=a,b",
        "optimizer.name=adamw,adamq",
        "strategy.sharding=zero1,zero9",
        "model._target_=no_such_module.Model",
        "strategy.initial_weights=nowhere,here",
        "sweeps=scaling,microbatches",
        "resume=nowhere",
    ],
)
def test_a_typo_in_any_value_stops_the_sweep_before_it_starts(monkeypatch, wrong):
    with pytest.raises(ConfigError):
        _sweep(monkeypatch, wrong)
    assert not Path("outputs").exists()


@pytest.mark.parametrize(
    "wrong", ["hydra.launcher.tim=3", "hydra.launcher.time=soon", "hydra.launcher.max_parallel=x", "hydra.sweeper.tpo=3"]
)
def test_settings_of_launcher_and_sweeper_are_checked(monkeypatch, wrong, capsys):
    try:
        code, _ = _sweep(monkeypatch, "seed=1,2", wrong)
    except ConfigError as error:
        code = error.exit_code
    assert code == 2
    assert not Path("outputs").exists()


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ("sweeps=parallel_sizes hydra/sweeper=grid", "hydra.sweeper.axes is set: hydra/sweeper=grid has no such key"),
        ("sweeps=parallel_sizes hydra/sweeper=basic", "BasicSweeper has no such key. Set hydra/sweeper=layouts"),
        ("sweeps=scaling hydra/sweeper=basic", "Set hydra/sweeper=grid or layouts, or leave hydra/sweeper out"),
        ("seed=1,2 hydra.sweeper.top=1", "hydra.sweeper.top is set: hydra/sweeper=grid has no such key"),
        (
            "seed=1,2 hydra.launcher=slurm",
            "hydra.launcher is slurm: what is chosen is an option of a group, written with a slash",
        ),
        (
            "seed=1,2 hydra/launcher=slurm hydra.launcher.setup=x",
            "hydra.launcher.setup is of another type: it must be a list. Set a list.",
        ),
        ("seed=1,2 hydra.launcher.time=1,2", "hydra.launcher.time is 1, 2: a command line has one value of it for all points"),
        ("seed=1,2 hydra.launcher.time=0:00", "hydra.launcher.time is '0:00': it is minutes, or d-hh:mm:ss. Set 60"),
        ("seed=1,2 hydra/launcher=slurm hydra.launcher.time=inf", "hydra.launcher.time is inf: it is minutes, or d-hh:mm:ss."),
        ("hydra.sweeper.params.seed=1,2", "one value of it for all points. Set seed=1,2."),
        ("seed=1,2 hydra/launcher=basic hydra.launcher.time=5", "has no such key. Set hydra/launcher=local or slurm"),
    ],
)
def test_a_sweeper_without_a_setting_is_told_from_one_that_has_it(monkeypatch, chosen, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        _sweep(monkeypatch, *chosen.split())


@pytest.mark.parametrize(
    "words", [["hydra.launcher.time=5"], ["hydra/launcher=local", "hydra.launcher.time=5"], ["hydra.sweeper.top=3", "seed=1"]]
)
def test_settings_of_a_sweep_where_there_is_none_are_refused(words):
    with pytest.raises(ConfigError, match="a single run has no use for it"):
        train(words)


def test_another_configuration_under_the_same_name_sets_the_earlier_run_aside(monkeypatch):
    _sweep(monkeypatch, "seed=100,108")
    code, text = _sweep(monkeypatch, "seed=100,108", "trainer.max_steps=3")
    assert code == 0
    changed = "seed-100 was run with another configuration (trainer.max_steps -1, now 3), which is set aside as seed-100~"
    assert changed in text
    folders = sorted(each.name.partition("~")[0] for each in Path("outputs/sweeps/s").iterdir() if each.is_dir())
    assert folders == ["seed-100", "seed-100", "seed-108", "seed-108"]
    _, text = _sweep(monkeypatch, "seed=100,109", "trainer.max_steps=3")
    assert "of an earlier command, and no part of this one: seed-108; their folders stay as they are" in text
    assert "2 points, 1 finished before" in text


def test_runs_are_named_grouped_and_tagged_by_point(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    _, said = _sweep(monkeypatch, "seed=100,108", "strategy.sharding=zero1", "logger=csv_wandb")
    (report,) = Path("outputs/sweeps/s/wandb").glob("offline-run-*")
    assert list((report / "files/media/html").glob("report_*.html"))
    assert f"wandb sync {report.absolute()}" in said
    text = Path("outputs/sweeps/s/seed-108/config.yaml").read_text()
    for line in ("name: seed-108", "group: s", "- seed-108"):
        assert line in text
    assert text.count("resume: null") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_running(tmp_path, number, capsys):
    """Ctrl-C, `hybrid sweep cancel` from another shell, and what leaves no time for anything."""
    kind = fake.DEAF if number == signal.SIGINT else fake.HANGS
    code = (
        "import sys; from tests.sweeping.test_local import BASE, FAKE; from hybrid_strategy.cli import multirun\n"
        "made = multirun.Session\n"
        "multirun.Session = lambda console, command, single, target, entry: made(console, command, single, target, FAKE)\n"
        "from hybrid_strategy.cli.main import main\n"
        f"sys.exit(main(['train', '-m', *BASE, 'seed={kind},100']))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    pid = tmp_path / f"outputs/sweeps/s/seed-{kind}/pid"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (pid.exists() and pid.read_text()):
        time.sleep(0.05)
    if number == signal.SIGTERM:
        assert main(["sweep", "resume", "s"]) == 2
        assert f"Process {parent.pid} on" in capsys.readouterr().err
        assert main(["sweep", "cancel", "s"]) == 0
        assert f"1 cancelled: process {parent.pid} was told to end" in capsys.readouterr().out
    else:
        parent.send_signal(number)
    if number == signal.SIGINT:  # the second one does not wait for the point to save
        time.sleep(0.5)
        parent.send_signal(number)
    _, said = parent.communicate(timeout=15)
    assert parent.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 130)
    words = {signal.SIGINT: b"stopped by Ctrl-C", signal.SIGTERM: b"stopped by SIGTERM"}
    assert words.get(number, b"") in said
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and Path(f"/proc/{pid.read_text()}").exists():
        time.sleep(0.05)
    assert not Path(f"/proc/{pid.read_text()}").exists()
    if number != signal.SIGKILL:
        assert read_state(pid.parent).state == "pending"
        assert not (tmp_path / "outputs/sweeps/s/.lock").exists()
    assert main(["sweep", "status", "s"]) == 0
    assert "running" not in capsys.readouterr().out
    assert read_state(pid.parent).state == "pending"
    assert main(["sweep", "cancel", "s"]) == 0
    assert "nothing of it is running" in capsys.readouterr().out


def test_a_sweep_that_was_moved_and_lost_a_folder_goes_on_where_it_is(monkeypatch, tmp_path, capsys):
    """Checkpoints and logs of a point that goes on lie in its folder, wherever that is now; what is gone is told of."""
    _sweep(monkeypatch, f"seed={fake.OK},{fake.SAVES},{fake.RAISES}")
    (tmp_path / "elsewhere").mkdir()
    there = (tmp_path / "outputs/sweeps/s").rename(tmp_path / "elsewhere/moved")
    monkeypatch.chdir(tmp_path / "elsewhere")

    def session(console: Console, command: str, single: bool, target: str, entry: tuple[str, ...]) -> Session:
        return Session(console, command, single, target, FAKE)

    monkeypatch.setattr("hybrid_strategy.cli.sweep.Session", session)
    assert main(["sweep", "resume", "moved"]) == 5
    text = (there / f"seed-{fake.SAVES}/config.yaml").read_text()
    assert f"run_dir: {there}/seed-{fake.SAVES}\n" in text
    assert f"resume: {there}/seed-{fake.SAVES}/checkpoints/preempted-step000007.ckpt" in text
    assert not (tmp_path / "outputs/sweeps/s").exists()
    assert Path.cwd() == tmp_path, "modules and files are found where the sweep was started"

    capsys.readouterr()
    for wrong in (
        ["resume", "POINT"],
        ["status", "POINT"],
        ["logs", "--json"],
        ["report", "--lines", "3"],
        ["logs", "--lines", "0"],
    ):
        assert main(["sweep", wrong[0], str(there), *wrong[1:]]) == 2, "what would be ignored is refused"
    assert capsys.readouterr().err.count("has no use for it") == 4
    shutil.rmtree(there / f"seed-{fake.OK}")
    (there / f"seed-{fake.RAISES}/point.json").write_text("{}")
    capsys.readouterr()
    assert main(["sweep", "status", str(there)]) == 5
    assert capsys.readouterr().out.count("its folder is not there any more, or not whole") == 2
    (there / "sweep.json").write_text("{")
    assert main(["sweep", "status", str(there)]) == 2
    assert "sweep.json cannot be read" in capsys.readouterr().err


class _Full:
    """A runner on a disk that fills up."""

    def __init__(self, number: int) -> None:
        self._number = number

    def alive(self, point: object) -> bool:
        return False

    def run(self, points: object, tick: object) -> None:
        raise OSError(self._number, os.strerror(self._number))


def test_a_full_disk_is_one_line_and_a_fault_of_ours_is_none(monkeypatch):
    monkeypatch.setitem(RUNNERS, "local", lambda *_: _Full(errno.ENOSPC))
    with pytest.raises(RunError, match=r"outputs/sweeps/s: No space left on device\. Make room"):
        _sweep(monkeypatch, "seed=100,108")
    monkeypatch.setitem(RUNNERS, "local", lambda *_: _Full(errno.ENOENT))
    code, _ = _sweep(monkeypatch, "seed=100,108")
    assert code != 0
