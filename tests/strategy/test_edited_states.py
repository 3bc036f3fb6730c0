"""What a module, its metrics and its hooks make of a state dict is saved and loaded, in one process and in several."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from hybrid_strategy import HybridParallelStrategy, ParallelPlan, load_from_checkpoint
from hybrid_strategy.checkpoint.loading import read_whole, saved_names
from hybrid_strategy.cli.main import main as export
from hybrid_strategy.errors import CheckpointError, ConfigError
from tests.support.ranks import run_ranks

LAYOUTS: list[dict[str, Any]] = [
    {"data_parallel_size": 2, "sharding": "zero3"},
    {"tensor_parallel_size": 2, "parallel_plan": ParallelPlan(tensor={"0": "colwise", "1": "rowwise"})},
    {"pipeline_parallel_size": 2, "num_microbatches": 2},
]


@pytest.fixture(autouse=True)
def _the_group_of_one_ends() -> Iterator[None]:
    """A Trainer leaves the process group for its next run, as in all of Lightning."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Plain(pl.LightningModule):
    """Two layers, tied to nothing; a teacher that need not be saved."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4))
        self.net[0].register_buffer("calls", torch.tensor(0), persistent=False)
        self.teacher = nn.Linear(4, 4).requires_grad_(False)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self.net(batch) - self.teacher(batch)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.1, momentum=0.9)


class Hooked(Plain):
    """Leaves the teacher out, renames a weight, adds an entry; and takes all of it back."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        del state["teacher.weight"], state["teacher.bias"]
        state["first"] = state.pop("net.0.weight")
        state["note"] = torch.arange(3)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        assert state.pop("note").tolist() == [0, 1, 2]
        whole = state.pop("first")
        assert whole.shape == (8, 4)
        state["net.0.weight"] = whole
        state["net.1.bias"] = state["net.1.bias"] + 1
        state |= {"teacher.weight": torch.eye(4), "teacher.bias": torch.zeros(4)}


class Older(Hooked):
    """A part reads what an older version of it has saved, which is edited before; nobody misses the teacher's bias."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.net[1].register_load_state_dict_pre_hook(self._read_older)
        self.register_load_state_dict_post_hook(lambda _, keys: keys.missing_keys.remove("teacher.bias"))

    @staticmethod
    def _read_older(part: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}w").t()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        state = checkpoint["state_dict"]
        state["net.1.w"] = state.pop("net.1.weight").t()
        del state["teacher.bias"]


class Filtering(Plain):
    """`state_dict` of its own, without the teacher; `load_state_dict` of its own, which does not ask for it."""

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        return {name: each for name, each in super().state_dict(*arguments, **options).items() if "teacher" not in name}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict({**state_dict, "net.1.bias": torch.full((4,), 7.0)}, strict=False)


class Counting(Plain):
    """A metric that was told to be saved, as it is during an epoch."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.mean = MeanMetric()
        self.mean.persistent(True)

    def on_train_start(self) -> None:
        if self.trainer.global_step == 0:
            self.mean.update(torch.tensor([2.0, 4.0]))


class Tied(Plain):
    """A weight with two names, and an extra state."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.again = nn.Linear(4, width)
        self.again.weight = self.net[0].weight


class Clashing(Plain):
    """Two optimizers of one parameter, and a parameter called as the second of them would be."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.extra = nn.ParameterDict({"w": nn.Parameter(torch.ones(2)), "w@1": nn.Parameter(torch.ones(2))})

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]


def _fit(module: pl.LightningModule, layout: dict[str, Any], path: str | None = None, steps: int = 1) -> pl.Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1 if not layout else 2,
        strategy=HybridParallelStrategy(**layout),
        max_steps=steps,
        enable_model_summary=False,
        **quiet,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(torch.ones(16, 4), batch_size=4), ckpt_path=path)
    return trainer


def _values(path: str) -> dict[str, torch.Tensor]:
    return {key: read_whole(path, key) for key in saved_names(path) if key.startswith("model.")}


def _edited(folder: str, layout: dict[str, Any], reader: type[Hooked]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What is saved, and what is there once it has been loaded and saved as a plain module."""
    path = os.path.join(folder, "hooked")
    _fit(Hooked(), layout).save_checkpoint(path)
    trainer = _fit(module := reader(), layout, path)
    module.on_save_checkpoint = lambda checkpoint: None  # type: ignore[method-assign]
    trainer.save_checkpoint(again := os.path.join(folder, "plain"))
    return _values(path), _values(again)


def _check_edited(saved: dict[str, torch.Tensor], again: dict[str, torch.Tensor]) -> None:
    assert set(saved) == {"model.first", "model.net.0.bias", "model.net.1.weight", "model.net.1.bias"}
    assert torch.equal(again["model.net.0.weight"], saved["model.first"])
    assert torch.equal(again["model.net.1.weight"], saved["model.net.1.weight"])
    assert torch.equal(again["model.net.1.bias"], saved["model.net.1.bias"] + 1)
    assert torch.equal(again["model.teacher.weight"], torch.eye(4))


def test_hooks_edit_the_state_dict(tmp_path: Path) -> None:
    _check_edited(*run_ranks(_edited, 1, str(tmp_path), {}, Hooked, process_group=False)[0])


@pytest.mark.parametrize(
    ("layout", "reader"), list(zip(LAYOUTS, (Older, Hooked, Older), strict=True)), ids=["zero3", "tp2", "pp2"]
)
def test_hooks_edit_the_state_dict_in_every_layout(tmp_path: Path, layout: dict[str, Any], reader: type[Hooked]) -> None:
    saved, again = run_ranks(_edited, 2, str(tmp_path), layout, reader)[0]
    _check_edited(saved, again)
    alone = run_ranks(_edited, 1, str(tmp_path / "alone"), {}, Hooked, process_group=False)[0][0]
    assert all(torch.allclose(saved[key], alone[key]) for key in alone)


def test_state_dicts_of_its_own(tmp_path: Path) -> None:
    _fit(first := Filtering(), {}).save_checkpoint(tmp_path / "a")
    assert not any("teacher" in name for name in saved_names(tmp_path / "a"))
    _fit(second := Filtering(), {}, str(tmp_path / "a"))
    assert torch.equal(second.net[0].weight, first.net[0].weight)
    assert second.net[1].bias.tolist() == [7.0] * 4


class Owner(nn.Linear):
    """Places its weights by itself."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *others: Any) -> None:
        self.weight.data.copy_(state[f"{prefix}weight"])


def test_a_part_that_places_weights_by_itself_is_refused(tmp_path: Path) -> None:
    module = Plain()
    _fit(module, {}).save_checkpoint(tmp_path / "a")
    module.net[1].__class__ = Owner
    with pytest.raises(CheckpointError, match=r"module is 'net\.1': _load_from_state_dict of this part"):
        _fit(module, {}, str(tmp_path / "a"))


def test_states_of_metrics_that_are_to_be_kept(tmp_path: Path) -> None:
    _fit(Counting(), {}).save_checkpoint(tmp_path / "a")
    _fit(second := Counting(), {}, str(tmp_path / "a"))
    assert (second.mean.mean_value, second.mean.weight) == (6.0, 2.0)
    found = load_from_checkpoint(Counting, tmp_path / "a").mean
    assert (found.mean_value, found.weight) == (6.0, 2.0)


def test_an_entry_that_nobody_takes_back_is_refused(tmp_path: Path) -> None:
    _fit(Hooked(), {}).save_checkpoint(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"Without a place in the model: model\.first"):
        _fit(Plain(), {}, str(tmp_path / "a"))


def test_a_module_of_its_own_out_of_a_folder(tmp_path: Path) -> None:
    module = Tied(width=6)
    _fit(module, {}).save_checkpoint(tmp_path / "a")
    found = load_from_checkpoint(Tied, tmp_path / "a")
    assert found.hparams["width"] == 6
    assert all(torch.equal(a, b) for a, b in zip(found.state_dict().values(), module.state_dict().values(), strict=True))
    assert torch.equal(load_from_checkpoint(Hooked, _hooked(tmp_path)).teacher.weight, torch.eye(4))
    assert export(["export", str(tmp_path / "a"), str(tmp_path / "out.ckpt")]) == 0
    assert torch.equal(Tied.load_from_checkpoint(tmp_path / "out.ckpt").again.weight, module.again.weight)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        load_from_checkpoint(Tied, tmp_path / "b")


def _hooked(folder: Path) -> Path:
    _fit(Hooked(), {}).save_checkpoint(folder / "hooked")
    return folder / "hooked"


def test_a_name_that_means_another_state_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"parameter name is 'extra.w@1'.*extra.w\b"):
        _fit(Clashing(), {})
