"""The plain side of the frozen dataclasses says the same as they do."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass, field

import pytest
from omegaconf import OmegaConf

from hybrid_strategy.config.door import describe, door, from_plain, known_keys
from hybrid_strategy.config.settings import OPEN_GROUPS, RunConfig
from hybrid_strategy.config.storage import as_values


@dataclass(frozen=True)
class Inner:
    sizes: tuple[int, ...] = (1, 2)
    cuts: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Outer:
    needed: int
    inner: Inner = field(default_factory=Inner)
    either: int | str = "auto"


def test_defaults_pass_the_door_and_come_back():
    plain = OmegaConf.structured(door(Outer))
    assert OmegaConf.is_missing(plain, "needed")
    plain.needed = 3
    assert from_plain(Outer, OmegaConf.to_container(plain)) == Outer(3)


def test_lists_come_back_as_tuples():
    plain = OmegaConf.merge(OmegaConf.structured(door(Outer)), {"needed": 1, "inner": {"sizes": [4], "cuts": [5, 6]}})
    restored = from_plain(Outer, OmegaConf.to_container(plain))
    assert restored.inner == Inner((4,), (5, 6))
    with pytest.raises(FrozenInstanceError):
        restored.needed = 2


def test_the_whole_schema_says_what_the_frozen_classes_say():
    plain = OmegaConf.to_container(OmegaConf.structured(door(RunConfig, OPEN_GROUPS)))
    frozen = as_values(RunConfig())
    assert {key: value for key, value in plain.items() if key not in OPEN_GROUPS} == {
        key: value for key, value in frozen.items() if key not in OPEN_GROUPS
    }


def test_unknown_keys_are_found_at_any_depth():
    assert known_keys(Outer, "inner.sizes[0]") is None
    assert known_keys(Outer, "inner.size") == ("inner.size", ["sizes", "cuts"])
    assert known_keys(Outer, "outer.x") == ("outer", ["needed", "inner", "either"])


def test_types_are_told_in_words():
    assert describe(Outer, "either") == "a whole number or text"
    assert describe(Outer, "inner.cuts") == "a list or null"
    assert describe(Outer, "inner.sizes[1]") == "a whole number"
    assert describe(Outer, "inner") == "a mapping"
