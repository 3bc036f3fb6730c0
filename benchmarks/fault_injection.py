"""Damaged checkpoints and bad disks: what is wrong is named on every rank, and no run goes on from it.

    python benchmarks/fault_injection.py [--only WORD] [--json FILE]

Two ranks under ZeRO save three checkpoints. Then every file of the newest is truncated, has one bit flipped, or is removed, one
at a time: loading it must raise the same error on both ranks, with the name of the file and the checkpoint before it, and train
nothing; a search must choose that one, from which training goes on with the reference's steps. Full, read-only and slow disks are
a tmpfs, where mounting is allowed: the save that fails leaves the earlier checkpoints as they were.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from checkpoint_run import LAYOUTS, difference, fit, steps_in
from grid_pool import FailedError, Pool, RefusedError

from hybrid_strategy.checkpoint import saving
from hybrid_strategy.checkpoint.manifest import read_manifest
from hybrid_strategy.checkpoint.search import search, verify_checkpoint
from hybrid_strategy.errors import CheckpointError

LAYOUT, SAVED, LAST = "dp2_zero1", (1, 2, 3), 5
DAMAGES = ("truncated", "altered", "missing")
DISKS = ("full", "full_in_background", "read_only", "slow", "slow_in_background")
_TIMEOUT, _SLOW_SECONDS = 90.0, 0.5


def damage(path: Path, kind: str) -> None:
    """Does it to one file."""
    data = path.read_bytes()
    if kind == "missing":
        path.unlink()
    elif kind == "truncated":
        path.write_bytes(data[: len(data) // 2])
    else:
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])


def try_fit(folder: str, steps: int, more: dict) -> str:
    """Trains in a rank; the text of the error that ended it, or nothing."""
    options = dict(more)
    write = saving.write_items
    if options.pop("slow", False):
        saving.write_items = _slow
    try:
        fit(LAYOUT, folder, steps, **options)
    except CheckpointError as error:
        return str(error)
    finally:
        saving.write_items = write
    return ""


def _slow(*arguments: object) -> object:
    time.sleep(_SLOW_SECONDS)
    return _write(*arguments)


_write = saving.write_items


class Faults:
    """The checkpoints and the reference are made once."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        self._pool, self.folder = pool, folder
        self.run("straight", LAST)
        self.reference = steps_in(folder / "straight")
        for step in SAVED:
            self.run(f"to{step}", step, save_to=str(folder / "good" / f"step{step}.ckpt"))
        self.newest = folder / "good" / f"step{SAVED[-1]}.ckpt"

    def run(self, name: str, steps: int, **more: object) -> list[str]:
        """What ended each rank."""
        return self._pool.run(try_fit, LAYOUTS[LAYOUT][0], str(self.folder / name), steps, more, timeout=_TIMEOUT)

    def damaged(self, file: str, kind: str) -> str:
        """What is wrong with how a damaged file is met; empty: nothing."""
        name = f"{file}-{kind}"
        place = self.folder / name
        shutil.copytree(self.folder / "good", place)
        damage(place / self.newest.name / file, kind)
        first, second = self.run(f"{name}-tried", LAST, checkpoint=str(place / self.newest.name))
        before = place / f"step{SAVED[-2]}.ckpt"
        if not first or first != second:
            return f"the ranks ended differently: {first!r}, {second!r}"
        if file not in first or str(before) not in first:
            return f"it names neither {file} nor {before.name}: {first}"
        if steps_in(self.folder / f"{name}-tried"):
            return "it trained"
        found = search(place)
        if found.path != before or not any(file in why for _, why in found.skipped):
            return f"chosen was {found.path}, skipped {found.skipped}"
        self.run(f"{name}-went-on", LAST, checkpoint=str(found.path))
        return difference(self.reference, steps_in(self.folder / f"{name}-went-on"), SAVED[-2] + 1, LAST)

    def disk(self, kind: str) -> str:
        """What is wrong with how a bad disk is met; empty: nothing."""
        background, at = kind.endswith("_in_background"), self.folder / kind
        size = sum(each.stat().st_size for each in self.newest.iterdir())
        with _mounted(at, int(1.5 * size) if kind.startswith("full") else 64 * 2**20):
            shutil.copytree(self.newest, at / self.newest.name)
            if kind == "read_only":
                subprocess.run(["mount", "-o", "remount,ro", str(at)], check=True)
            more = {
                "checkpoint": str(at / self.newest.name),
                "asynchronous_checkpoint": background,
                "slow": kind.startswith("slow"),
            }
            first, second = self.run(f"{kind}-tried", LAST, save_to=str(at / "later.ckpt"), **more)
            wanted = {"full": "does not fit", "read_only": "Read-only file system", "slow": ""}[
                kind.removesuffix("_in_background")
            ]
            if first != second or (wanted not in first if wanted else bool(first)):
                return f"the ranks ended with {first!r}, {second!r}"
            verify_checkpoint(at / self.newest.name)
            names = {each.name for each in at.iterdir()} - {"last"}
            if names != {self.newest.name} | ({"later.ckpt"} if not wanted else set()):
                return f"it left {sorted(names)}"
            return difference(self.reference, steps_in(self.folder / f"{kind}-tried"), SAVED[-1] + 1, LAST)


@contextlib.contextmanager
def _mounted(at: Path, num_bytes: int) -> Iterator[None]:
    at.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(at)], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(at)], check=True)


def run(only: str) -> dict[str, str]:
    """Fault -> what is wrong with how it is met; prints a line for each."""
    pool, found = Pool(), {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            faults = Faults(pool, Path(folder))
            files = [*read_manifest(faults.newest).files, "manifest.json"]
            cases = {f"{file} {kind}": (faults.damaged, (file, kind)) for file in files for kind in DAMAGES}
            cases |= {f"{kind} disk": (faults.disk, (kind,)) for kind in DISKS}
            for name, (check, arguments) in cases.items():
                if only not in name:
                    continue
                try:
                    found[name] = check(*arguments)
                except (FailedError, RefusedError, ValueError, CheckpointError) as error:
                    found[name] = str(error).strip().splitlines()[-1]
                except subprocess.CalledProcessError:
                    print(f"{name}: left out, mounting is not allowed here")
                    continue
                print(f"{name}: {found[name] or 'right'}", flush=True)
        finally:
            pool.close()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the faults."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", metavar="WORD", default="", help="those whose name has this in it")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    given = parser.parse_args(argv)
    started = time.monotonic()
    found = run(given.only)
    good = sum(not wrong for wrong in found.values())
    print(f"{good} of {len(found)} met as they should be, {time.monotonic() - started:.0f} s")
    if given.json:
        figures = [{"name": "faults met as they should be", "value": good, "unit": "faults", "goal": f"{len(found)}"}]
        Path(given.json).write_text(json.dumps(figures, indent=2), encoding="utf-8")
    return 0 if good == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
