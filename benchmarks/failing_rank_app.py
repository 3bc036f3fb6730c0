"""The application that `failing_rank.py` gives to submitit: a Hydra main around a Trainer, one task of the job for each rank."""

from __future__ import annotations

import hydra
from lightning.pytorch import Trainer
from omegaconf import DictConfig

from hybrid_strategy import HybridParallelStrategy
from tests.cluster.unruly import Unruly, UnrulyData


@hydra.main(version_base="1.3", config_path=None)
def main(config: DictConfig) -> None:
    module = Unruly(kind=config.kind)
    trainer = Trainer(
        accelerator="cpu",
        num_nodes=2,
        devices=1,
        strategy=HybridParallelStrategy(),
        max_steps=100,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, UnrulyData())


if __name__ == "__main__":
    main()
