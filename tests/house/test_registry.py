"""Every file of a folder of parts is a part, found by its name."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

from hybrid_strategy import registry
from hybrid_strategy.errors import ConfigError
from hybrid_strategy.spec.parallel_plan import TENSOR_STYLES

FOLDERS = {
    "schedules": {
        "1F1B",
        "DualPipeV",
        "GPipe",
        "Interleaved1F1B",
        "InterleavedZeroBubble",
        "LoopedBFS",
        "ZBVZeroBubble",
        "sequential",
    },
    "parallel.sharding": {"ddp", "zero1", "zero2", "zero3"},
    "parallel.tensor.styles": set(TENSOR_STYLES),
    "models": {"gpt", "llama"},
    "launch.launchers": {"local"},
}


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_file_is_a_part_with_a_name_of_its_own(folder: str) -> None:
    package = importlib.import_module(f"hybrid_strategy.{folder}")
    files = [info.name for info in pkgutil.iter_modules(package.__path__) if not info.name.startswith("_")]
    names = [importlib.import_module(f"{package.__name__}.{file}").PART.name for file in files]
    assert sorted(names) == sorted(registry.parts(folder))
    assert len({name.lower() for name in names}) == len(names), "names that differ in case only"
    assert FOLDERS[folder] <= set(names)


@pytest.mark.parametrize("folder", FOLDERS)
def test_parts_are_found_in_any_case(folder: str) -> None:
    for name, part in registry.parts(folder).items():
        assert registry.find(folder, name, "key") is part
        assert registry.find(folder, name.swapcase(), "key") is part


@pytest.mark.parametrize("folder", FOLDERS)
def test_unknown_part_is_refused_with_the_nearest(folder: str) -> None:
    name = sorted(registry.parts(folder))[0]
    with pytest.raises(ConfigError) as error:
        registry.find(folder, f"{name}x", "some.key")
    assert str(error.value).startswith(f"some.key is '{name}x': there is no part of this name. Did you mean {name!r}? Known: ")
