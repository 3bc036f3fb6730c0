"""The report of a sweep as a W&B run of its own, beside those of its points in their group."""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from hybrid_strategy.config.storage import read_config
from hybrid_strategy.config.targets import BY_TARGET, WandbSettings
from hybrid_strategy.files import read_json
from hybrid_strategy.reporting.wandb_mode import resolve_mode
from hybrid_strategy.sweeping.book import Book
from hybrid_strategy.sweeping.report.page import REPORT_FILE
from hybrid_strategy.sweeping.results import JSON_FILE

_ROWS = 1000


def log_report(book: Book) -> str:
    """Logs page and results where the points log to W&B; returns what went wrong, which never matters to the sweep.

    Offline it is one more run to upload, in the sweep's own folder; done again it is the same run.
    """
    settings = _settings(book)
    mode = resolve_mode(str(settings.get("mode", "auto"))) if settings else "disabled"
    if mode == "disabled":
        return ""
    try:
        _log(book, settings, mode)
    except Exception as error:  # no server, no package, no space: the files are there
        return f"W&B does not have the report: {(str(error).strip().splitlines() or [type(error).__name__])[0]}"
    return ""


def _log(book: Book, settings: Mapping[str, Any], mode: Any) -> None:
    import wandb

    results = read_json(book.folder / JSON_FILE) or {}
    rows = results.get("results", [])[:_ROWS]
    columns = list(rows[0]) if rows else ["point"]
    quiet = wandb.Settings(init_timeout=20.0, console="off", silent=True)
    run = wandb.init(
        project=settings.get("project"),
        entity=settings.get("entity"),
        group=settings.get("group") or book.name,
        name=f"{book.name} report",
        job_type="report",
        id=sha256(os.fsencode(book.folder)).hexdigest()[:8],
        dir=book.folder,
        mode=mode,
        settings=quiet,
        reinit="create_new",
        config={"command": book.settings.get("command"), "points": len(book.points)},
    )
    try:
        page = (book.folder / REPORT_FILE).read_text(encoding="utf-8")
        table = wandb.Table(columns=columns, data=[[_cell(row.get(name)) for name in columns] for row in rows])
        run.log({"report": wandb.Html(page), "results": table})
    finally:
        run.finish()


def _cell(value: Any) -> Any:
    """Columns of a table have one type."""
    return value if value is None or isinstance(value, str) else str(value)


def _settings(book: Book) -> Mapping[str, Any]:
    """Those of the first point's W&B logger; empty where there is none."""
    for point in book.points[:1]:
        for entry in read_config(point.folder).logger.values():
            if isinstance(entry, Mapping) and BY_TARGET.get(str(entry.get("_target_"))) is WandbSettings:
                return entry
    return {}
