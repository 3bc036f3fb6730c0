from __future__ import annotations

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from hybrid_strategy.data.loader import mesh_dataloader
from hybrid_strategy.errors import DataError
from hybrid_strategy.modules.text_data import TextDataModule


@pytest.fixture
def make(tmp_path):
    (tmp_path / "files").mkdir()
    for number in range(20):
        (tmp_path / "files" / f"{number}.txt").write_text(f"number {number} of the files, line by line\n" * 20)
    options = {"vocab_size": 300, "sequence_length": 16, "batch_size": 4, "validation_fraction": 0.2}

    def build(**changes):
        return TextDataModule(str(tmp_path / "files" / "*.txt"), **{**options, "cache_dir": tmp_path / "cache", **changes})

    return build


def prepared(module):
    module.prepare_data()
    module.setup("fit")
    return module


@pytest.mark.parametrize("workers", [0, 1])
def test_batches(make, workers):
    module = prepared(make(num_workers=workers, validation_batch_size=2))
    for loader, rows in ((module.train_dataloader(), 4), (module.val_dataloader(), 2)):
        batch = next(iter(loader))
        assert set(batch) == {"input_ids", "labels"}
        assert all((part.shape, part.dtype) == ((rows, 16), torch.int64) for part in batch.values())
        assert int(batch["labels"].max()) < module.vocab_size == 300


def test_training_data_are_shuffled_by_the_seed_and_validation_data_are_not(make):
    def first(module, name):
        return next(iter(getattr(module, name)()))["input_ids"].tolist()

    one, same, other = prepared(make(seed=1)), prepared(make(seed=1)), prepared(make(seed=2))
    assert first(one, "train_dataloader") == first(same, "train_dataloader") != first(other, "train_dataloader")
    assert first(one, "val_dataloader") == first(other, "val_dataloader")
    sharing = [mesh_dataloader(module.train_dataloader(), 2, 0, seed=0) for module in (one, same, other)]
    mine, again, others = (next(iter(loader))["input_ids"].tolist() for loader in sharing)
    assert mine == again != others


def test_the_vocabulary_is_known_before_anything_is_prepared(make):
    assert make(vocab_size=1234).vocab_size == 1234


def test_loaders_before_setup_are_refused(make):
    with pytest.raises(DataError, match="not set up"):
        make().train_dataloader()


def test_a_sequence_longer_than_the_text_is_refused(make):
    with pytest.raises(DataError, match="sequence_length is 1000000"):
        prepared(make(sequence_length=1_000_000))


def test_the_standard_library_is_the_default(tmp_path):
    module = prepared(TextDataModule(vocab_size=300, sequence_length=32, max_bytes=200_000, cache_dir=tmp_path))
    assert module.prepared.train_tokens > 50_000


class Bigram(LightningModule):
    def __init__(self, vocab_size):
        super().__init__()
        self.table = torch.nn.Embedding(vocab_size, vocab_size)
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.cross_entropy(self.table(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec", "ignore:.*isinstance.treespec")
def test_trains_in_a_trainer(make, tmp_path):
    data = make()
    module = Bigram(data.vocab_size)
    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, data)
    assert module.losses[-1] < module.losses[0] / 2
