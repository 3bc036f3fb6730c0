"""Reads what an offline W&B run holds: records in the format of LevelDB's log (blocks of 32 KiB, chunks with 7 bytes before)."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _HEADER = 2**15, 7
_FULL, _FIRST, _LAST = 1, 2, 4


def runs(folder: Path) -> list[Path]:
    """The offline runs in a run folder, oldest first."""
    return sorted((folder / "wandb").glob("offline-run-*"))


def _payloads(path: Path) -> Iterator[bytes]:
    data, place, held = path.read_bytes(), _HEADER, b""
    while place + _HEADER <= len(data):
        left = _BLOCK - place % _BLOCK
        if left < _HEADER:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        chunk = data[place + _HEADER : place + _HEADER + length]
        place += _HEADER + length
        held = chunk if kind in (_FULL, _FIRST) else held + chunk
        if kind in (_FULL, _LAST):
            yield held


def _records(run: Path, patience_seconds: float = 20.0) -> list[Any]:
    """All of them; wandb's own process may write the last after the run has finished for its user, unless it was ended."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = run.glob("*.wandb")
    deadline = time.monotonic() + patience_seconds
    while True:
        found = [Record.FromString(payload) for payload in _payloads(path)]
        if time.monotonic() > deadline or any(each.WhichOneof("record_type") == "exit" for each in found):
            return found
        time.sleep(0.1)


def history(run: Path, patience_seconds: float = 20.0) -> list[dict[str, Any]]:
    """Every row that was logged."""
    rows = []
    for record in _records(run, patience_seconds):
        if record.WhichOneof("record_type") == "history":
            rows.append({each.key or ".".join(each.nested_key): json.loads(each.value_json) for each in record.history.item})
    return rows


def config(run: Path) -> dict[str, Any]:
    """The configuration as it was last said."""
    found: dict[str, Any] = {}
    for record in _records(run):
        kind = record.WhichOneof("record_type")
        updates = record.run.config.update if kind == "run" else record.config.update if kind == "config" else ()
        for each in updates:
            found[each.key or ".".join(each.nested_key)] = json.loads(each.value_json)
    return found
