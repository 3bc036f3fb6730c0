"""Sequences of equal length cut from one long row of tokens, without padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from hybrid_strategy.data.token_file import TokenFile, open_tokens
from hybrid_strategy.errors import DataError, message


class PackedTokens(Dataset[dict[str, torch.Tensor]]):
    """Item `i` is `{"input_ids": [s], "labels": [s]}` (int64): tokens `i*s .. i*s+s`, and the same shifted by one.

    A label is the token after its input, so sequences overlap by one token and every token but the first is a label once; what
    is too short for a sequence at the end is left out.

    Args:
        path: a token file.
        sequence_length: s.

    Raises:
        DataError: the file is damaged or too short for one sequence.
    """

    def __init__(self, path: str | Path, sequence_length: int) -> None:
        self.path, self.sequence_length = Path(path), sequence_length
        self._file: TokenFile | None = None
        count = self.file.header.count
        if sequence_length < 1 or count <= sequence_length:
            rule = "it must be positive and less than the number of tokens"
            numbers, shorter = f"{self.path} has {count:,} tokens", f"Set {count - 1} or less, or give" if count > 1 else "Give"
            raise DataError(message("sequence_length", sequence_length, rule, numbers, f"{shorter} more text"))

    @property
    def file(self) -> TokenFile:
        """The opened file; each process opens it for itself."""
        if self._file is None:
            self._file = open_tokens(self.path)
        return self._file

    def __len__(self) -> int:
        return (self.file.header.count - 1) // self.sequence_length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)} in {self.path}")
        start = index % len(self) * self.sequence_length
        tokens = torch.from_numpy(self.file.tokens[start : start + self.sequence_length + 1].astype(np.int64))
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}
