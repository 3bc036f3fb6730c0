from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_strategy.errors import ConfigError
from hybrid_strategy.planning.learning_rate import SCHEDULES, learning_rate_at, scaled_learning_rate
from hybrid_strategy.spec.training import LearningRateSpec


@pytest.mark.parametrize(
    ("rule", "optimizer", "expected"),
    [
        ("none", "adamw", 1.0),
        ("linear", "adamw", 4.0),
        ("sqrt", "sgd", 2.0),
        ("power", "adamw", 4.0**0.25),
        ("auto", "adamw", 2.0),
        ("auto", "sgd", 4.0),
    ],
)
def test_scaling(rule: str, optimizer: str, expected: float) -> None:
    assert scaled_learning_rate(1.0, 256, 64, rule, 0.25, optimizer) == pytest.approx(expected)


def test_scaling_that_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"learning_rate.scaling is 'lin': .* Did you mean 'linear'\?"):
        scaled_learning_rate(1.0, 256, 64, "lin")
    with pytest.raises(ConfigError, match=r"learning_rate.base_batch_size is 0: linear scaling needs it\. Set the global"):
        scaled_learning_rate(1.0, 256, 0, "linear")
    assert scaled_learning_rate(1.0, 256, 0, "none") == 1.0


@given(
    st.sampled_from(SCHEDULES), st.integers(0, 20), st.integers(1, 60), st.floats(0, 1), st.floats(1e-6, 1), st.integers(0, 99)
)
def test_between_the_floor_and_the_peak(schedule: str, warmup: int, total: int, ratio: float, peak: float, step: int) -> None:
    spec = LearningRateSpec(schedule, warmup, ratio, total)
    rate = learning_rate_at(step, spec, peak)
    assert 0 <= rate <= peak * (1 + 1e-12)
    if step < warmup:
        assert rate > 0, "a step without a rate would be lost"
    else:
        assert rate >= ratio * peak * (1 - 1e-12)
        assert learning_rate_at(step + 1, spec, peak) <= rate


def test_warm_up_ends_at_the_peak() -> None:
    spec = LearningRateSpec("cosine", warmup_steps=10, total_steps=100)
    assert [learning_rate_at(step, spec, 1.0) for step in (0, 4, 9, 10)] == [0.1, 0.5, 1.0, 1.0]
    assert learning_rate_at(100, spec, 1.0) == pytest.approx(0.1)


def test_a_run_shorter_than_its_warm_up() -> None:
    spec = LearningRateSpec("cosine", warmup_steps=100, total_steps=3)
    assert learning_rate_at(2, spec, 1.0) == 0.03


def test_schedules_that_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"learning_rate.schedule is 'cosin': .* Did you mean 'cosine'\?"):
        learning_rate_at(0, LearningRateSpec("cosin"), 1.0)
    with pytest.raises(
        ConfigError, match=r"learning_rate.total_steps is 0: the schedule cosine falls until then\. Set the number"
    ):
        learning_rate_at(0, LearningRateSpec("cosine"), 1.0)
