"""Writes the strategy's checkpoints, at once or in the background, and does what was asked for when one fails."""

from __future__ import annotations

from pathlib import Path

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from hybrid_strategy.checkpoint.asynchronous import AsyncSaver
from hybrid_strategy.checkpoint.content import CheckpointContent
from hybrid_strategy.checkpoint.folder import remove_checkpoint
from hybrid_strategy.checkpoint.saving import SaveOptions, save_checkpoint
from hybrid_strategy.errors import CheckpointError, message


class CheckpointWriter:
    """One rank's part in writing. All methods but `remove` and `failed` are collective.

    What a newer checkpoint replaces is removed when the newer one is complete. Where that could not be written it stays until the
    missing one is replaced in turn: what another callback saves is no reason to lose it, and if it stayed for ever, as Lightning
    speaks of it once, a disk with room for two would be full.

    Args:
        asynchronous: copy the state to host memory and write it while training goes on.
        when_busy: what a save does that comes while the last one is being written in the background: `wait` or `skip` itself.
        on_error: `raise`: a checkpoint that cannot be written ends the run; `warn`: it goes on.
        is_first: this rank removes.
    """

    def __init__(self, asynchronous: bool, when_busy: str, on_error: str, is_first: bool) -> None:
        self._asynchronous, self._when_busy, self._on_error, self._is_first = asynchronous, when_busy, on_error, is_first
        self._saver: AsyncSaver | None = None
        self._surplus: list[Path] = []
        self._held: dict[Path, list[Path]] = {}
        self._absent: Path | None = None
        self._path: Path | None = None
        self.error: CheckpointError | None = None
        """What the newest save failed with, where it did."""

    @property
    def failed(self) -> bool:
        """A save in the background has ended with an error that nobody has been told of."""
        return self._saver is not None and self._saver.failed

    @property
    def staged_bytes(self) -> int:
        """Host memory held for copies of this rank's state."""
        return 0 if self._saver is None else self._saver.staged_bytes

    def is_writing(self, path: Path) -> bool:
        """The last save has this name, which may not be there yet."""
        return self._saver is not None and self._path == path

    def save(self, path: Path, content: CheckpointContent, options: SaveOptions) -> bool:
        """Writes, or begins to.

        Returns:
            False where nothing is written: it was skipped, or failed (`on_error="warn"`).

        Raises:
            CheckpointError: on every rank: this one or, in the background, the last one failed (`on_error="raise"`).
        """
        if self._when_busy == "skip" and self._saver is not None and self._saver.busy_anywhere(path):
            self._absent = path
            rank_zero_info(f"{path} is not saved: the checkpoint before it is still being written")
            return False
        self.finish()
        try:
            if self._asynchronous:
                self._saver = self._saver or AsyncSaver()
                self._saver.save(path, content, options)
            else:
                save_checkpoint(path, content, options)
        except CheckpointError as error:
            self._deal_with(error, path)
            return False
        self.error, self._absent, self._path = None, None, path
        self._surplus += self._held.pop(path, ())
        for waiting in (self._surplus, *self._held.values()):
            waiting[:] = [each for each in waiting if each != path]
        return True

    def finish(self) -> None:
        """Waits until the last save is complete.

        Raises:
            CheckpointError: on every rank: it failed (`on_error="raise"`).
        """
        if self._saver is not None:
            try:
                self._saver.wait()
            except CheckpointError as error:
                self._deal_with(error, self._path)
        self.tidy()

    def close(self) -> None:
        """Finishes, and lets go of memory and groups.

        Raises:
            CheckpointError: as `finish`.
        """
        try:
            self.finish()
        finally:
            if self._saver is not None:
                self._saver.close()
                self._saver = None

    def remove(self, path: Path) -> None:
        """Removes a checkpoint once what replaces it is complete. Not collective; only the first rank does something."""
        if self._is_first:
            waiting = self._surplus if self._absent is None else self._held.setdefault(self._absent, [])
            waiting += [path, *self._held.pop(path, ())]
            self.tidy()

    def tidy(self) -> None:
        """Removes what has been replaced by now. Not collective."""
        if self._saver is not None and (self._saver.busy or self._saver.failed):
            return
        for path in self._surplus:
            _remove(path)
        self._surplus.clear()

    def _deal_with(self, error: CheckpointError, path: Path | None) -> None:
        self.error = error
        if path is not None:
            self._absent = path
            self._held.setdefault(path, []).extend(self._surplus)
            self._surplus.clear()
        if self._on_error == "raise":
            raise error
        rank_zero_warn(f"{error} The run goes on without this checkpoint.")


def _remove(path: Path) -> None:
    """One rank removes, so what goes wrong is told and ends nothing: the others would wait for a rank that is gone."""
    try:
        remove_checkpoint(path)
    except OSError as error:
        rule = "a newer one is complete, and it could not be removed"
        rank_zero_warn(message("checkpoint", str(path), rule, f"{type(error).__name__}: {error}", "Remove it by hand"))
