"""Bad overrides and sweep files end in one clear error: exit code 2, no traceback, nothing written, nothing submitted.

    python benchmarks/bad_input.py [--cases N] [--seed S] [--json FILE]

Draws cases by chance: values of a wrong type, misspelt keys, groups and options, values that Hydra cannot read, settings of
sweepers and launchers, files in `sweeps/` with any of these; with quotes, spaces, unicode, `$`, backticks and line breaks in
values and in the folder it runs in. Each goes through `hybrid train -m` in this process, half with `hydra/launcher=slurm`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hybrid_strategy.cli.main import main as hybrid
from hybrid_strategy.config.messages import quoted

NASTY = (
    "two words",
    "$HOME",
    "`id`",
    "$(id)",
    "it's",
    'say "so"',
    "line\nbreak",
    "ünï ☃",
    "a;b|c&d",
    "tab\tstop",
    "back\\slash",
    "1 2",
    "",
    "%j",
    "*",
    "~",
)
NUMBERS = (
    "seed",
    "trainer.max_steps",
    "trainer.max_epochs",
    "optimizer.learning_rate",
    "optimizer.weight_decay",
    "learning_rate.warmup_steps",
    "strategy.tensor_parallel_size",
    "strategy.pipeline_parallel_size",
    "strategy.num_microbatches",
    "cluster.num_nodes",
    "cluster.devices",
    "data.global_batch_size",
    "model.hidden_size",
    "hydra.launcher.time",
    "hydra.launcher.max_parallel",
    "hydra.launcher.poll_seconds",
    "hydra.sweeper.slack",
    "hydra.sweeper.top",
)
WORDS = ("strategy.sharding", "strategy.schedule", "strategy.activation_checkpoint", "optimizer.name", "trainer.accelerator")
GROUPS = (
    "model",
    "strategy",
    "optimizer",
    "precision",
    "callbacks",
    "logger",
    "cluster",
    "sweeps",
    "experiment",
    "hydra/launcher",
)
UNREADABLE = ("a=b", "[1", "{a: ", "'open", '"open', "a b=c", "f(", "1,,2", "#", "~/x", "]", "choice(", "range(1,", "${")
FOLDERS = ("plain", "with a space", "ünï", "it's", "a$b", "a`b")


@dataclass(frozen=True)
class Case:
    """What is typed, and files that lie in the folder of further configurations: path -> text."""

    kind: str
    arguments: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)
    folder: str = "plain"


def cases(count: int, seed: int = 0) -> Iterator[Case]:
    """Cases of all kinds in turn, the rest by chance."""
    makers: tuple[Callable[[random.Random], Case], ...] = (_type, _key, _option, _unreadable, _sweep_file, _twice)
    for number in range(count):
        chance = random.Random(f"{seed} {number}")
        made = makers[number % len(makers)](chance)
        launcher = ("hydra/launcher=slurm",) if chance.random() < 0.5 and "hydra/launcher" not in " ".join(made.arguments) else ()
        yield Case(made.kind, (*launcher, *made.arguments), made.files, chance.choice(FOLDERS))


def _type(chance: random.Random) -> Case:
    key = chance.choice((*NUMBERS, *WORDS))
    return Case(
        "type", (_typed(key, chance.choice(NASTY)), "seed=1,2") if key != "seed" else (_typed(key, chance.choice(NASTY)),)
    )


def _key(chance: random.Random) -> Case:
    key = _misspelt(chance.choice((*NUMBERS, *WORDS)), chance)
    return Case("key", (f"{chance.choice(('', '+', '++'))}{key}={chance.choice(('1', '1,2', 'x'))}",))


def _option(chance: random.Random) -> Case:
    return Case("option", (f"{chance.choice(GROUPS)}={chance.choice(('nowhere', 'no_such', 'tp2,nowhere', '17', 'ünï'))}",))


def _unreadable(chance: random.Random) -> Case:
    return Case("unreadable", (f"{chance.choice(('name', 'seed', 'strategy.sharding'))}={chance.choice(UNREADABLE)}",))


def _sweep_file(chance: random.Random) -> Case:
    key, value = chance.choice((*NUMBERS[:13], *WORDS)), json.dumps(chance.choice(NASTY))
    text = chance.choice(
        (
            f"hydra:\n  sweeper:\n    params:\n      {key}: {value}\n",
            f"hydra:\n  sweeper:\n    params:\n      {_misspelt(key, chance)}: 1,2\n",
            f"hydra:\n  sweeper:\n    points:\n      - {{{_misspelt(key, chance)}: 1}}\n",
            f"hydra:\n  sweeper:\n    points:\n      - {value}\n",
            "hydra:\n  sweeper:\n    points: 7\n",
            "hydra:\n  sweeper:\n    nothing: 7\n",
            "hydra:\n  sweeper: [\n",
            f"{_misspelt('trainer', chance)}:\n  max_steps: 3\n",
            f"trainer:\n  max_steps: {value}\n",
        )
    )
    return Case("sweep file", ("sweeps=mine",), {"sweeps/mine.yaml": f"# @package _global_\n{text}"})


def _twice(chance: random.Random) -> Case:
    """A good value and a bad one: the sweep does not begin with the good one."""
    key = chance.choice(NUMBERS[:13])
    return Case("one of two", (f"{key}=1,{json.dumps(chance.choice(NASTY), ensure_ascii=False)}",))


def _typed(key: str, value: str) -> str:
    """As a user would type it who quotes well; the shell's own quotes are gone."""
    inner = quoted(f"{key}={value}").replace("'\\''", "'")
    return inner[1:-1]


def _misspelt(key: str, chance: random.Random) -> str:
    """One letter more, in the last part."""
    root, dot, last = key.rpartition(".")
    place = chance.randrange(1, len(last))
    return f"{root}{dot}{last[:place]}{chance.choice('qxz')}{last[place:]}"


def run(case: Case, below: Path) -> str:
    """What is wrong with how the command took it; empty: nothing."""
    here = below / case.folder
    here.mkdir(parents=True, exist_ok=True)
    configurations = below / f"{case.folder} configurations"
    for name, text in case.files.items():
        path = configurations / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    further = ["--config-dir", str(configurations)] if case.files else []
    said, before = io.StringIO(), Path.cwd()
    os.chdir(here)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = hybrid(["train", "-m", *further, "model=llama_tiny", "trainer.accelerator=cpu", *case.arguments])
    except SystemExit as end:
        code = int(end.code or 0) if not isinstance(end.code, str) else 1
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.chdir(before)
    text, left = said.getvalue(), [str(path.relative_to(here)) for path in here.rglob("*")]
    if code != 2:
        return f"exit code {code}: {text[-300:]}"
    if "Traceback" in text or not text.strip():
        return f"said: {text[-300:]!r}"
    return f"left {left[:5]}" if left else ""


def main() -> int:
    """Runs the cases and prints what was not refused as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    started, wrong = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(cases(given.cases, given.seed)):
            problem = run(case, Path(folder) / str(number))
            wrong += bool(problem)
            if problem:
                print(f"{case.kind} {case.arguments} {case.files or ''} in {case.folder!r}\n    {problem}")
    good = given.cases - wrong
    print(f"{good} of {given.cases} bad inputs end in one error with exit code 2; {time.monotonic() - started:.0f} s")
    if given.json:
        figures = [{"name": "bad inputs refused", "value": good, "unit": f"of {given.cases}", "goal": given.cases}]
        given.json.write_text(json.dumps(figures, indent=2))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
