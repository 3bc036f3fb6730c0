"""State becomes data; what is not data is named."""

from __future__ import annotations

import functools
import random
from collections import OrderedDict, defaultdict, deque
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from hybrid_strategy.checkpoint.content import CheckpointContent
from hybrid_strategy.checkpoint.encoding import decode, encode, plain, same
from hybrid_strategy.checkpoint.loading import load_checkpoint
from hybrid_strategy.checkpoint.saving import save_checkpoint


class Colour(str, Enum):
    RED = "red"


class Steps(int):
    pass


VALUES: list[tuple[Any, Any]] = [
    ({"a": 1, "b": [2.5, "x", None, True], 3: (1, b"z", 2j)},) * 2,
    (OrderedDict(a=defaultdict(list, b=[1])), {"a": {"b": [1]}}),
    (deque([1, 2]), [1, 2]),
    ({1, 2}, {1, 2}),
    (frozenset({1}), {1}),
    (Path("/a/b"), "/a/b"),
    (Colour.RED, "red"),
    (Steps(4), 4),
    (numpy.float64(0.5), 0.5),
    (numpy.arange(3), torch.arange(3)),
    (torch.nn.Parameter(torch.ones(2)), torch.ones(2)),
    (torch.bfloat16, torch.bfloat16),
    (torch.Size([1, 2]), torch.Size([1, 2])),
    (float("nan"), float("nan")),
    (random.Random(1).getstate(), random.Random(1).getstate()),
    (numpy.random.RandomState(1).get_state()[1], torch.from_numpy(numpy.random.RandomState(1).get_state()[1])),
]


@pytest.mark.parametrize(("value", "expected"), VALUES)
def test_data_comes_back(value: Any, expected: Any) -> None:
    copy, unsaved = plain(value)
    assert unsaved == []
    back = decode(encode(copy))
    assert type(back) is type(expected)
    assert same(back, expected)


def test_what_is_not_data_is_left_out_and_named() -> None:
    value = {"ok": 1, "f": functools.partial(print), "in": [1, SimpleNamespace(), 3], Path: 2, "set": {1, print}}
    copy, unsaved = plain(value, "hyper_parameters")
    assert copy == {"ok": 1, "in": [1, None, 3], "set": {1}}
    assert sorted(unsaved) == [
        "hyper_parameters.<class 'pathlib.Path'>: builtins.type",
        "hyper_parameters.f: functools.partial",
        "hyper_parameters.in.1: types.SimpleNamespace",
        f"hyper_parameters.set.{print}: builtins.builtin_function_or_method",
    ]
    assert plain(print) == (None, ["state: builtins.builtin_function_or_method"])
    assert plain(numpy.array([print]))[0] is None


def test_the_copy_is_of_the_moment() -> None:
    tensor, numbers = torch.ones(2), [1]
    copy, _ = plain({"t": tensor, "n": numbers})
    tensor.zero_()
    numbers.append(2)
    assert copy["n"] == [1]
    assert copy["t"].sum() == 2


def test_same_tells_values_apart() -> None:
    assert not same({"a": torch.ones(2)}, {"a": torch.ones(2, dtype=torch.float64)})
    assert not same(torch.ones(2), [1, 1])
    assert not same([1], [1, 2])
    assert not same({"a": 1}, {"b": 1})
    assert same(torch.tensor([float("nan")]), torch.tensor([float("nan")]))


def test_the_certificate_names_what_was_not_saved(tmp_path: Path) -> None:
    report = save_checkpoint(tmp_path / "a", CheckpointContent({}, state={"hyper_parameters": {"loss": print}}))
    expected = "state.hyper_parameters.loss: builtins.builtin_function_or_method"
    assert report.unsaved == (expected,)
    certificate = load_checkpoint(tmp_path / "a", {}).certificate
    assert certificate.not_restored[0][0] == "state.hyper_parameters.loss"
    assert "not data" in certificate.lines()[1]
