"""The strategy's arguments are the same everywhere, and explained."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid_strategy import HybridParallelStrategy
from hybrid_strategy.config.settings import StrategySettings
from hybrid_strategy.strategy.options import Options

ROOT = Path(__file__).resolve().parents[2]
LIGHTNING = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"}
"""Keyword arguments that the Trainer fills in; they are Lightning's and explained there."""


def arguments() -> dict[str, inspect.Parameter]:
    """The arguments that users set."""
    signature = inspect.signature(HybridParallelStrategy.__init__)
    return {name: each for name, each in signature.parameters.items() if name not in LIGHTNING | {"self"}}


def documented(docstring: str) -> dict[str, str]:
    """Name -> text of the `Args:` section."""
    section = re.search(r"\n    Args:\n(.*?)\n\n", docstring, re.DOTALL)
    assert section is not None
    return dict(re.findall(r"^        (\w+): (.+)$", section[1], re.MULTILINE))


def test_every_argument_is_documented_in_order() -> None:
    docstring = HybridParallelStrategy.__doc__ or ""
    assert list(documented(docstring)) == list(arguments())
    assert all(len(text) > 20 for text in documented(docstring).values())


def test_every_argument_has_a_type_and_a_default() -> None:
    for name, each in arguments().items():
        assert each.annotation is not inspect.Parameter.empty, name
        assert each.default is not inspect.Parameter.empty, name


def test_options_hold_every_argument() -> None:
    assert [each.name for each in fields(Options)] == list(arguments())


@pytest.mark.parametrize("source", ["settings", "conf"])
def test_configuration_has_every_argument_with_its_default(source: str) -> None:
    have: dict[str, Any]
    if source == "settings":
        have = {each.name: each.default for each in fields(StrategySettings)}
    else:
        have = yaml.safe_load((ROOT / "conf" / "strategy" / "hybrid.yaml").read_text())
    have.pop("_target_")
    assert have == {name: each.default for name, each in arguments().items()}
