"""The command line without a run: answers, refusals, exit codes, without the packages that take seconds to import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_strategy.cli.arguments import Arguments
from hybrid_strategy.cli.main import COMMANDS, EXIT_CODES, main
from hybrid_strategy.cli.train import resume_command
from hybrid_strategy.config.compose import Source

_AT_ONCE = """
import sys
from hybrid_strategy.cli.main import main
code = main(sys.argv[1:])
slow = {"torch", "lightning", "wandb", "numpy", "transformers"} & set(sys.modules)
sys.exit(f"imported: {slow}" if slow else code)
"""


def _hybrid(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What the command says; its exit code is 1 if it imported what takes long (`benchmarks/start_up.py` has the seconds)."""
    command = [sys.executable, "-c", _AT_ONCE, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_tells_commands_and_exit_codes(arguments: tuple[str, ...], capsys):
    assert main(arguments) == 0
    text = capsys.readouterr().out
    for name in COMMANDS:
        assert f"  {name} " in text
    for code, meaning in EXIT_CODES.items():
        assert f"  {code}" in text
        assert meaning in text


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("hybrid-strategy ")


def test_an_unknown_command_names_the_nearest(capsys):
    assert main(["trian"]) == 2
    assert "Did you mean 'train'?" in capsys.readouterr().err


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help(command: str, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert f"usage: hybrid {command}" in capsys.readouterr().out


def test_an_unknown_flag_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as end:
        main(["train", "--cgf", "job"])
    assert end.value.code == 2


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["strategy.tensor_parallel_size=3"], "strategy.tensor_parallel_size"),
        (["strategy=dp2_tp2", "cluster.devices=6"], "strategy."),
        (["strategy.pipeline_parallel_size=9"], "strategy.pipeline_parallel_size"),
        (["strategy.schedule=1F1C"], "strategy.schedule"),
        (["trainer.max_step=3"], "trainer.max_step"),
        (["+trainer.max_step=3"], "trainer.max_step"),
        (["model.num_layers=x"], "model.num_layers"),
        (["cluster.num_nodes=2"], "cluster.num_nodes"),
        (["cluster.launcher=ship"], "cluster.launcher"),
        (["resume=/no/such/path"], "resume"),
        (["strategy=hybird"], "strategy"),
    ],
)
def test_a_wrong_configuration_is_refused_at_once_and_leaves_nothing(overrides: list[str], key: str, tmp_path: Path):
    found = _hybrid(tmp_path, "train", *overrides)
    assert found.returncode == 2
    assert found.stderr.startswith(key)
    assert len(found.stderr.strip().splitlines()) == 1
    assert "Traceback" not in found.stderr
    assert found.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_the_configuration_is_shown_at_once(tmp_path: Path):
    found = _hybrid(tmp_path, "train", "--cfg", "job", "strategy=tp2_pp2")
    assert found.returncode == 0
    assert "tensor_parallel_size: 2" in found.stdout
    assert list(tmp_path.iterdir()) == []


def test_hydras_flags_reach_hydra(tmp_path: Path):
    assert "run_dir" in _hybrid(tmp_path, "train", "--cfg", "job", "--package", "paths").stdout
    assert "checkpoints" in _hybrid(tmp_path, "train", "name=x", "--cfg", "job", "--resolve", "paths.run_dir=/x").stdout
    assert "main" in _hybrid(tmp_path, "plan", "--info", "searchpath").stdout
    found = _hybrid(tmp_path, "train", "--cfg", "job", "trainer.max_step=3")
    assert found.returncode == 2
    assert found.stdout == ""


def test_plan_starts_nothing_and_imports_no_torch(tmp_path: Path):
    code = (
        "import sys; from hybrid_strategy.cli.main import main; main(['plan', 'strategy=tp2_pp2', '--json']); "
        "assert not {'torch', 'lightning', 'wandb', 'numpy'} & set(sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(found.stdout)["world_size"] == 4
    assert list(tmp_path.iterdir()) == []


def test_plan_prints_a_table_without_escape_codes(tmp_path: Path):
    found = _hybrid(tmp_path, "plan", "strategy=pp2")
    assert found.returncode == 0
    assert "1F1B, 2 stages, 1 a rank, bubble" in found.stdout
    assert "\x1b" not in found.stdout


def test_overrides_may_stand_on_both_sides_of_a_flag(tmp_path: Path):
    found = _hybrid(tmp_path, "plan", "strategy=pp2", "--json", "model=llama_tiny")
    assert json.loads(found.stdout)["num_parameters"] == 213_568


def test_the_resume_command_can_be_pasted():
    source = Source(("experiment=quickstart", 'name="a b"', "resume=old", "trainer.max_steps=3"), "my conf")
    given = Arguments(source, None, False, ())
    assert resume_command(given, Path("/runs/a=b")) == (
        "hybrid train --config-dir 'my conf' experiment=quickstart 'name=\"a b\"' trainer.max_steps=3 'resume=\"/runs/a=b\"'"
    )
    assert resume_command(given, Path("/runs/ab"), ("trainer.max_steps=6",)).endswith(" trainer.max_steps=6 resume=/runs/ab")
    assert "max_steps=3" not in resume_command(given, Path("/runs/ab"), ("trainer.max_steps=6",))


def test_the_command_is_on_the_path():
    script = Path(sys.executable).with_name("hybrid")
    if not os.access(script, os.X_OK):
        pytest.skip("the package is imported from its source: the script exists where it is installed, as by make install")
    assert subprocess.run([script, "--version"], capture_output=True, text=True, check=True).stdout.startswith("hybrid-strategy")


def test_a_folder_that_is_no_sweep_is_named_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    assert main(["sweep", "status", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.startswith(f"NAME is '{tmp_path}/run': there is no sweep of this name")
