"""Two runs never write into one folder, and a killed one does not keep it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from hybrid_strategy.errors import ConfigError
from hybrid_strategy.launch.one_run import only_run


def _hold(run_dir: Path, held: Event) -> None:
    with only_run(run_dir):
        held.set()
        signal.pause()


@pytest.mark.timeout(60)
def test_a_second_run_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    held = context.Event()
    first = context.Process(target=_hold, args=(tmp_path / "run", held))
    first.start()
    assert held.wait(30)
    with pytest.raises(ConfigError) as caught, only_run(tmp_path / "run"):
        pass
    said = str(caught.value)
    assert said.startswith(f"paths.run_dir is '{tmp_path}/run': another run is writing into this folder. process {first.pid} on ")
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    with only_run(tmp_path / "run"):
        pass
    assert list((tmp_path / "run").iterdir()) == []
