"""`self.log` in a step, without doing again for every micro-batch what Lightning has found out at the first.

Lightning's `log` checks the hook, its defaults and the module's signature at each call: a tenth of a millisecond, times
micro-batches, times names. The first call of a name with its options takes that way; later ones go straight to the recorder.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from hybrid_strategy.strategy.log_records import METRIC, UNKNOWN, Entry, LogRecorder


class QuickLog:
    """Stands for `module.log` while a step is recorded, unless the module's class has a `log` of its own.

    Args:
        module: the user's module.
        recorder: gets the values.
    """

    def __init__(self, module: pl.LightningModule, recorder: LogRecorder) -> None:
        self._module, self._recorder = module, recorder
        self._entries: dict[Any, Entry] = {}
        self._suits = type(module).log is pl.LightningModule.log

    @contextmanager
    def recording(self, kind: str) -> Iterator[None]:
        """Records one micro-batch of a step of this kind (`train`, `validate`, `test`, `predict`)."""
        own = vars(self._module)
        suits = self._suits and "log" not in own

        def log(name: str, value: Any, *arguments: Any, **options: Any) -> None:
            self._log(kind, name, value, arguments, options)

        with self._recorder.recording():
            if suits:
                own["log"] = log
            try:
                yield
            finally:
                if suits:
                    del own["log"]

    def _log(self, kind: str, name: str, value: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        batch_size = options.get("batch_size")
        key = (kind, name, arguments, *((each, options[each]) for each in options if each != "batch_size"))
        entry = self._known(key)
        number = as_number(value) if entry is not None and len(arguments) < _PLACE_OF_BATCH_SIZE else None
        if entry is not None and number is not None:
            self._recorder.add(entry, number, None if batch_size is None else float(batch_size))
            return
        before = self._recorder.latest
        type(self._module).log(self._module, name, value, *arguments, **options)
        latest = self._recorder.latest
        if latest is not None and latest is not before and latest.reduction not in (METRIC, UNKNOWN):
            self._keep(key, latest)

    def _known(self, key: Any) -> Entry | None:
        try:
            return self._entries.get(key)
        except TypeError:  # an option that cannot be hashed
            return None

    def _keep(self, key: Any, entry: Entry) -> None:
        try:
            self._entries[key] = entry
        except TypeError:
            return


_PLACE_OF_BATCH_SIZE = 10
"""Where `batch_size` stands among the arguments of `log` after `name` and `value`, if somebody gives it by its place."""


def as_number(value: Any) -> Tensor | None:
    """A number as it is recorded, or `None` where Lightning must look at it."""
    if isinstance(value, Tensor):
        return value.detach().to(torch.float64, copy=True).reshape(()) if value.numel() == 1 else None
    return torch.tensor(float(value), dtype=torch.float64) if type(value) in (float, int) else None
