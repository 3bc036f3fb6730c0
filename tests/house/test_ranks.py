"""What the tests' own ranks say of failures: a test that waits for them in vain would blame the product."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest
import torch

from tests.support.forks import run_cases
from tests.support.ranks import RankFailedError, run_ranks


def _fail(seconds: tuple[float, ...]) -> None:
    rank = int(os.environ["RANK"])
    time.sleep(seconds[rank])
    raise ValueError(f"planted on rank {rank}")


def test_every_rank_that_fails_is_shown_where_one_is_later() -> None:
    with pytest.raises(RankFailedError) as caught:
        run_ranks(_fail, 3, (0.0, 2.5, 1.2), process_group=False)
    assert [f"planted on rank {rank}" in str(caught.value) for rank in range(3)] == [True] * 3


def test_a_rank_that_hangs_is_not_waited_for_where_another_failed() -> None:
    started = time.monotonic()
    with pytest.raises(RankFailedError, match="planted on rank 0"):
        run_ranks(_fail, 2, (0.0, 100.0), process_group=False)
    assert time.monotonic() - started < 30


def test_what_a_rank_starts_is_started_as_in_a_run_of_its_own() -> None:
    (found,) = run_ranks(multiprocessing.get_start_method, 1, process_group=False)
    assert found == multiprocessing.get_start_method()


def _end(how: str) -> str:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGTERM)
    if how == "hangs":
        time.sleep(100)
    return how


def test_a_rank_that_died_is_told_from_one_that_hangs() -> None:
    (killed,), (hangs,), (well,) = run_cases(_end, 1, [("killed",), ("hangs",), ("ends",)], limit=3)
    assert killed.traceback == "the process died of signal 15"
    assert hangs.traceback == ""
    assert (well.value, well.traceback) == ("ends", None)


def _hold() -> None:
    weight = torch.ones(2, requires_grad=True)
    doubled = weight * 2
    doubled.register_hook(lambda grad: grad * doubled.shape[0])  # held by the tensor it holds


def test_a_tensor_that_outlives_its_job_is_a_failure() -> None:
    with pytest.raises(RankFailedError, match=r"1 tensors outlive the job: \[\('Tensor', 2\)\]"):
        run_ranks(_hold, 1, process_group=False)
