"""The plan of a configuration: as many processes as are needed, on what there is."""

from __future__ import annotations

import json

import pytest

from hybrid_strategy.config import world as world_module
from hybrid_strategy.config.compose import Source, run_config
from hybrid_strategy.config.forecasting import forecast_of
from hybrid_strategy.config.plan import by_full_key, plan_of
from hybrid_strategy.config.settings import StrategySettings
from hybrid_strategy.config.world import World, visible_gpus
from hybrid_strategy.errors import ConfigError


def _world(*overrides: str) -> World:
    return plan_of(run_config(Source(("model=llama_tiny", "data.global_batch_size=48", *overrides)))).world


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch):
    def have(count: int) -> None:
        monkeypatch.setattr(world_module, "visible_gpus", lambda: count)

    return have


@pytest.mark.parametrize(
    ("count", "overrides", "devices", "accelerator"),
    [
        (0, (), 1, "cpu"),
        (0, ("strategy=tp2_pp2",), 4, "cpu"),
        (0, ("cluster.devices=3",), 3, "cpu"),
        (8, (), 8, "cuda"),
        (8, ("strategy=pp2",), 8, "cuda"),
        (8, ("strategy=dp2",), 2, "cuda"),
        (3, ("strategy=pp2",), 2, "cuda"),
        (1, ("strategy=pp2",), 2, "cpu"),
        (8, ("strategy=pp2", "trainer=cpu"), 2, "cpu"),
        (8, ("cluster.devices=4", "strategy=pp2"), 4, "cuda"),
        (2, ("cluster.devices=4", "strategy=pp2"), 4, "cpu"),
    ],
)
def test_auto_takes_the_gpus_that_the_layout_can_use(gpus, count, overrides, devices, accelerator):
    gpus(count)
    found = _world(*overrides)
    assert (found.devices, found.accelerator) == (devices, accelerator)


def test_what_is_left_unused_is_said(gpus):
    gpus(3)
    assert _world("strategy=pp2").note == "2 of 3 GPUs are used"
    gpus(1)
    assert _world("strategy=pp2").note == "only 1 GPU for the 2 processes of this layout: running on the CPU"


def test_gpus_that_are_asked_for_must_be_there(gpus):
    gpus(0)
    with pytest.raises(ConfigError, match=r"trainer\.accelerator is 'gpu': torch sees no GPU here"):
        _world("trainer.accelerator=gpu")
    gpus(1)
    with pytest.raises(ConfigError, match=r"trainer\.accelerator is 'cuda': .* 2 are needed, torch sees 1"):
        _world("trainer=gpu", "strategy=pp2")
    with pytest.raises(ConfigError, match=r"cluster\.devices is 4"):
        _world("trainer=gpu", "cluster.devices=4")


def test_another_cluster_is_planned_without_being_here():
    found = _world("cluster=h200", "cluster.num_nodes=2", "strategy=tp2", "data.global_batch_size=64")
    assert (found.num_nodes, found.devices, found.size) == (2, 8, 16)


def test_a_wheel_for_the_cpu_sees_no_gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(world_module, "version", lambda _: "2.13.0+cpu")
    assert visible_gpus() == 0


def test_the_plan_is_json():
    planned = plan_of(run_config(Source(("model=llama_tiny", "strategy=tp2_pp2"))))
    read = json.loads(json.dumps(planned.to_dict()))
    assert read["world_size"] == 4
    assert read["name"] == "tp2_pp2"
    assert len(read["rank_parameters"]) == 4


def test_the_learning_rate_grows_with_the_batch():
    overrides = ("learning_rate.scaling=sqrt", "learning_rate.base_batch_size=8", "data.global_batch_size=32")
    planned = plan_of(run_config(Source((*overrides, "optimizer.learning_rate=1e-3"))))
    assert planned.plan.learning_rate == pytest.approx(2e-3)


def test_a_refusal_speaks_in_full_keys():
    assert by_full_key("schedule is 'x': no. Set schedule=1F1B.") == "strategy.schedule is 'x': no. Set strategy.schedule=1F1B."
    assert by_full_key("my_schedule is 1: strategy.schedule=x.") == "my_schedule is 1: strategy.schedule=x."


def test_settings_are_the_constructors_arguments():
    import inspect
    from dataclasses import fields

    from hybrid_strategy.strategy.hybrid import HybridParallelStrategy

    parameters = inspect.signature(HybridParallelStrategy).parameters.values()
    given = {each.name: each.default for each in parameters if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD}
    ours = {each.name: each.default for each in fields(StrategySettings) if each.name != "_target_"}
    assert ours == given


@pytest.mark.parametrize(("asked", "share"), [("float32", 1.0), ("bfloat16", 0.5)])
def test_gradients_are_billed_in_the_type_in_which_they_travel(asked: str, share: float):
    def sent(*overrides: str) -> float:
        config = run_config(Source(("model=llama_tiny", "strategy=dp2", "data.global_batch_size=48", *overrides)))
        found = forecast_of(config, plan_of(config))
        assert found is not None
        return sum(line.sent_bytes for line in found.bill.lines if line.what == "gradients")

    assert sent(f"strategy.reduce_dtype={asked}") == share * sent() > 0
