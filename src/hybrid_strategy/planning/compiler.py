"""What `torch.compile` needs of the machine, looked up without torch: it would fail at the first step, long after the start."""

from __future__ import annotations

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from hybrid_strategy.errors import ConfigError, message

_C_COMPILERS = ("gcc", "clang")


def check_compiler(accelerator: str) -> None:
    """Refuses `compile=True` where generated code cannot be built: C++ on processors, Triton's kernels on GPUs.

    Args:
        accelerator: `cpu` or `cuda`, on this machine.

    Raises:
        ConfigError: no compiler, no headers of Python, no Triton.
    """
    missing = _missing_on_gpus() if accelerator == "cuda" else _missing_on_processors()
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if not missing and not headers.is_file():
        missing = f"There is no {headers}", "Install the headers of Python (python3-dev)"
    if missing:
        rule = "torch.compile generates code, which must be built on this machine"
        raise ConfigError(message("compile", True, rule, missing[0], f"{missing[1]}, or set false"))


def _missing_on_processors() -> tuple[str, str] | None:
    name = os.environ.get("CXX", "g++")
    return None if shutil.which(name) else (f"There is no C++ compiler {name}", "Install one, name one in CXX")


def _missing_on_gpus() -> tuple[str, str] | None:
    if find_spec("triton") is None:
        return "There is no package triton", "Install triton"
    given = os.environ.get("CC")
    if any(shutil.which(name) for name in ((given,) if given else _C_COMPILERS)):
        return None
    return f"There is no C compiler {given or ' or '.join(_C_COMPILERS)}", "Install one, name one in CC"
