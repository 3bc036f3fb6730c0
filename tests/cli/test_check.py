"""`hybrid check`: the verdict by exit code, for the user's own module and for the shipped ones."""

from __future__ import annotations

import json

import pytest

from hybrid_strategy.cli.main import main

OWN = ["model._target_=tests.parity.own.OwnModule", "data._target_=tests.parity.own.OwnData", "trainer.accelerator=cpu"]


def test_a_layout_that_is_right_ends_with_0_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["check", *OWN, "model.width=24", "strategy=dp2_zero1", "check.steps=2"])
    output = capsys.readouterr()
    assert code == 0, output.err
    assert "parity of dp2_zero1 with one process: 2 processes" in output.out
    assert output.out.rstrip().endswith("dp2_zero1 gives the numbers of one process")
    assert "\x1b" not in output.out
    assert "DIFFERENT" not in output.out


def test_a_layout_that_differs_ends_with_1_and_says_what_first_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(
        ["check", *OWN, "model.reduction=sum", "strategy=single", "strategy.num_microbatches=3", "check.steps=1", "--json"]
    )
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert code == 1
    assert report["same"] is False
    assert report["first"]["quantity"] == "loss"
    assert any("/ num_microbatches (3)" in each for each in report["diagnoses"])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["strategy=tp2_pp2", "strategy.tensor_parallel_size=3"], "strategy.tensor_parallel_size is 3"),
        (["strategy=pp2", "stratgy.schedule=GPipe"], "Did you mean 'strategy'"),
        (["strategy=pp2", "strategy.schedule=1F1C"], "Did you mean '1F1B'"),
        (["check.step=2"], "check.step is 2: there is no such key. Did you mean 'steps'"),
        (["check.steps=0"], "check.steps is 0: it must be a whole number of 1 or more"),
        (["check.steps=two"], "check.steps is two"),
        (["check.timeout_seconds=nan"], "check.timeout_seconds is nan"),
        (["resume=auto"], "resume is 'auto'"),
        (["trainer.max_steps=0"], "trainer.max_steps is 0: a check compares steps, and none would run"),
        (["cluster.num_nodes=2", "strategy=dp2"], "cluster.num_nodes is 2"),
    ],
)
def test_a_wrong_configuration_ends_with_2_before_any_process(
    overrides: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.Popen._execute_child", None)
    assert main(["check", "model=llama_tiny", "trainer.accelerator=cpu", *overrides]) == 2
    assert words in capsys.readouterr().err


def test_a_module_that_cannot_be_made_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *OWN, "model.widht=3", "strategy=single"]) == 2
    assert capsys.readouterr().err.startswith(
        "model.widht is 3: tests.parity.own.OwnModule takes no such argument. Did you mean 'width'"
    )


def test_the_configuration_is_shown_and_nothing_started(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "model=llama_tiny", "strategy=pp2", "check.steps=5", "--cfg", "job"]) == 0
    assert "pipeline_parallel_size: 2" in capfd.readouterr().out
