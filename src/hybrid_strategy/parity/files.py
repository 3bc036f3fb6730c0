"""Names of what a process writes down."""

from __future__ import annotations

from pathlib import Path

REFERENCE, LAYOUT = "reference", "layout"
"""The two runs: the folders of their records."""

INITIAL, GRADIENTS, CLIPPED, WEIGHTS = "initial", "gradients", "clipped", "weights"
"""Kinds of tensors. `CLIPPED`: the gradients that the optimizer used."""

RECORD_FILE = "record.json"


def rank_folder(folder: Path, rank: int) -> Path:
    """Where a rank of a run leaves its record."""
    return folder / f"rank{rank}"


def tensor_file(folder: Path, kind: str, step: int | None = None) -> Path:
    """Where a rank's tensors of one kind and step are."""
    return folder / (f"{kind}.safetensors" if step is None else f"{kind}{step}.safetensors")
