"""Names of points: what varies, safe as folders, never two alike."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hybrid_strategy.spec.batch import BatchSpec
from hybrid_strategy.spec.layout import Layout
from hybrid_strategy.spec.plan import Plan
from hybrid_strategy.sweeping.naming import tags, unique, word

PLAN = Plan(Layout(2, 2, 2, sharding="zero1"), BatchSpec(16, num_microbatches=8), 0.1)


def test_the_name_of_the_issue():
    swept = {"strategy.tensor_parallel_size": "2", "strategy.sharding": "zero1", "strategy.num_microbatches": "8"}
    plan = Plan(Layout(1, 2, 2, sharding="zero1"), BatchSpec(16, num_microbatches=8), 0.1)
    assert "_".join(tags(swept, plan)) == "tp2_pp2_zero1_m8"


def test_keys_that_are_no_layout_do_not_name_it():
    assert tags({"++data.global_batch_size": "64", "optimizer.learning_rate": "0.001"}, PLAN) == ["bs64", "lr0.001"]


@given(st.text(max_size=60))
def test_any_value_becomes_part_of_a_folder(value: str):
    made = word("x", value)
    assert made.encode("ascii")
    assert not set(made) & set("/\\ \n\t$`\"'*?~")
    assert len(made) < 60


def test_values_that_look_alike_in_a_folder_stay_apart():
    assert word("", "a/b") != word("", "a:b")
    assert word("", "x" * 50) != word("", "x" * 49 + "y")


def test_equal_names_are_told_apart_by_what_differs_or_by_a_number():
    swept = [{"strategy": "pp2"}, {"strategy": "pp2_gpipe"}]
    assert unique(["pp2", "pp2"], swept) == ["pp2_pp2", "pp2_pp2_gpipe"]
    assert unique(["a", "a"], [{}, {}]) == ["a", "a_2"]
    assert unique(["a"], [{}], taken=["A"]) == ["a_2"]
