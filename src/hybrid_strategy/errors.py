"""The errors of the product.

HybridError
├── ConfigError            the configuration is wrong; nothing was started      exit 2
│   ├── LayoutError        a layout, schedule or batch that cannot be honoured
│   ├── ModelError         a model that cannot be parallelised as asked
│   └── DataError          data that cannot be read or does not fit
├── NoLayoutFitsError      the planner found nothing that fits                   exit 3
├── RunError               something failed while running                       exit 1
│   ├── ParityError        the numbers differ from one process
│   └── CheckpointError    a checkpoint that cannot be written or read
└── PreemptedError         stopped by a signal after a checkpoint was written    exit 75
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from difflib import get_close_matches


class HybridError(Exception):
    """Base of all errors raised on purpose; `exit_code` is what the command line ends with."""

    exit_code = 1


class ConfigError(HybridError):
    """The configuration is wrong; nothing was started."""

    exit_code = 2


class LayoutError(ConfigError):
    """A layout, schedule or batch that cannot be honoured."""


class ModelError(ConfigError):
    """A model that cannot be parallelised as asked."""


class DataError(ConfigError):
    """Data that cannot be read or does not fit the layout."""


class NoLayoutFitsError(HybridError):
    """No layout fits the memory of the cluster."""

    exit_code = 3


class RunError(HybridError):
    """Something failed while running."""


def of_file_system(error: OSError, where: str = "") -> RunError:
    """What a full, read-only or closed file system says, for people; whatever else it is, a fault that is ours, is raised again.

    Args:
        where: a file or folder, for errors that do not name theirs.

    Raises:
        OSError: it is none of these.
    """
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE):
        raise error
    return RunError(
        f"{error.filename or where or 'a file'}: {error.strerror}. Make room, permit writing there, or set paths.output_dir."
    )


class ParityError(RunError):
    """The numbers of a layout differ from those of one process."""


class CheckpointError(RunError):
    """A checkpoint that cannot be written or read."""


class PreemptedError(HybridError):
    """Stopped by a signal after a checkpoint was written."""

    exit_code = 75


def message(key: str, value: object, rule: str, numbers: str, advice: str) -> str:
    """The one shape of every refusal: `<key> is <value>: <rule>. <the numbers>. <what to set>.`

    >>> message("tensor_parallel_size", 3, "it must divide num_attention_heads", "3 does not divide 8", "Set 1, 2, 4 or 8")
    'tensor_parallel_size is 3: it must divide num_attention_heads. 3 does not divide 8. Set 1, 2, 4 or 8.'
    """
    shown = repr(value) if isinstance(value, str) else str(value)
    parts = [part.strip().rstrip(".") for part in (f"{key} is {shown}: {rule}", numbers, advice)]
    return ". ".join(part for part in parts if part) + "."


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`Did you mean 'x'? Known: a, b, x` — the advice for a word that is not known."""
    names = list(known)
    lowered = {name.lower(): name for name in names}
    close = get_close_matches(word.lower(), list(lowered), n=1, cutoff=0.5)
    hint = f"Did you mean {lowered[close[0]]!r}? " if close else ""
    return f"{hint}Known: {', '.join(names)}"
