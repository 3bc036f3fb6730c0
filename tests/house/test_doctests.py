"""Examples in docstrings and in the documentation give what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
MODULES = sorted(
    ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "src").rglob("*.py")
    if ">>> " in path.read_text()
)
TEXTS = sorted(path for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")) if ">>> " in path.read_text())


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(name), optionflags=OPTIONS)
    assert tried
    assert not failed


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_texts(path: Path) -> None:
    failed, _ = doctest.testfile(str(path), module_relative=False, optionflags=OPTIONS)
    assert not failed
