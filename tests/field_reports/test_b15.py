"""B15, kind of fault: data is divided by the number of processes, not by the number of data-parallel ranks.

Tensor and pipeline peers read the same samples, data-parallel ranks different ones, every sample once: in training, validation,
test and prediction, from datasets with indices and streams, with and without worker processes, in numbers that do not divide.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, default_collate, get_worker_info

from hybrid_strategy import HybridParallelStrategy
from hybrid_strategy.data.check import check_samples
from tests.support.ranks import RankFailedError, run_ranks
from tests.support.training import SHAPE, TinyLM

LAYOUTS = {
    "tp2_dp2": {"tensor_parallel_size": 2},
    "pp2_dp2": {"pipeline_parallel_size": 2, "num_microbatches": 2},
    "pp2_dp2_zero3": {"pipeline_parallel_size": 2, "num_microbatches": 2, "sharding": "zero3"},
    "tp2_pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}


def _row(index: int) -> dict[str, Tensor]:
    tokens = torch.randint(0, 64, (17,), generator=torch.Generator().manual_seed(index))
    return {"input_ids": tokens[:-1], "labels": tokens[1:], "index": torch.tensor(index)}


class Indexed(Dataset[dict[str, Tensor]]):
    """Rows that say which they are."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return _row(index)


class Stream(IterableDataset[dict[str, Tensor]]):
    """The same rows as a stream that knows nothing of ranks; its workers divide it, as torch wants it of every stream."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return (_row(index) for index in range(first, self.rows, step))


class Module(TinyLM):
    """A module with every kind of step."""

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        assert self.model is not None
        return self.model(batch["input_ids"]).argmax(-1)


class Reader(pl.Callback):
    """Notes which real rows this rank reads, by kind of step."""

    def __init__(self) -> None:
        self.read: dict[str, list[int]] = {"train": [], "validate": [], "test": [], "predict": []}

    def _note(self, kind: str, loader: Any, batch: dict[str, Tensor], index: int) -> None:
        rows = batch["index"].tolist()
        self.read[kind] += rows[: loader.mesh.rows_of(index)] if loader.mesh.rows_of(index) is not None else rows

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self._note("train", trainer.train_dataloader, batch, batch_idx)

    def on_validation_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int, loader: int = 0) -> None:
        self._note("validate", trainer.val_dataloaders, batch, batch_idx)

    def on_test_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int, loader: int = 0) -> None:
        self._note("test", trainer.test_dataloaders, batch, batch_idx)

    def on_predict_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int, loader: int = 0) -> None:
        self._note("predict", trainer.predict_dataloaders, batch, batch_idx)


def _trainer(layout: str, *callbacks: pl.Callback) -> pl.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=HybridParallelStrategy(**LAYOUTS[layout]),
        max_epochs=1,
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
        **quiet,
    )


def _read(layout: str, data: Any, num_workers: int) -> dict[str, list[int]]:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # the pool's ranks may have workers
    reader = Reader()
    trainer, module = _trainer(layout, reader), Module(SHAPE)

    def loader(shuffle: bool = False) -> DataLoader[Any]:
        context = "fork" if num_workers else None  # in a spawned rank the default is to spawn, with all imports anew
        return DataLoader(data, batch_size=3, num_workers=num_workers, shuffle=shuffle, multiprocessing_context=context)

    trainer.fit(module, loader(shuffle=not isinstance(data, IterableDataset)), loader())
    trainer.test(module, loader(), verbose=False)
    trainer.predict(module, loader(), return_predictions=False)
    return reader.read


@pytest.mark.parametrize(
    ("kind", "layout", "num_workers"),
    [*((kind, layout, 0) for kind in (Indexed, Stream) for layout in LAYOUTS), (Indexed, "tp2_pp2", 2), (Stream, "pp2_dp2", 2)],
)  # how workers read depends on the number of data-parallel ranks only
def test_every_sample_is_read_once_by_the_ranks_that_share_it(kind: Any, layout: str, num_workers: int) -> None:
    rows = 22
    found = run_ranks(_read, 4, layout, kind(rows), num_workers, process_group=False, timeout=120)
    sizes = HybridParallelStrategy(**LAYOUTS[layout]).options.layout(4)
    for step in ("train", "validate", "test", "predict"):
        report = check_samples([each[step] for each in found], sizes, rows)
        assert report.good, f"{step}: {report.describe()}"


def _kwargs(layout: str) -> dict[str, Any]:
    trainer = _trainer(layout)
    return trainer.strategy.distributed_sampler_kwargs  # type: ignore[attr-defined]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_lightning_asks_for_its_own_sampler(layout: str) -> None:
    sizes = HybridParallelStrategy(**LAYOUTS[layout]).options.layout(4)
    for rank, found in enumerate(run_ranks(_kwargs, 4, layout, process_group=False)):
        assert found == {"num_replicas": sizes.data_parallel_size, "rank": sizes.coordinate(rank).data_parallel}


def _fit_with(layout: str, make: Any) -> None:
    _trainer(layout).fit(Module(SHAPE), make())


def _already_divided() -> DataLoader[Any]:
    data = Indexed(16)
    return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, num_replicas=4, rank=int(os.environ["RANK"])))


class _Feed:
    """An iterable of batches that is no DataLoader."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for start in range(0, 8, 2):
            yield default_collate([_row(start), _row(start + 1)])

    def __len__(self) -> int:
        return 4


def _first_rows(layout: str) -> list[int]:
    reader = Reader()
    _trainer(layout, reader).fit(Module(SHAPE), _already_divided())
    return reader.read["train"]


def test_a_sampler_that_was_divided_by_the_world_is_made_one_over_all_samples() -> None:
    found = run_ranks(_first_rows, 4, "tp2_dp2", process_group=False)
    report = check_samples(found, HybridParallelStrategy(**LAYOUTS["tp2_dp2"]).options.layout(4), 16)
    assert report.good, report.describe()


def test_what_is_no_loader_cannot_be_shared_out_and_is_refused() -> None:
    with pytest.raises(RankFailedError, match="only a torch DataLoader can be shared out over data-parallel ranks"):
        run_ranks(_fit_with, 4, "tp2_dp2", _Feed, process_group=False)
    run_ranks(_fit_with, 4, "tp2_pp2", _Feed, process_group=False)
