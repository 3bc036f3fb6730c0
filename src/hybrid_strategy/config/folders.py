"""Where configurations lie and where a run writes."""

from __future__ import annotations

import os
import time
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def shipped_folder(name: str) -> Path:
    """`conf` or `sweeps`: inside the installed package, or beside `src` in a checkout."""
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parents[1] / name


def new_stamp() -> str:
    """A name for a folder that differs for two runs that start in the same second."""
    return f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{os.urandom(3).hex()}"


def name_folder(output_dir: str, name: str) -> str:
    """The folder that holds all runs of one name; Hydra would resolve `${` in it a second time."""
    return str(Path(output_dir) / (name.replace(os.sep, "_").replace("${", "_{").strip(". ") or "unnamed"))
