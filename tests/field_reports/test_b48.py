"""B48, kind of fault: a key that does not exist is accepted, or refused in a way that does not say what exists.

With and without `+`, alone and in a sweep over a group, a typo is refused by its full name with the nearest key.
"""

from __future__ import annotations

import pytest

from hybrid_strategy.config.compose import Source, run_config
from hybrid_strategy.errors import ConfigError
from hybrid_strategy.sweeping.grid import choices_of, every

TINY = ("model=llama_tiny", "trainer=cpu")


@pytest.mark.parametrize(
    ("override", "key", "advice"),
    [
        ("strategy.tensor_paralel_size=2", "strategy.tensor_paralel_size", "tensor_parallel_size"),
        ("+strategy.tensor_paralel_size=2", "strategy.tensor_paralel_size", "tensor_parallel_size"),
        ("++strategy.cp=2", "strategy.cp", "strategy."),
        ("strateggy.sharding=zero1", "strateggy", "strategy"),
        ("trainer.max_step=3", "trainer.max_step", "max_steps"),
        ("+newkey=1", "newkey", ""),
        ("trainer.devices=2", "trainer.devices", "cluster.devices"),
    ],
)
def test_a_key_that_does_not_exist_is_refused_by_name(override: str, key: str, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_config(Source((*TINY, override)))
    assert key in str(caught.value)
    assert advice in str(caught.value)


def test_a_sweep_over_a_group_and_a_key_of_its_options() -> None:
    points = every(choices_of({}, ["strategy=dp2,tp2", "strategy.num_microbatches=1,2"]))
    assert len(points) == 4
    for point in points:
        config = run_config(Source((*TINY, *point)))
        assert config.strategy.num_microbatches == int(point[1].rpartition("=")[2])
        assert (config.strategy.tensor_parallel_size == 2) == (point[0] == "strategy=tp2")


def test_a_typo_in_a_sweep_is_refused_before_it_starts() -> None:
    for point in every(choices_of({}, ["strategy=dp2,tp2", "strategy.sharing=zero1,zero2"])):
        with pytest.raises(ConfigError, match=r"strategy\.sharing"):
            run_config(Source((*TINY, *point)))
