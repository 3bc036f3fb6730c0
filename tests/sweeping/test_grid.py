"""Overrides of a sweep: products, sets that go together, values that arrive as they were written."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from hybrid_strategy.errors import ConfigError
from hybrid_strategy.sweeping.grid import _literal, choices_of, every, sets_of

NASTY = (
    "a b",
    "x=1, y #2",
    "$HOME `id` $(id)",
    "it's",
    'say "so"',
    "back\\slash",
    'back\\"quote',
    "ends\\",
    "ünï ☃",
    "line\nbreak",
    "tab\tstop",
    "~/x",
    "a|b",
    "[1,2]",
    "{a:1}",
    "1e3",
    "true",
    "null",
    "",
    "  padded ",
    "a:b",
    "runs/epoch=3-step=10.ckpt",
    "mlx5_0:1,mlx5_3:1",
)


def _value(text: str) -> object:
    return OverridesParser.create().parse_overrides([text])[0].value()


@pytest.mark.parametrize("text", NASTY)
def test_text_of_a_file_arrives_as_it_was_written(text: str):
    assert _value(f"name={_literal(text)}") == text


@pytest.mark.parametrize("value", [1, 1.5, True, None, ["a b", 1], {"k": "v w"}, 1e-5])
def test_other_values_of_a_file_keep_their_type(value: object):
    found = _value(f"name={_literal(value)}")
    assert found == value
    assert type(found) is type(value)


def test_every_combination_once_the_last_key_fastest():
    choices = choices_of({}, ["seed=1,2,2", "trainer.max_steps=5,6", "name=x"])
    assert every(choices) == [
        ("seed=1", "trainer.max_steps=5", "name=x"),
        ("seed=1", "trainer.max_steps=6", "name=x"),
        ("seed=2", "trainer.max_steps=5", "name=x"),
        ("seed=2", "trainer.max_steps=6", "name=x"),
    ]


def test_the_command_line_wins_over_the_file():
    choices = choices_of({"seed": "1,2", "trainer.max_steps": "5,6"}, ["seed=3"])
    assert every(choices) == [("trainer.max_steps=5", "seed=3"), ("trainer.max_steps=6", "seed=3")]


def test_quoted_values_of_a_sweep_keep_their_quotes():
    (choice,) = choices_of({}, ['name="a b","c, d"'])
    assert [_value(each) for each in choice.overrides] == ["a b", "c, d"]


def test_a_deletion_stays_a_deletion():
    (choice,) = choices_of({}, ["~callbacks.progress"])
    assert choice.overrides == ("~callbacks.progress",)


def test_ranges_are_walked():
    (choice,) = choices_of({}, ["seed=range(1,4)"])
    assert choice.values == (1, 2, 3)


def test_an_interval_has_no_points():
    with pytest.raises(ConfigError, match="interval"):
        choices_of({}, ["optimizer.learning_rate=interval(0,1)"])


def test_sets_go_together_and_the_command_line_takes_a_key_out_of_them():
    points = [{"seed": 1, "trainer.max_steps": 5}, {"seed": 2, "trainer.max_steps": 6}]
    assert sets_of(points, []) == [["seed=1", "trainer.max_steps=5"], ["seed=2", "trainer.max_steps=6"]]
    assert sets_of(points, choices_of({}, ["trainer.max_steps=9"])) == [["seed=1"], ["seed=2"]]
    assert sets_of(points, choices_of({}, ["trainer.max_steps=9", "seed=4"])) == [[]]


def test_a_set_that_is_no_mapping_is_named():
    with pytest.raises(ConfigError, match=r"hydra.sweeper.points\[0\] is 3"):
        sets_of([3], [])


@pytest.mark.parametrize("key", ["sed", "trainer.max_step", "strategy.tensor_paralel_size"])
def test_a_key_of_a_file_that_does_not_exist_is_refused_with_the_nearest(key: str):
    with pytest.raises(ConfigError, match="Did you mean"):
        choices_of({key: "1,2"}, [])
    with pytest.raises(ConfigError, match="Did you mean"):
        sets_of([{key: 1}], [])
