"""B58, kind of fault: what crosses processes is pickled, with locks and whole modules in it, or ranks are the command again.

Ours is plain data in files: a point is JSON and YAML that any process can read, and ranks are started by module and folder, never
by the arguments of the process that submits.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybrid_strategy.cli import point as command
from hybrid_strategy.config.storage import read_config, write_config
from hybrid_strategy.sweeping.points import read_point, write_point
from hybrid_strategy.sweeping.prepare import prepare_alone
from hybrid_strategy.sweeping.settings import SlurmSettings
from hybrid_strategy.sweeping.slurm.script import script_of


def test_a_point_is_plain_data_that_reads_back_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []

    def keep(*arguments: object) -> object:
        kept.append(prepare_alone(*arguments))  # type: ignore[arg-type]
        return kept[-1]

    monkeypatch.setattr(command, "prepare_alone", keep)
    folder = tmp_path / "run"
    assert command.main(["prepare", str(folder), "model=llama_tiny", "trainer=cpu", "strategy=dp2", "cluster.devices=2"]) == 0
    made = kept[0]
    assert read_point(folder) == made.point
    assert {path.name for path in folder.iterdir()} == {"config.yaml", "plan.json", "point.json"}
    before = (folder / "config.yaml").read_text()
    write_config(read_config(folder), folder)
    assert (folder / "config.yaml").read_text() == before
    write_point(made.point, made.config, made.planned)
    assert json.loads((folder / "plan.json").read_text())["devices"] == 2


def test_ranks_are_started_by_module_and_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert command.main(["prepare", str(folder), "model=llama_tiny", "trainer=cpu", "strategy=dp2", "cluster.devices=2"]) == 0
    point = read_point(folder)
    assert point is not None
    text = script_of(point, SlurmSettings(python="python"), "s", "hybrid_strategy.cli.fit:run")
    (started,) = [line for line in text.replace("\\\n", "").splitlines() if " srun " in line and not line.startswith("#")]
    assert started.endswith('"$PYTHON" -m hybrid_strategy.launch.slurm_rank hybrid_strategy.cli.fit:run "$RUN"')
    assert "llama_tiny" not in text
