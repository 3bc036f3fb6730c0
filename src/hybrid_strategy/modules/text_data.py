"""Text as a LightningDataModule: plain DataLoaders over packed tokens, which the strategy shares out over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from hybrid_strategy.data.packed import PackedTokens
from hybrid_strategy.data.prepare import PreparedText, Progress, TextSpec, prepare_text
from hybrid_strategy.errors import DataError, message


class TextDataModule(LightningDataModule):
    """Next-token prediction on text: batches are `{"input_ids": [b, s], "labels": [b, s]}`, int64.

    The text is tokenised once and kept (see `prepare_text`); a second run, and every other rank, opens what is there.

    Args:
        files: globs of the user's text files, default: the source of Python's standard library.
        vocab_size: the most tokens the tokenizer may have; the model's vocabulary.
        sequence_length: s.
        batch_size: b, rows that one data-parallel rank consumes at once.
        validation_batch_size: b in validation, default: `batch_size`.
        validation_fraction: share of the documents that is kept for validation.
        max_bytes: use so much of the text only.
        num_workers: worker processes of each loader.
        seed: of the order in which training sequences are read.
        cache_dir: where token files are kept, default: `$HYBRID_STRATEGY_CACHE` or `~/.cache/hybrid_strategy`.

    Attributes:
        progress: called while text is prepared, see `prepare.Progress`; set it to show the progress.
    """

    def __init__(
        self,
        files: Sequence[str] | str | None = None,
        *,
        vocab_size: int = 8192,
        sequence_length: int = 256,
        batch_size: int = 8,
        validation_batch_size: int | None = None,
        validation_fraction: float = 0.01,
        max_bytes: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
        cache_dir: str | Path | None = None,
    ) -> None:
        super().__init__()
        patterns = (files,) if isinstance(files, str) else tuple(files or ())
        self.spec = TextSpec(patterns, vocab_size, validation_fraction, max_bytes, cache_dir)
        self.sequence_length, self.batch_size, self.num_workers, self.seed = sequence_length, batch_size, num_workers, seed
        self.validation_batch_size = validation_batch_size or batch_size
        self.progress: Progress | None = None
        self.prepared: PreparedText | None = None
        self.train_data: PackedTokens | None = None
        self.validation_data: PackedTokens | None = None

    @property
    def vocab_size(self) -> int:
        """Every token is less than this; known before the text is prepared."""
        return self.spec.vocab_size

    def prepare_data(self) -> None:
        """Tokenises the text, unless that was done before."""
        prepare_text(self.spec, self.progress)

    def setup(self, stage: str | None = None) -> None:
        """Opens the token files, once."""
        if self.prepared is not None:
            return
        self.prepared = prepare_text(self.spec, self.progress)
        self.train_data = PackedTokens(self.prepared.train, self.sequence_length)
        self.validation_data = PackedTokens(self.prepared.validation, self.sequence_length)

    def train_dataloader(self) -> DataLoader[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        return self._loader(self.train_data, self.batch_size, shuffle=True, generator=generator)

    def val_dataloader(self) -> DataLoader[dict[str, torch.Tensor]]:
        return self._loader(self.validation_data, self.validation_batch_size, shuffle=False)

    def _loader(self, data: PackedTokens | None, batch_size: int, **options: Any) -> DataLoader[dict[str, torch.Tensor]]:
        if data is None:
            raise DataError(message("datamodule", "TextDataModule", "it is not set up", "", "Call setup() before its loaders"))
        return DataLoader(
            data,
            batch_size=batch_size,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
            **options,
        )
