"""README and documentation say what is true: links lead somewhere, commands exist, tables and pictures are those of the code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from hybrid_strategy.cli.main import COMMANDS, EXIT_CODES
from hybrid_strategy.errors import message
from tests.house.test_strategy_arguments import arguments
from tests.support.pictures import draw

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
TEXTS = sorted([README, ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), ROOT / "slurm" / "README.md"])
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands() -> list[tuple[str, str]]:
    """Every `hybrid ...` line in the shell blocks of the texts, with the text's name."""
    found = []
    for path in TEXTS:
        for language, block in FENCE.findall(path.read_text()):
            if language in ("bash", "console", "sh"):
                joined = block.replace("\\\n", " ")
                lines = [line.removeprefix("$ ").partition(" #")[0].strip() for line in joined.splitlines()]
                found += [(path.name, line) for line in lines if line.startswith("hybrid ")]
    return found


def test_readme_starts_with_code() -> None:
    lines = README.read_text().splitlines()
    first = next(number for number, line in enumerate(lines, 1) if line.startswith("```"))
    assert first <= 14, "the first line of code stands in line 15 or before"


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|mailto:)([^)\s]+)\)", FENCE.sub("", path.read_text())):
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def test_commands_exist() -> None:
    unknown = [line for _, line in commands() if shlex.split(line)[1] not in {*COMMANDS, "--help", "--version"}]
    assert commands()
    assert not unknown


@pytest.mark.parametrize(("where", "line"), [each for each in commands() if "=" in each[1] and " -m " not in each[1]])
def test_commands_compose(where: str, line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Everything that can be refused before a process starts is not refused."""
    from hybrid_strategy.cli.arguments import parse, parser
    from hybrid_strategy.config.compose import run_config
    from hybrid_strategy.config.plan import plan_of

    words = shlex.split(line)[1:]
    monkeypatch.chdir(tmp_path)
    made = parser(words[0], "")
    made.add_argument("--json", action="store_true")
    made.add_argument("--steps", type=int)
    overrides = [word for word in words[1:] if not word.startswith(("resume=", "data.files=", "check."))]
    if not any("my_package" in word for word in overrides):
        plan_of(run_config(parse(made, overrides).source))


def test_readme_lists_every_argument_of_the_strategy() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", README.read_text(), re.MULTILINE)
    assert rows == [(name, repr(each.default).replace("'", '"')) for name, each in arguments().items()]


@pytest.mark.parametrize("path", [README, ROOT / "docs" / "errors.md"], ids=lambda path: path.name)
def test_exit_codes_are_listed(path: Path) -> None:
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", path.read_text(), re.MULTILINE)}
    assert listed == set(EXIT_CODES)


def test_pictures_of_schedules() -> None:
    text = (ROOT / "docs" / "schedules.md").read_text()
    pictures = re.findall(r"^```text\n(\w+): (\d+) ranks, (\d+) stages? each, (\d+) micro-batches\n(.*?)\n```", text, re.M | re.S)
    assert len(pictures) == 8
    for name, ranks, stages, micro_batches, picture in pictures:
        assert picture == draw(name, int(ranks), int(stages), int(micro_batches)), name


def test_the_shape_of_messages_is_the_one_documented() -> None:
    shown = message("tensor_parallel_size", 3, "it must divide num_attention_heads", "3 does not divide 8", "Set 1, 2, 4 or 8")
    assert shown in (ROOT / "docs" / "errors.md").read_text()


def test_floors_are_those_that_the_linter_checks() -> None:
    settings = (ROOT / "pyproject.toml").read_text()
    contract = settings[settings.index('name = "floors:') :]
    layers = re.findall(r'^    "(.+)",$', contract[: contract.index("\n]")], re.MULTILINE)
    floors = [[name.strip().removeprefix("hybrid_strategy.") for name in layer.split("|")] for layer in layers]
    text = (ROOT / "docs" / "architecture.md").read_text()
    drawn = re.search(r"^```text\n(cli .*?)^```", text, re.MULTILINE | re.DOTALL)
    assert drawn is not None
    assert [re.split(r" \| ", re.split(r" {2,}", line)[0]) for line in drawn[1].splitlines()] == floors
