"""The host memory that a checkpoint in the background is said to need is what it takes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from torch.utils.data import DataLoader

from hybrid_strategy import HybridParallelStrategy
from hybrid_strategy.models.llama import PART as LLAMA
from hybrid_strategy.modules.language_model import LanguageModel
from hybrid_strategy.planning.staging import checkpoint_bytes, staging_bytes
from hybrid_strategy.spec.training import OptimizerSpec
from tests.support.ranks import run_ranks
from tests.support.training import Tokens

SHAPE = replace(LLAMA.tiny, sequence_length=16, vocab_size=64)


def staged(folder: str, strategy: dict[str, Any], optimizer: str) -> int:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    made = HybridParallelStrategy(asynchronous_checkpoint=True, **strategy)
    held = []

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
            trainer.save_checkpoint(os.path.join(folder, "a.ckpt"))
            held.append(made.writer.staged_bytes)

    devices = int(os.environ["WORLD_SIZE"])
    trainer = pl.Trainer(accelerator="cpu", devices=devices, strategy=made, max_steps=1, callbacks=[Save()], **quiet)
    trainer.fit(LanguageModel(SHAPE, OptimizerSpec(name=optimizer)), DataLoader(Tokens(8), batch_size=2))
    return held[0]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("strategy", [{}, {"sharding": "zero3"}, {"tensor_parallel_size": 2}])
def test_each_rank_copies_its_share(strategy: dict[str, Any], optimizer: str, tmp_path: Path) -> None:
    whole = checkpoint_bytes(SHAPE.num_parameters, OptimizerSpec(name=optimizer))
    found = run_ranks(staged, 2, str(tmp_path), strategy, optimizer, process_group=False)
    assert sum(found) == pytest.approx(whole, rel=0.01)
    assert max(found) <= 1.3 * staging_bytes(whole, 2)
