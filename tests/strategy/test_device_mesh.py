"""A module written for Lightning's ModelParallelStrategy finds its axes; one that has sharded itself is refused by name."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from hybrid_strategy import HybridParallelStrategy
from hybrid_strategy.errors import ModelError
from tests.support.ranks import run_ranks
from tests.support.training import TinyLM, Tokens


class AxesLM(TinyLM):
    """Looks its axes up where ModelParallelStrategy has them."""

    def configure_model(self) -> None:
        super().configure_model()
        mesh = self.device_mesh
        self.axes = {name: mesh[name].size() for name in ("data_parallel", "tensor_parallel", "pipeline_parallel")}
        for name in mesh.mesh_dim_names:  # each axis has a group that works, one of this rank alone too
            dist.all_reduce(ones := torch.ones(1), group=mesh.get_group(name))
            assert ones.item() == mesh[name].size() == mesh.get_group(name).size()


class ShardedLM(TinyLM):
    """Shards itself."""

    def configure_model(self) -> None:
        super().configure_model()
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


def fit(module: pl.LightningModule, **strategy: Any) -> None:
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        accelerator="cpu", devices=4, strategy=HybridParallelStrategy(**strategy), max_steps=1, limit_val_batches=0, **options
    )
    trainer.fit(module, DataLoader(Tokens(16), batch_size=4))


def axes_here() -> dict[str, int]:
    module = AxesLM()
    fit(module, tensor_parallel_size=2)
    return module.axes


def groups_here() -> int:
    fit(TinyLM(), tensor_parallel_size=2)
    return len(_world.pg_map)


def refusal_here() -> str:
    try:
        fit(ShardedLM())
    except ModelError as error:
        return str(error)
    return ""


def test_finds_its_axes() -> None:
    expected = {"data_parallel": 2, "tensor_parallel": 2, "pipeline_parallel": 1}
    assert run_ranks(axes_here, 4, process_group=False) == [expected] * 4


def test_only_axes_longer_than_one_have_groups_of_their_own() -> None:
    """Of all ranks, data, tensor, this rank alone, and the one in which signals are agreed on."""
    assert run_ranks(groups_here, 4, process_group=False) == [5] * 4


def test_own_sharding_is_refused_on_every_rank() -> None:
    messages = run_ranks(refusal_here, 4, process_group=False)
    assert all("parallelises itself" in each and "parallel_plan" in each for each in messages)
    assert len(set(messages)) == 1


def test_world_of_one_has_a_mesh_too() -> None:
    assert run_ranks(single_here, 1, process_group=False) == [1]


def single_here() -> int:
    class Mesh(TinyLM):
        def on_fit_start(self) -> None:
            self.size = self.device_mesh["data_parallel"].size()

    module = Mesh()
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy="hybrid", fast_dev_run=1, enable_progress_bar=False, enable_model_summary=False
    )
    trainer.fit(module, DataLoader(Tokens(4), batch_size=4))
    assert isinstance(trainer.strategy.root_device, torch.device)
    return module.size
