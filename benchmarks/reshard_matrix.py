"""Every layout's checkpoint in every layout: weights and moments bit for bit, then the uninterrupted run's steps.

    python benchmarks/reshard_matrix.py [--only LAYOUT,LAYOUT] [--skip N] [--limit N] [--json FILE]

Each layout trains four steps and saves in the middle of an epoch. Each layout then goes on from each of these checkpoints for
three steps: what it has right after loading is saved again and compared bit for bit with what was loaded; its losses must be
those of one process that was never interrupted, within 1e-6, its learning rates the same, its samples those not yet consumed,
each once.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from checkpoint_run import LAYOUTS, difference, fit, steps_in
from grid_pool import FailedError, Pool, RefusedError

from hybrid_strategy.checkpoint.loading import load_checkpoint, saved_names
from hybrid_strategy.checkpoint.pieces import Piece

SAVED_AT, LAST = 4, 7
_TIMEOUT = 120.0


def read(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole."""
    pieces = {key: Piece.whole(key, torch.empty(each.shape, dtype=each.dtype)) for key, each in saved_names(path).items()}
    load_checkpoint(path, pieces)
    return {key: piece.tensor for key, piece in pieces.items()}


def unequal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names that only one of them has, or whose bits differ."""
    names = sorted(one.keys() ^ other.keys())
    return names + [name for name in one.keys() & other.keys() if not torch.equal(one[name], other[name])]


class Matrix:
    """The sources are made when first asked for."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        self._pool, self._folder = pool, folder
        self._sources: dict[str, dict[str, torch.Tensor]] = {}
        self._run("single", folder / "straight", LAST)
        self._reference = steps_in(folder / "straight")

    def case(self, source: str, target: str) -> str:
        """What is wrong; empty: nothing."""
        try:
            return self._case(source, target)
        except (FailedError, RefusedError, ValueError) as error:
            return str(error).strip().splitlines()[-1]

    def _case(self, source: str, target: str) -> str:
        saved, folder = self._source(source), self._folder / f"{source}-{target}"
        copy = folder / "copy.ckpt"
        self._run(target, folder, LAST, checkpoint=str(self._folder / f"{source}.ckpt"), copy_to=str(copy))
        if wrong := unequal(saved, read(copy)):
            return f"not bit-equal after loading: {', '.join(wrong[:3])}"
        return difference(self._reference, steps_in(folder), SAVED_AT + 1, LAST)

    def _source(self, name: str) -> dict[str, torch.Tensor]:
        if name not in self._sources:
            path = self._folder / f"{name}.ckpt"
            self._run(name, self._folder / name, SAVED_AT, save_to=str(path))
            if wrong := difference(self._reference, steps_in(self._folder / name), 1, SAVED_AT):
                raise ValueError(f"before saving: {wrong}")
            self._sources[name] = read(path)
        return self._sources[name]

    def _run(self, layout: str, folder: Path, steps: int, **more: Any) -> None:
        self._pool.run(_fit, LAYOUTS[layout][0], layout, str(folder), steps, more, timeout=_TIMEOUT)


def _fit(layout: str, folder: str, steps: int, more: dict[str, Any]) -> None:
    fit(layout, folder, steps, **more)


def pairs(only: Sequence[str] | None) -> list[tuple[str, str]]:
    """(from, to), all of those asked for."""
    names = list(only or LAYOUTS)
    return [(source, target) for source in names for target in names]


def run(cases: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """What is wrong with each case; prints a line for each that fails."""
    pool, found = Pool(), {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            matrix = Matrix(pool, Path(folder))
            for pair in cases:
                found[pair] = matrix.case(*pair)
                if found[pair]:
                    print(f"{pair[0]} -> {pair[1]}: {found[pair]}", flush=True)
        finally:
            pool.close()
    return found


def table(found: dict[tuple[str, str], str]) -> str:
    """Rows: saved in; columns: gone on in."""
    sources, targets = (list(dict.fromkeys(pair[index] for pair in found)) for index in (0, 1))
    width = max(map(len, [*sources, "saved in"]))
    lines = [" ".join([f"{'saved in':<{width}}", *targets])]
    for source in sources:
        marks = [{None: "", "": "ok"}.get(found.get((source, target)), "WRONG") for target in targets]
        lines.append(
            " ".join([f"{source:<{width}}", *(f"{mark:<{len(name)}}" for mark, name in zip(marks, targets, strict=True))])
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the matrix."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", metavar="LAYOUT,LAYOUT", help=f"these layouts only; default {','.join(LAYOUTS)}")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first cases")
    parser.add_argument("--limit", type=int, help="at most so many cases")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    given = parser.parse_args(argv)
    cases = pairs(given.only.split(",") if given.only else None)[given.skip :][: given.limit]
    started = time.monotonic()
    found = run(cases)
    good = sum(not text for text in found.values())
    print(table(found))
    print(f"{good} of {len(found)} right, {time.monotonic() - started:.0f} s")
    if given.json:
        figures = [{"name": "reshard cases right", "value": good, "unit": "cases", "goal": f"{len(found)}"}]
        Path(given.json).write_text(json.dumps(figures, indent=2), encoding="utf-8")
    return 0 if good == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
