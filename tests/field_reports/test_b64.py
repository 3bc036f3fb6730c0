"""B64, kind of fault: training is over, and an upload or a helper process holds the node until its time limit.

With a server that cannot be reached, offline, and after an error, the process ends soon and leaves no child.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

CODE = """
import sys
from hybrid_strategy.reporting.wandb_run import WandbRunLogger
logger = WandbRunLogger(save_dir=sys.argv[1], mode=sys.argv[2], init_timeout=2, finish_timeout=2)
try:
    logger.log_metrics({"loss": 1.0}, step=0)
    if sys.argv[3] == "raise":
        raise ValueError("made to fail")
finally:
    logger.finish()
"""


@pytest.mark.parametrize("how", ["end", "raise"])
def test_the_process_ends_and_leaves_no_child(how: str, tmp_path: Path) -> None:
    mode = "online" if how == "end" else "offline"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "NETRC": str(tmp_path / "none")}
    environment |= {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "a" * 40}
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, str(tmp_path), mode, how],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    said = process.communicate(timeout=60)[1]
    assert process.returncode == (1 if how == "raise" else 0), said
    assert time.monotonic() - started < 45
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and _session(process.pid):
        time.sleep(0.1)
    assert not _session(process.pid)
    if mode == "online":
        assert "this run is logged offline" in said
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 1


def _session(number: int) -> str:
    """Living processes of the session that the command was started in."""
    return subprocess.run(["pgrep", "--session", str(number), "-r", "R,S,D"], capture_output=True, text=True, check=False).stdout
