"""One run at a time writes into a run folder."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybrid_strategy.errors import ConfigError, message
from hybrid_strategy.files import lock_file

_LOCK = ".running"


@contextmanager
def only_run(run_dir: Path) -> Iterator[None]:
    """Holds the folder, which is made if it is not there. The lock falls with the process that holds it, however that ends.

    Raises:
        ConfigError: another run is writing there; the two would mix their metrics and checkpoints.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / _LOCK
    handle = lock_file(path)
    if handle is None:
        rule = "another run is writing into this folder"
        numbers = path.read_text(encoding="utf-8")
        raise ConfigError(message("paths.run_dir", str(run_dir), rule, numbers, "Wait for it, or set another folder"))
    try:
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)
