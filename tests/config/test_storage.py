"""What the parent writes is what every rank reads, whatever stands in it."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_strategy.config.build import make
from hybrid_strategy.config.compose import Source, run_config
from hybrid_strategy.config.messages import quoted
from hybrid_strategy.config.settings import RunConfig
from hybrid_strategy.config.storage import read_config, write_config

NASTY = [
    "a=b",
    "a,b",
    "run#1",
    "~/x",
    "two words",
    "ünïcode ☃",
    "$HOME",
    "${name}",
    r"\${name}",
    "a|b",
    "'",
    '"',
    "1e-3",
    "null",
    "[x]",
]
TEXT = st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=30) | st.sampled_from(
    [*NASTY, "${", r"\\${a}", "${a}${b}", "$${a"]
)


def _round_trip(config: RunConfig) -> RunConfig:
    with tempfile.TemporaryDirectory() as folder:
        write_config(config, Path(folder))
        return read_config(Path(folder))


@settings(max_examples=60, deadline=None)
@given(text=TEXT, other=TEXT, number=st.floats(allow_nan=False, allow_infinity=False), whole=st.integers(-(2**53), 2**53))
def test_a_configuration_survives_its_file(text: str, other: str, number: float, whole: int):
    model = {"_target_": "my.Module", "text": text, "deep": {"list": [other, number, whole, None, True]}}
    config = replace(
        RunConfig(), name=f"{other}x", seed=1, tags=(text, other), model=model, data={"_target_": "my.Data", "key": text}
    )
    assert _round_trip(config) == config


@pytest.mark.parametrize("value", NASTY)
def test_a_value_typed_as_advised_reaches_the_file_unchanged(value: str):
    if "${" in value:
        return  # an interpolation is meant
    override = quoted(f"model.text={value}")[1:-1].replace("'\\''", "'")
    config = run_config(Source(("model._target_=my.Module", override)))
    assert _round_trip(config).model["text"] == value


def test_every_shipped_configuration_survives_its_file():
    config = run_config(Source(("experiment=quickstart",)))
    assert _round_trip(config) == config


def test_text_reaches_the_object_unchanged():
    assert make({"_target_": "builtins.dict", "a": "${x} $y", "b": {"c": r"\${z}"}}, "model") == {
        "a": "${x} $y",
        "b": {"c": r"\${z}"},
    }
