"""B59, kind of fault: a run that was not closed takes what the next one of the process logs.

Three runs one after another in one process, the second of which raises, are three W&B runs, each with its own configuration.
"""

from __future__ import annotations

from pathlib import Path

from hybrid_strategy.cli import fit
from hybrid_strategy.cli import point as command
from tests.support.ranks import run_ranks
from tests.support.wandb_files import config, history, runs

OWN = (
    "model._target_=tests.cli.own_module.OwnModule",
    "data._target_=tests.cli.own_module.OwnData",
    "logger=csv_wandb",
    "trainer=cpu",
    "trainer.max_steps=3",
    "trainer.log_every_n_steps=1",
    "strategy=single",
    "cluster.devices=1",
    "callbacks=none",
)


def _three(folders: list[str]) -> list[str]:
    said = []
    for folder in folders:
        try:
            fit.run(Path(folder))
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def test_three_runs_of_one_process_are_three(tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(3)]
    for number, folder in enumerate(folders):
        fails = ["model.fail_rank=0", "model.fail_step=1"] if number == 1 else []
        assert command.main(["prepare", str(folder), *OWN, f"seed={number}", *fails]) == 0
    (said,) = run_ranks(_three, 1, [str(each) for each in folders], process_group=False)
    assert said == ["", "made to fail", ""]
    found = [runs(folder) for folder in folders]
    assert [len(each) for each in found] == [1, 1, 1]
    assert len({run.name.rpartition("-")[2] for (run,) in found}) == 3
    for number, (run,) in enumerate(found):
        assert config(run)["seed"] == number
        steps = [row["trainer/global_step"] for row in history(run) if "train_loss" in row]
        assert steps == ([0] if number == 1 else [0, 1, 2])
