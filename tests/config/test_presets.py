"""Every option of every group composes, is typed, and is either planned or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybrid_strategy.config import world
from hybrid_strategy.config.compose import Source, run_config
from hybrid_strategy.config.folders import shipped_folder
from hybrid_strategy.config.plan import plan_of
from hybrid_strategy.config.settings import GROUPS

CONF = shipped_folder("conf")
OPTIONS = sorted(f"{path.parent.name}={path.stem}" for group in GROUPS for path in (CONF / group).glob("*.yaml"))
HUGGING_FACE = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 32,
}
NOT_ALONE = {"model=own": "model._target_=my.Module", "data=own": "data._target_=my.Data", "model=hf": "model.config=config.json"}


def test_every_group_has_options():
    with_options_here = set(GROUPS) - {"sweeps"}  # its options lie in sweeps/
    assert {option.partition("=")[0] for option in OPTIONS} == with_options_here


@pytest.mark.parametrize("option", OPTIONS)
def test_option_composes_and_is_planned(option: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(HUGGING_FACE))
    monkeypatch.setattr(world, "visible_gpus", lambda: 1 if option == "trainer=gpu" else 0)
    overrides = [option, *([NOT_ALONE[option]] if option in NOT_ALONE else [])]
    config = run_config(Source(tuple(overrides)))
    planned = plan_of(config)
    assert planned.world.size == planned.plan.layout.world_size >= 1


@pytest.mark.parametrize("debug", sorted(path.stem for path in (CONF / "debug").glob("*.yaml")))
def test_debug_goes_with_an_experiment(debug: str):
    config = run_config(Source(("experiment=quickstart", f"debug={debug}")))
    assert config.name == "debug"
    assert config.model["hidden_size"] == 128
    plan_of(config)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("llama_tiny", 213_568), ("llama3_8b", 8_030_261_248), ("llama3_70b", 70_553_706_496), ("llama3_405b", 405_853_388_800)],
)
def test_models_have_their_published_sizes(name: str, parameters: int):
    assert plan_of(run_config(Source((f"model={name}",)))).plan.num_parameters == parameters


def test_llama_small_is_about_20_million():
    assert 15e6 < plan_of(run_config(Source(("model=llama_small",)))).plan.num_parameters < 25e6


def test_a_folder_of_the_users_own_adds_options(tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("_target_: my.Module\nwidth: 3\n")
    config = run_config(Source(("model=mine", "model.depth=2"), str(tmp_path)))
    assert config.model == {"_target_": "my.Module", "width": 3, "depth": 2}


def test_numbers_are_numbers_wherever_they_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RATE", "2e-5")
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "mine.yaml").write_text("learning_rate: 1e-3\n")
    from_file = run_config(Source(("optimizer=mine",), str(tmp_path)))
    from_line = run_config(Source(("optimizer.learning_rate=1e-3",)))
    from_environment = run_config(Source(("optimizer.learning_rate=${oc.env:RATE}", "model.hidden_size=${oc.env:RATE2,768}")))
    assert from_file.optimizer.learning_rate == from_line.optimizer.learning_rate == 1e-3
    assert from_environment.optimizer.learning_rate == 2e-5
    assert from_environment.model["hidden_size"] == 768
