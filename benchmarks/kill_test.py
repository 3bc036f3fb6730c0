"""Runs killed by SIGKILL at a random moment, and gone on with by `resume=auto`, half of them in another layout.

    python benchmarks/kill_test.py [--runs N] [--skip N] [--seed S] [--json FILE]

Each is a `hybrid train` of its own that saves every second step (every other run in the background) and validates every third. A
run draws who is killed (one rank, all ranks, the parent), in which phase (training, validating, saving, committing), the
how-manieth time, and after how many milliseconds. Then the same command with `resume=auto` must go on from the newest checkpoint
that verifies, to the end, with the losses, rates and samples of a run that nobody killed: none twice, none left out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from checkpoint_kill import PHASES, PLAN_VARIABLE, VICTIMS
from checkpoint_run import GLOBAL_BATCH, LAYOUTS, difference, steps_in

from hybrid_strategy.checkpoint.search import search
from hybrid_strategy.checkpoint.verify import read_meta

HERE = Path(__file__).resolve().parent
STEPS, INTERVAL = 12, 2
CHOICES = ("single", "dp2", "dp2_zero1", "dp2_zero3", "tp2", "pp2", "pp2_interleaved")
_OFTEN = {"training": STEPS, "validating": 4, "saving": STEPS // INTERVAL, "committing": STEPS // INTERVAL}
_LONGEST_MS = {"training": 30, "validating": 30, "saving": 25, "committing": 20}
_TIMEOUT = 150.0


@dataclass(frozen=True)
class Killed:
    """One run: where, how it is killed, where it goes on."""

    number: int
    layout: str
    then: str
    background: bool
    phase: str
    who: str
    rank: int
    count: int
    delay_seconds: float

    @staticmethod
    def draw(number: int, seed: int) -> Killed:
        """The run of this number: phases and victims in turn, the rest by chance."""
        chance = random.Random(f"{seed} {number}")
        phase, who = PHASES[number % 4], VICTIMS[number // 4 % 3]
        layout = chance.choice([name for name in CHOICES if who != "one" or LAYOUTS[name][0] > 1])
        others = [name for name in CHOICES if name != layout]
        return Killed(
            number,
            layout,
            chance.choice(others) if (number + number // 4) % 2 else layout,
            chance.random() < 0.5,
            phase,
            who,
            chance.randrange(LAYOUTS[layout][0]),
            chance.randint(1, _OFTEN[phase]),
            chance.uniform(0, _LONGEST_MS[phase]) / 1e3,
        )

    @property
    def plan(self) -> str:
        """For the processes that are to be killed."""
        return json.dumps({key: getattr(self, key) for key in ("phase", "who", "rank", "count", "delay_seconds")})

    def __str__(self) -> str:
        victim = f"rank {self.rank}" if self.who == "one" else self.who
        how = "in the background" if self.background else "at once"
        when = f"{self.phase} for time {self.count} + {1e3 * self.delay_seconds:.0f} ms"
        return f"{self.number:>3} {self.layout} -> {self.then}, saving {how}, {victim} killed, {when}"


def train(folder: Path, layout: str, record: Path, *overrides: str, kill: str = "{}") -> subprocess.CompletedProcess[str]:
    """`hybrid train` in `folder`."""
    record.mkdir()
    _, data_parallel_size, _ = LAYOUTS[layout]
    words = (
        *("model=own", "model._target_=checkpoint_run.RecordedLM", f"+model.record={record}"),
        *("data=own", "data._target_=checkpoint_run.NumberedData", f"+data.batch_size={GLOBAL_BATCH // data_parallel_size}"),
        *(
            "name=killed",
            "logger=none",
            "callbacks=checkpoint",
            f"strategy={layout}",
            f"trainer.max_steps={STEPS}",
            "trainer.max_epochs=-1",
        ),
        *("trainer.val_check_interval=3", "trainer.limit_val_batches=2", "trainer.num_sanity_val_steps=0"),
        *(f"callbacks.checkpoint.every_n_train_steps={INTERVAL}", "callbacks.checkpoint.save_top_k=2"),
        *("callbacks.checkpoint.monitor=step", "callbacks.checkpoint.mode=max"),
    )
    environment = {**os.environ, PLAN_VARIABLE: kill, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "hybrid_strategy.cli.main", "train", *words, *overrides]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_TIMEOUT, check=False)


def attempt(case: Killed, folder: Path, reference: dict) -> str:
    """Kills and goes on; what is wrong, or nothing."""
    background = f"strategy.asynchronous_checkpoint={str(case.background).lower()}"
    first = train(folder, case.layout, folder / "first", background, kill=case.plan)
    if first.returncode == 0:
        return "it was not killed"
    found = search(*_places(folder))
    step = int(str(read_meta(found.path)["global_step"])) if found.path else 0
    done = steps_in(folder / "first")
    if wrong := difference(reference, {number: each for number, each in done.items() if number <= step}, 1, step):
        return f"before it was killed: {wrong}"
    if max(done, default=0) - step > 2 * INTERVAL:
        return f"step {max(done)} was done and the newest checkpoint is of step {step}"
    second = train(folder, case.then, folder / "second", background, "resume=auto")
    if second.returncode != 0:
        return f"it did not go on: {second.stderr.strip().splitlines()[-1:]}"
    if (taken := _resumed_from(second.stdout, folder)) != found.path:
        return f"it went on from {taken}, the newest good one is {found.path}"
    return difference(reference, steps_in(folder / "second"), step + 1, STEPS)


def _resumed_from(said: str, folder: Path) -> Path | None:
    """The checkpoint that the run says it goes on from."""
    line = next((line for line in said.splitlines() if line.startswith("resuming from ")), None)
    return None if line is None else Path(folder, line.removeprefix("resuming from ").strip())


def _places(folder: Path) -> list[Path]:
    return [run / "checkpoints" for run in sorted((folder / "outputs" / "killed").glob("*")) if run.is_dir()]


def run(cases: Sequence[Killed]) -> dict[Killed, str]:
    """What is wrong with each; prints a line for each."""
    found: dict[Killed, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder, "whole")
        whole.mkdir()
        straight = train(whole, "single", whole / "record")
        if straight.returncode != 0:
            raise RuntimeError(straight.stderr)
        reference = steps_in(whole / "record")
        for case in cases:
            own = Path(folder, str(case.number))
            own.mkdir()
            try:
                found[case] = attempt(case, own, reference)
            except (subprocess.TimeoutExpired, ValueError) as error:
                found[case] = str(error).splitlines()[0]
            print(f"{case}: {found[case] or 'right'}", flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the cases."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=60, help="how many (60)")
    parser.add_argument("--skip", type=int, default=0, help="begin with this number, to do the 60 in parts")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    given = parser.parse_args(argv)
    started = time.monotonic()
    found = run([Killed.draw(number, given.seed) for number in range(given.skip, given.skip + given.runs)])
    good = [case for case, wrong in found.items() if not wrong]
    for name in ("phase", "who"):
        print(f"{name}: {dict(Counter(getattr(case, name) for case in good))}")
    print(f"{len(good)} of {len(found)} right, {time.monotonic() - started:.0f} s")
    if given.json:
        figures = [{"name": "killed runs that went on right", "value": len(good), "unit": "runs", "goal": f"{len(found)}"}]
        Path(given.json).write_text(json.dumps(figures, indent=2), encoding="utf-8")
    return 0 if len(good) == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
