"""Which of several failures is the cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_strategy.errors import LayoutError
from hybrid_strategy.launch.failures import explain, first_failure, record


def _raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_the_earliest_failure_is_the_first(tmp_path: Path):
    record(tmp_path, 1, _raised(ValueError("first")))
    record(tmp_path, 0, _raised(ValueError("second")))
    failure = first_failure(tmp_path, 2)
    assert failure is not None
    assert (failure.rank, failure.message) == (1, "first")


@pytest.mark.parametrize("words", ["Connection closed by peer [127.0.0.1]:1234", "[Errno 32] Broken pipe"])
def test_the_loss_of_a_peer_is_never_the_cause_if_there_is_another(tmp_path: Path, words: str):
    record(tmp_path, 0, _raised(RuntimeError(words)))
    record(tmp_path, 1, _raised(ValueError("the cause")))
    failure = first_failure(tmp_path, 2)
    assert failure is not None
    assert failure.rank == 1


def test_a_silent_death_explains_the_loss_of_a_peer(tmp_path: Path):
    (tmp_path / "rank1.log").write_text("last words\n")
    record(tmp_path, 0, _raised(RuntimeError("Connection reset by peer")))
    text = str(explain(tmp_path, 2, {0: 1, 1: -11}))
    assert text.startswith("last words\nrank 1 ended by SIGSEGV without a traceback")


def test_a_message_of_a_refusal_stands_alone(tmp_path: Path):
    record(tmp_path, 0, _raised(LayoutError("no.")))
    error = explain(tmp_path, 1, {0: 2})
    assert str(error) == f"no.\nrank 0 failed; log: {tmp_path / 'rank0.log'}"
    assert error.exit_code == 2


def test_an_error_without_words_is_shown_by_its_type(tmp_path: Path):
    record(tmp_path, 0, _raised(AssertionError()))
    assert "AssertionError" in str(explain(tmp_path, 1, {0: 1}))


def test_nothing_known_still_says_where_to_look(tmp_path: Path):
    assert str(tmp_path) in str(explain(tmp_path, 1, {}))
