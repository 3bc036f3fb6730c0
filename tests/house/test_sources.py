"""Rules of the house that no linter knows."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
LIBRARY = sorted((SOURCE / "hybrid_strategy").rglob("*.py"))
MAX_LINES, MAX_BODY = 400, 40
UPSTREAM = ("torch", "lightning", "pytorch_lightning", "hydra", "omegaconf", "wandb", "transformers", "tokenizers", "rich")


def imported(tree: ast.AST) -> Iterator[str]:
    """Full names of what a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_private(name: str) -> bool:
    """Is some part of a dotted name private?"""
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def bodies(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Functions with the lines of their bodies; signature and docstring may be as long as they need to be."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            yield node.name, (node.end_lineno or 0) - body[0].lineno + 1 if body else 0


def tracked() -> list[Path]:
    """Text files of the repository."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("what belongs to the repository is known from git, and this is no checkout")
    paths = [ROOT / name for name in done.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


def test_private_upstream_names_are_imported_in_one_file_each() -> None:
    where: dict[str, list[str]] = defaultdict(list)
    for path in LIBRARY:
        for name in set(imported(ast.parse(path.read_text()))):
            if name.split(".")[0] in UPSTREAM and is_private(name):
                where[name].append(str(path.relative_to(SOURCE)))
    several = {name: files for name, files in where.items() if len(files) > 1}
    assert not several, f"private upstream names imported in several files: {several}"


def test_library_does_not_print() -> None:
    for path in LIBRARY:
        if "cli" in path.relative_to(SOURCE).parts:
            continue
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        printing = [node.lineno for node in calls if isinstance(node.func, ast.Name) and node.func.id == "print"]
        assert not printing, f"{path} prints in lines {printing}: raise, log or return it"


def test_files_are_short() -> None:
    files = [path for path in tracked() if path.suffix == ".py"]
    long = {str(path.relative_to(ROOT)): length for path in files if (length := len(path.read_text().splitlines())) > MAX_LINES}
    assert not long, f"longer than {MAX_LINES} lines: {long}"


def test_functions_are_short() -> None:
    long = {
        f"{path.relative_to(SOURCE)}:{name}": length
        for path in LIBRARY
        for name, length in bodies(ast.parse(path.read_text()))
        if length > MAX_BODY
    }
    assert not long, f"bodies longer than {MAX_BODY} lines: {long}"


def test_every_module_says_what_it_is() -> None:
    mute = [str(path.relative_to(SOURCE)) for path in LIBRARY if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not mute


def test_no_notes_to_oneself() -> None:
    words = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    left = [str(path) for path in LIBRARY if words.search(path.read_text())]
    assert not left


def test_nothing_is_tracked_that_git_is_told_to_ignore() -> None:
    """A link to somebody's `.venv` would be in every clone, and `make` could not make its own there."""
    command = ["git", "ls-files", "-z", "--cached", "--ignored", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("what belongs to the repository is known from git, and this is no checkout")
    link = subprocess.run(["git", "check-ignore", ".venv"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert not done.stdout, f"tracked, and ignored: {done.stdout.split(chr(0))}"
    assert link.stdout, ".venv may be a link, which a pattern that ends in / does not ignore"


def test_no_path_of_one_machine() -> None:
    homes = "|".join(("root", "home/[a-z]+", "Users/[A-Za-z]+", "work", "workspace"))
    pattern = re.compile(rf"(?<![\w.${{}}/-])/(?:{homes})/[\w.]|\.\./shared\b")
    found = []
    for path in tracked():
        if path.suffix in (".py", ".md", ".yaml", ".toml", ".cff", "") and path.name != "LICENSE":
            for number, line in enumerate(path.read_text(errors="ignore").splitlines(), 1):
                found += [f"{path.relative_to(ROOT)}:{number}: {line.strip()}"] if pattern.search(line) else []
    assert not found, "\n".join(found)
