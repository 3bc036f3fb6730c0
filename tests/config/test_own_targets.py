"""Modules, data and callbacks of the user's own have any key they like."""

from __future__ import annotations

import pytest

from hybrid_strategy.config.build import make
from hybrid_strategy.config.compose import Source, run_config
from hybrid_strategy.config.plan import plan_of
from hybrid_strategy.errors import ConfigError


def test_a_module_of_the_users_own_has_its_keys_and_no_others():
    config = run_config(Source(("model._target_=my.Module", "model.width=3", "model.inner.depth=2", "+model.name=x")))
    assert config.model == {"_target_": "my.Module", "width": 3, "inner": {"depth": 2}, "name": "x"}


def test_it_may_be_given_as_one_mapping():
    assert run_config(Source(("model={_target_: my.Module, width: 3}",))).model == {"_target_": "my.Module", "width": 3}


def test_data_of_the_users_own():
    config = run_config(Source(("data._target_=my.Data", "data.batch_size=4", "strategy=dp2")))
    assert config.data == {"_target_": "my.Data", "batch_size": 4}
    assert plan_of(config).plan.batch.global_batch_size == 8


def test_the_size_of_its_batch_may_be_unknown():
    planned = plan_of(run_config(Source(("data._target_=my.Data", "strategy=pp2")))).plan
    assert planned.batch.global_batch_size == 0
    assert planned.batch.num_microbatches == 8
    with pytest.raises(ConfigError, match=r"learning_rate\.scaling is 'auto': it needs the size of the batch"):
        plan_of(run_config(Source(("data._target_=my.Data", "learning_rate.scaling=auto", "learning_rate.base_batch_size=8"))))


def test_a_shipped_target_keeps_its_types():
    target = "model._target_=hybrid_strategy.modules.language_model.LanguageModel"
    assert run_config(Source((target, "model.num_layers=3"))).model["num_layers"] == 3


def test_callbacks_can_be_added_and_taken_away():
    config = run_config(
        Source(("callbacks.mine={_target_: my.Callback, every: 3}", "callbacks.throughput=null", "~callbacks.progress"))
    )
    assert config.callbacks["mine"] == {"_target_": "my.Callback", "every": 3}
    assert config.callbacks["throughput"] is None
    assert "progress" not in config.callbacks


def test_a_plan_without_a_shape_still_checks_the_layout():
    with pytest.raises(ConfigError, match=r"strategy\.schedule is 'x'"):
        plan_of(run_config(Source(("model._target_=my.Module", "strategy.schedule=x"))))


def test_objects_are_made_as_hydra_would():
    made = make({"_target_": "builtins.dict", "a": {"_target_": "builtins.complex", "_args_": [1, 2]}, "b": [{"c": 1}]}, "model")
    assert made == {"a": 1 + 2j, "b": [{"c": 1}]}
    assert make({"_target_": "builtins.dict", "_partial_": True, "a": 1}, "model")(b=2) == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"_target_": "no_such_module.Class"}, "No module named 'no_such_module'"),
        ({"_target_": "collections.NoSuch"}, "NoSuch"),
        ({"_target_": "collections.ChainMap", "x": 1}, "unexpected keyword argument 'x'"),
    ],
)
def test_what_cannot_be_made_is_refused_by_its_key(values, words):
    with pytest.raises(ConfigError) as caught:
        make(values, "callbacks.mine")
    assert str(caught.value).startswith(f"callbacks.mine._target_ is '{values['_target_']}': it cannot be made")
    assert words in str(caught.value)


def test_settings_that_an_own_model_would_ignore_are_refused():
    own = "model._target_=my.Module"
    with pytest.raises(ConfigError, match=r"^optimizer\.learning_rate is 1e-3: .* it would be ignored"):
        run_config(Source((own, "optimizer.learning_rate=1e-3")))
    with pytest.raises(ConfigError, match=r"^optimizer is sgd"):
        run_config(Source((own, "optimizer=sgd")))
    taken = run_config(Source((own, "optimizer.learning_rate=1e-3", "+model.rate=${optimizer.learning_rate}")))
    assert taken.model["rate"] == 1e-3
