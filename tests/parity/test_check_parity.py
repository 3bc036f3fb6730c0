"""`check_parity` with fresh processes: a user's own module, refusals, failures, hangs, scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from torch import nn

import hybrid_strategy
from hybrid_strategy.errors import ConfigError, LayoutError, ParityError
from hybrid_strategy.launch.failures import WorkerFailedError
from hybrid_strategy.parity.processes import temporary_folder
from tests.parity.own import FailsOnRank1, HangsOnRank1, NeedsConfiguring, OwnData, OwnModule
from tests.support.gate import gate

OPTIONS = hybrid_strategy.ParityOptions(accelerator="cpu", timeout_seconds=120)
SCRIPT = """
import json
from hybrid_strategy import HybridParallelStrategy, ParityOptions, check_parity
from tests.parity.own import OwnData, OwnModule

class Mine(OwnModule):
    pass

{guard}
    strategy = HybridParallelStrategy(sharding="zero2", num_microbatches=2)
    report = check_parity(Mine, OwnData(), strategy, steps=2, devices=2, options=ParityOptions(accelerator="cpu"))
    assert report.raise_if_different() is report
    print(report)
    print(json.dumps(report.to_dict()))
"""


def test_weights_drawn_late_are_the_same_on_every_rank() -> None:
    report = gate(NeedsConfiguring, OwnData, {"sharding": "zero3"}, devices=2)
    assert report.same, str(report)


def test_a_loss_that_is_no_mean_over_rows_differs_and_is_explained() -> None:
    report = gate(partial(OwnModule, reduction="sum"), OwnData, {"num_microbatches": 3}, devices=1)
    assert not report.same
    assert any("/ num_microbatches (3)" in each for each in report.diagnoses), str(report)
    assert any("training_step returns a sum over its rows" in each for each in report.notes), str(report)
    with pytest.raises(ParityError, match="num_microbatches"):
        report.raise_if_different()


class _Normalised(OwnModule):
    def __init__(self) -> None:
        super().__init__()
        self.middle.append(nn.BatchNorm1d(16))


def test_batch_normalisation_differs_where_the_batch_is_cut_and_is_named() -> None:
    cut = gate(_Normalised, OwnData, {"num_microbatches": 2}, devices=1)
    assert not cut.same
    assert any("1 BatchNorm modules normalise over the rows at hand" in each for each in cut.notes), str(cut)


def test_a_bound_is_shown_where_nothing_differs() -> None:
    report = gate(OwnModule, OwnData, {}, devices=1)
    (weights,) = [row for row in report.rows if row.quantity == "weights after the step"]
    assert weights.difference == 0
    assert 0 < weights.allowed < 1e-3


def test_a_failing_rank_is_shown_by_its_traceback_and_logs_are_kept() -> None:
    with pytest.raises(WorkerFailedError) as caught:
        hybrid_strategy.check_parity(FailsOnRank1, OwnData, devices=2, options=OPTIONS)
    text = str(caught.value)
    assert "ValueError: the user's own fault" in text
    assert text.endswith("in the layout run")
    log = Path(text.split("log: ")[1].splitlines()[0])
    assert "the user's own fault" in log.read_text()
    assert not list(log.parent.parent.glob("rank*"))


def test_a_run_that_hangs_ends_in_time_and_says_where_it_stood() -> None:
    started = time.monotonic()
    with pytest.raises(WorkerFailedError, match="the run did not end in this time") as caught:
        hybrid_strategy.check_parity(
            HangsOnRank1, OwnData, devices=2, options=hybrid_strategy.ParityOptions(accelerator="cpu", timeout_seconds=25)
        )
    assert "stood here" in str(caught.value)
    assert "training_step" in str(caught.value)
    assert time.monotonic() - started < 120


def _run(guard: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "mine.py"
    script.write_text(SCRIPT.format(guard=guard))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])}
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=150)


def test_a_script_that_defines_its_module_with_real_weights(tmp_path: Path) -> None:
    done = _run('if __name__ == "__main__":', tmp_path)
    assert done.returncode == 0, done.stderr
    assert "gives the numbers of one process" in done.stdout
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["same"], report["steps"], report["num_tensors"]) == (True, 2, 12)
    assert report["notes"] == ["dropout was set to 0 in 1 modules of both runs: layouts draw other masks"]


def test_a_script_that_would_ask_again_in_every_process_is_told_so(tmp_path: Path) -> None:
    done = _run("if True:", tmp_path)
    assert done.returncode == 1
    assert 'if __name__ == "__main__"' in done.stderr


def test_what_cannot_be_sent_to_another_process_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be picklable"):
        hybrid_strategy.check_parity(lambda: OwnModule(), OwnData, devices=2, options=OPTIONS)


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ({"tensor_paralel_size": 2}, "Did you mean 'tensor_parallel_size'"),
        ({"pipeline_parallel_size": 3}, "Set 1, 2 or 4"),
        ({"sharding": "zero9"}, "Did you mean 'zero"),
        ({"num_microbatches": 0}, "num_microbatches is 0"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_before_any_process(
    strategy: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.Popen._execute_child", None)
    with pytest.raises(ConfigError, match=words):
        hybrid_strategy.check_parity(OwnModule, OwnData, strategy, devices=4, options=OPTIONS)


def test_arguments_of_the_trainer_that_the_check_needs_itself_are_refused() -> None:
    options = hybrid_strategy.ParityOptions(trainer={"devices": 4})
    with pytest.raises(ConfigError, match=r"trainer.devices is 4: .* Leave it out"):
        hybrid_strategy.check_parity(OwnModule, OwnData, options=options)


def test_a_size_that_does_not_fit_the_layout_raises_a_layout_error() -> None:
    with pytest.raises(LayoutError):
        hybrid_strategy.check_parity(OwnModule, OwnData, {"data_parallel_size": 3}, devices=2, options=OPTIONS)


def test_the_number_of_processes_is_the_product_of_the_sizes() -> None:
    from hybrid_strategy.parity.request import make_request

    strategy = {"data_parallel_size": 2, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    assert make_request(OwnModule, OwnData, strategy, 3, None, None).world_size == 8
    assert make_request(OwnModule, OwnData, {"tensor_parallel_size": 2}, 3, None, None).world_size == 2
    assert make_request(OwnModule, OwnData, {"tensor_parallel_size": 2}, 3, 6, None).layout.data_parallel_size == 3


def test_nothing_is_left_behind() -> None:
    with temporary_folder() as folder:
        assert folder.is_dir()
    assert not folder.exists()
    with pytest.raises(KeyboardInterrupt), temporary_folder() as folder:
        raise KeyboardInterrupt
    assert not folder.exists()
