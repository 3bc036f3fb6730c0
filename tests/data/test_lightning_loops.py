"""What Lightning's own loops do with a converted loader: epochs, restart in the middle of an epoch, prediction."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader, IterableDataset

from hybrid_strategy.data.loader import mesh_dataloader

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
]


class Sharing(SingleDeviceStrategy):
    """One rank of a data-parallel run; as a strategy should, it sets the position before the loader is iterated."""

    def __init__(self, ranks, rank, state=None):
        super().__init__(device="cpu")
        self.ranks, self.data_rank, self.state = ranks, rank, state

    def process_dataloader(self, dataloader):
        loader = mesh_dataloader(dataloader, self.ranks, self.data_rank, seed=0)
        if self.state is not None:
            loader.load_state_dict(self.state)
            progress = self.lightning_module.trainer.fit_loop.epoch_loop.batch_progress.current
            unfinished = progress.processed - progress.completed  # 1 where it was saved in on_train_batch_end
            progress.ready = progress.started = progress.processed = loader.mesh.first_batch
            progress.completed = loader.mesh.first_batch - unfinished
        return loader


class Reading(LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.read = []

    def training_step(self, batch, batch_idx):
        mesh = self.trainer.train_dataloader.mesh
        self.read.append((self.current_epoch, batch[: mesh.rows_of(batch_idx)].tolist()))
        return self.weight * batch.float().mean()

    def predict_step(self, batch, batch_idx):
        return batch

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(22))


class Position(Callback):
    """Tells the loader what was trained on, and saves after `save_at` steps."""

    def __init__(self, path, save_at):
        self.path, self.save_at = path, save_at

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.train_dataloader.mesh.batches_done = batch_idx + 1
        if trainer.global_step == self.save_at:
            trainer.save_checkpoint(self.path)


def trainer(folder, ranks, rank, state=None, save_at=None, **options):
    return Trainer(
        strategy=Sharing(ranks, rank, state),
        callbacks=[Position(folder / "at.ckpt", save_at)],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )


def data(workers, streamed):
    options = {} if streamed else {"shuffle": True}
    return DataLoader(Numbers() if streamed else range(22), batch_size=2, num_workers=workers, **options)


def fit(folder, ranks, rank, loader, checkpoint=None, **options):
    module = Reading()
    trainer(folder, ranks, rank, **options).fit(module, loader, ckpt_path=checkpoint)
    return module.read


def in_order(reads):
    """Samples by (epoch, step) over the ranks."""
    return [(step[0][0], sorted(chain(*(rows for _, rows in step)))) for step in zip(*reads, strict=True)]


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_are_shuffled_anew_and_complete(tmp_path, workers):
    reads = [fit(tmp_path, 2, rank, data(workers, False), max_epochs=3) for rank in range(2)]
    orders = [[rows for epoch, rows in in_order(reads) if epoch == each] for each in range(3)]
    assert all(sorted(chain(*order)) == list(range(22)) for order in orders)
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("step", [3, 6, 8])
def test_restart_in_the_same_layout_reads_what_an_uninterrupted_run_reads(tmp_path, workers, streamed, step):
    """22 samples in blocks of 4: an epoch has 6 steps, the last one uneven."""
    for rank in range(2):
        whole = fit(tmp_path, 2, rank, data(workers, streamed), max_epochs=2)
        before = fit(tmp_path, 2, rank, data(workers, streamed), max_steps=step, save_at=step)
        after = fit(tmp_path, 2, rank, data(workers, streamed), tmp_path / "at.ckpt", max_epochs=2)
        assert before + after == whole
        (tmp_path / "at.ckpt").unlink()


@pytest.mark.parametrize("layout", [(1, 2), (2, 1), (2, 3)])
@pytest.mark.parametrize("step", [2, 5, 7])
def test_restart_in_another_layout_reads_the_rest(tmp_path, layout, step):
    """The trainer's count of finished batches is put into the units of the new layout; nothing else is to be done."""
    old, new = layout
    whole = [row for _, rows in fit(tmp_path, 1, 0, data(0, False), max_epochs=3) for row in rows]
    fit(tmp_path, old, 0, data(0, False), max_steps=step, save_at=step)
    checkpoint = tmp_path / "at.ckpt"
    (state,) = torch.load(checkpoint)["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    after = [fit(tmp_path, new, rank, data(0, False), checkpoint, state=state, max_epochs=3) for rank in range(new)]
    rest = [row for step in zip(*after, strict=True) for _, rows in step for row in rows]
    assert rest == whole[state["epoch"] * 22 + state["consumed_samples"] :]


def test_prediction_reads_every_sample_once_and_keeps_its_indices(tmp_path):
    rows = []
    for rank in range(2):
        loader = DataLoader(range(9), batch_size=2)
        one = trainer(tmp_path, 2, rank)
        predicted = one.predict(Reading(), loader)
        mesh = one.predict_dataloaders.mesh
        assert type(one.predict_dataloaders.batch_sampler).__name__ == "_IndexBatchSamplerWrapper"
        rows += [row for step, batch in enumerate(predicted) for row in batch.tolist()[: mesh.rows_of(step)]]
    assert sorted(rows) == list(range(9))
