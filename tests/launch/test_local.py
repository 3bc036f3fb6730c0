"""The local launcher with real processes: whose failure is shown, what is left behind, who survives whom."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hybrid_strategy.launch.failures import WorkerFailedError
from hybrid_strategy.launch.job import Job
from hybrid_strategy.registry import parts

LAUNCHERS = sorted(parts("launch.launchers"))
_COMMAND = """
import subprocess, sys, time
from pathlib import Path
from hybrid_strategy.launch.job import Job
from hybrid_strategy.registry import find
if "slowly" in sys.argv:  # each rank takes a second to be started
    start = subprocess.Popen.__init__
    subprocess.Popen.__init__ = lambda self, *args, **more: (start(self, *args, **more), time.sleep(1.0))[0]
try:
    job = Job(sys.argv[2], Path(sys.argv[3]), 2, stops_itself="stops" in sys.argv)
    find("launch.launchers", sys.argv[1], "launcher").run(job)
except KeyboardInterrupt:
    sys.exit(130)
"""


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _wait_until_gone(pids: list[int], seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pids = [pid for pid in pids if _alive(pid)]
        if not pids:
            break
        time.sleep(0.05)
    return pids


def _start_hanging(launcher: str, target: str, folder: Path) -> tuple[subprocess.Popen[bytes], list[int]]:
    command = [sys.executable, "-c", _COMMAND, launcher, f"tests.launch.targets:{target}", str(folder)]
    parent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    files = [folder / "pid0", folder / "pid1"]
    while time.monotonic() < deadline and not all(file.exists() and file.read_text() for file in files):
        time.sleep(0.05)
    return parent, [int(file.read_text()) for file in files]


@pytest.mark.parametrize("name", LAUNCHERS)
class TestLauncher:
    def test_every_rank_runs_with_its_own_log_and_the_run_folder_unchanged(self, name, tmp_path, capfd):
        folder = tmp_path / "a=b, c#1 $HOME $$x ünï"
        parts("launch.launchers")[name].run(Job("tests.launch.targets:report", folder, 2, {"ONLY_FOR_RANKS": "1"}))
        seen = [json.loads((folder / f"seen{rank}.json").read_text()) for rank in range(2)]
        assert [each["RANK"] for each in seen] == ["0", "1"]
        assert {each["WORLD_SIZE"] for each in seen} == {"2"}
        assert {each["MASTER_PORT"] for each in seen} == {seen[0]["MASTER_PORT"]}
        assert all(each["ONLY_FOR_RANKS"] == "1" and int(each["OMP_NUM_THREADS"]) >= 1 for each in seen)
        for rank in range(2):
            text = (folder / "logs" / f"rank{rank}.log").read_text()
            assert text.splitlines() == [f"hello from rank {rank}", f"warning of rank {rank}"]
        out, err = capfd.readouterr()
        assert "hello from rank 0" in out
        assert "warning of rank 0" in err
        assert "rank 1" not in out + err

    def test_environment_signal_handlers_and_threads_are_as_before(self, name, tmp_path):
        environment, handler, threads = dict(os.environ), signal.getsignal(signal.SIGINT), set(threading.enumerate())
        parts("launch.launchers")[name].run(Job("tests.launch.targets:report", tmp_path, 1, {"ONLY_FOR_RANKS": "1"}))
        assert dict(os.environ) == environment
        assert signal.getsignal(signal.SIGINT) is handler
        assert set(threading.enumerate()) <= threads

    def test_the_failing_rank_is_what_the_user_sees(self, name, tmp_path):
        started = time.monotonic()
        with pytest.raises(WorkerFailedError) as caught:
            parts("launch.launchers")[name].run(Job("tests.launch.targets:fail_on_rank_1", tmp_path, 2))
        assert "ValueError: the cause of it all" in str(caught.value)
        assert f"rank 1 failed; log: {tmp_path / 'logs' / 'rank1.log'}" in str(caught.value)
        assert "worker.py" not in str(caught.value)
        assert caught.value.exit_code == 1
        assert "the cause of it all" in (tmp_path / "logs" / "rank1.log").read_text()
        assert time.monotonic() - started < 30

    def test_a_refusal_is_shown_without_a_traceback_and_keeps_its_exit_code(self, name, tmp_path):
        with pytest.raises(WorkerFailedError) as caught:
            parts("launch.launchers")[name].run(Job("tests.launch.targets:refuse", tmp_path, 2))
        assert str(caught.value).startswith("tensor_parallel_size is 3: no.\nrank ")
        assert "Traceback" not in str(caught.value)
        assert caught.value.exit_code == 2

    def test_a_rank_killed_without_a_word_is_named(self, name, tmp_path):
        with pytest.raises(WorkerFailedError, match="rank 1 ended by SIGKILL"):
            parts("launch.launchers")[name].run(Job("tests.launch.targets:die", tmp_path, 2))

    @pytest.mark.skipif(sys.platform != "linux", reason="whether a process has ended is read from /proc")
    def test_ranks_end_when_the_parent_is_killed(self, name, tmp_path):
        parent, pids = _start_hanging(name, "hang_deaf", tmp_path)
        parent.kill()
        parent.wait()
        assert _wait_until_gone(pids, 5) == []

    @pytest.mark.skipif(sys.platform != "linux", reason="whether a process has ended is read from /proc")
    @pytest.mark.parametrize("target", ["hang", "hang_deaf"])
    def test_ctrl_c_ends_everything_within_5_seconds(self, name, target, tmp_path):
        parent, pids = _start_hanging(name, target, tmp_path)
        started = time.monotonic()
        parent.send_signal(signal.SIGINT)
        assert parent.wait(timeout=10) == 130
        assert _wait_until_gone(pids, 1) == []
        assert time.monotonic() - started < 5

    @pytest.mark.parametrize(("seconds", "how"), [(0.2, "slowly"), (0.0, "fast"), (1.0, "fast")])
    def test_ctrl_c_while_ranks_are_starting_ends_them_in_one_line(self, name, seconds, how, tmp_path):
        """From the moment the first exists: a signal waits for ranks that have no handler yet, or do not exist."""
        command = [sys.executable, "-c", _COMMAND, name, "tests.launch.slow:train", str(tmp_path), "stops", how]
        parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        deadline = time.monotonic() + 30
        while not _ranks_of(parent.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(seconds)
        parent.send_signal(signal.SIGINT)
        started = time.monotonic()
        said, _ = parent.communicate(timeout=120)
        assert time.monotonic() - started < 5, "imports of 100 s were waited for"
        assert parent.returncode == 130, said
        assert "SIGINT: stopping" in said
        assert "Traceback" not in said
        assert not (tmp_path / "trained").exists()


def _ranks_of(parent: int) -> list[str]:
    found = subprocess.run(["pgrep", "-P", str(parent), "-f", "launch.worker"], capture_output=True, text=True, check=False)
    return found.stdout.split()
