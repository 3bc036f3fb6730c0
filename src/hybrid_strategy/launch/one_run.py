"""One run at a time writes into a run folder."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybrid_strategy.errors import ConfigError, message

_LOCK = ".running"


@contextmanager
def only_run(run_dir: Path) -> Iterator[None]:
    """Holds the folder, which is made if it is not there. The lock falls with the process that holds it, however that ends.

    Raises:
        ConfigError: another run is writing there; the two would mix their metrics and checkpoints.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / _LOCK
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise _taken(run_dir, path) from None  # otherwise a file system without locks: nobody can tell
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _taken(run_dir: Path, path: Path) -> ConfigError:
    rule = "another run is writing into this folder"
    return ConfigError(
        message("paths.run_dir", str(run_dir), rule, path.read_text(encoding="utf-8"), "Wait for it, or set another folder")
    )
