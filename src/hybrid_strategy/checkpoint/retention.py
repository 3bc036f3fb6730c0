"""Which checkpoints of a folder are kept."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import ProcessGroup

from hybrid_strategy.checkpoint.agreement import Ranks, Work
from hybrid_strategy.checkpoint.folder import read_last, remove_checkpoint
from hybrid_strategy.checkpoint.verify import committed, read_meta
from hybrid_strategy.errors import CheckpointError, ConfigError, message


@dataclass(frozen=True)
class Retention:
    """What to keep; a checkpoint that any rule keeps is kept, and so is the one `last` names.

    Attributes:
        keep_last: this many of the newest; None keeps all.
        keep_best: this many with the best `score` in their `meta`.
        higher_is_better: whether a high score is good.

    Raises:
        ConfigError: `keep_last` is below 1 or `keep_best` below 0.
    """

    keep_last: int | None = None
    keep_best: int = 0
    higher_is_better: bool = False

    def __post_init__(self) -> None:
        if self.keep_last is not None and self.keep_last < 1:
            raise ConfigError(message("keep_last", self.keep_last, "at least one checkpoint must be kept", "", "Set 1 or more"))
        if self.keep_best < 0:
            raise ConfigError(message("keep_best", self.keep_best, "it is a number of checkpoints", "", "Set 0 or more"))


def prune(folder: str | os.PathLike[str], retention: Retention, process_group: ProcessGroup | None = None) -> list[str]:
    """Removes the checkpoints of `folder` that no rule keeps; rank 0 removes, all ranks get the names.

    Raises:
        CheckpointError: on every rank, if one could not be removed.
    """
    ranks, where = Ranks.of(process_group), Path(os.path.abspath(folder))
    return ranks.lead(Work(str(where), "prune"), lambda: remove_surplus(where, retention))


def remove_surplus(folder: Path, retention: Retention, further: Collection[Path] = ()) -> list[str]:
    """As `prune`, by this process alone; not collective.

    Args:
        further: checkpoints to keep beside those that a rule keeps.
    """
    found = committed(folder)
    if retention.keep_last is None:
        return []
    kept = {*found[: retention.keep_last], *_best(found, retention)}
    last = read_last(folder)
    kept |= {each.absolute() for each in further}
    surplus = [each for each in found if each.absolute() not in kept and each not in kept and each != last]
    for each in surplus:
        remove_checkpoint(each)
    return sorted(each.name for each in surplus)


def _best(found: list[Path], retention: Retention) -> list[Path]:
    """The best first; a newer one wins a tie, one without a score or with NaN is never best."""
    scored = [(score, each) for each in found if (score := _score(each)) is not None]
    scored.sort(key=lambda pair: -pair[0] if retention.higher_is_better else pair[0])
    return [each for _, each in scored[: retention.keep_best]]


def _score(path: Path) -> float | None:
    try:
        score = read_meta(path).get("score")
    except CheckpointError:
        return None
    return float(score) if isinstance(score, int | float) and not math.isnan(score) else None
