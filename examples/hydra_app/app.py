"""A Hydra application of your own: `defaults: - strategy: hybrid` in its configuration, and the strategy is an object away.

python examples/hydra_app/app.py strategy=tp2 devices=2 --cfg job
torchrun --nproc-per-node 2 examples/hydra_app/app.py strategy=pp2 devices=2
"""

from __future__ import annotations

import hydra
import lightning.pytorch as pl
from omegaconf import DictConfig
from torch import Tensor, nn, optim, randn
from torch.utils.data import DataLoader


class Regression(pl.LightningModule):
    """Learns to add up its inputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.model(batch), batch.sum(1, keepdim=True))

    def configure_optimizers(self) -> optim.Optimizer:
        return optim.AdamW(self.parameters(), lr=1e-2)


@hydra.main(config_path="conf", config_name="app", version_base="1.3")
def main(config: DictConfig) -> None:
    """Trains with whatever strategy the configuration describes."""
    pl.seed_everything(1)  # every process makes the data: the same
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=config.devices,
        strategy=hydra.utils.instantiate(config.strategy),
        max_steps=config.max_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Regression(config.width), DataLoader(randn(256, 8), batch_size=16))
    if trainer.is_global_zero:
        print(f"trained {trainer.global_step} steps with {type(trainer.strategy).__name__}")


if __name__ == "__main__":
    main()
