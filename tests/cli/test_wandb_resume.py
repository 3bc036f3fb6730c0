"""A run that goes on from a checkpoint goes on with the W&B run that wrote it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from hybrid_strategy import HybridParallelStrategy
from hybrid_strategy.checkpoint.verify import read_meta
from hybrid_strategy.cli.fit import logger_settings
from hybrid_strategy.config.settings import RunConfig
from hybrid_strategy.config.targets import WandbSettings
from hybrid_strategy.reporting.wandb_run import WandbRunLogger
from tests.support.ranks import run_ranks
from tests.support.training import TinyLM, Tokens


def logged(folder: str, steps: int, checkpoint: str | None, run_id: str | None) -> tuple[str, list[str]]:
    """Trains and saves; the id of its W&B run, and what was said of it on resuming."""
    logger = WandbRunLogger(mode="offline", save_dir=folder, id=run_id)
    said: list[str] = []

    class Keeps(HybridParallelStrategy):
        def load_checkpoint(self, *arguments: Any, **more: Any) -> Any:
            state = super().load_checkpoint(*arguments, **more)
            said.extend(self._loaded.certificate.lines())
            return state

    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=Keeps(), max_steps=steps, logger=logger, **quiet)
    _ = logger.experiment
    try:
        trainer.fit(TinyLM(), DataLoader(Tokens(16), batch_size=4), ckpt_path=checkpoint)
        trainer.save_checkpoint(f"{folder}/step{steps}.ckpt")
        return str(logger.version), [line.strip() for line in said if "W&B" in line]
    finally:
        logger.finish()


def test_the_id_goes_with_the_checkpoint(tmp_path: Path) -> None:
    ((first, said),) = run_ranks(logged, 1, str(tmp_path), 1, None, None, process_group=False)
    checkpoint = tmp_path / "step1.ckpt"
    assert said == []
    assert read_meta(checkpoint)["wandb_id"] == first
    given = {"_target_": WandbSettings._target_, "id": None}
    config = replace(RunConfig(), resume=str(checkpoint), logger={"wandb": given, "other": {**given, "id": "mine"}, "none": None})
    found = logger_settings(config)
    assert (found["wandb"]["id"], found["other"]["id"], found["none"]) == (first, "mine", None)
    ((second, said),) = run_ranks(logged, 1, str(tmp_path), 2, str(checkpoint), first, process_group=False)
    assert second == first
    assert said == [f"restored      W&B run: {first}"]
    ((third, said),) = run_ranks(logged, 1, str(tmp_path), 3, str(checkpoint), None, process_group=False)
    assert third != first
    assert said == [f"NOT restored  W&B run: it was {first}, this is {third}; give the logger id={first!r} to go on with it"]
