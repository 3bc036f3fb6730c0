"""Every argument of the strategy acts or is refused by name, before a process is started."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from hybrid_strategy import HybridParallelStrategy
from hybrid_strategy.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "start"),
    [
        ({"sequence_parallel": "no"}, "sequence_parallel is 'no': it must be true or false"),
        ({"asynchronous_checkpoint": "no"}, "asynchronous_checkpoint is 'no': it must be true or false"),
        ({"checkpoint_when_busy": None}, "checkpoint_when_busy is None: there is no such way. Known: wait, skip"),
        (
            {"checkpoint_when_busy": "skip"},
            "checkpoint_when_busy is 'skip': it leaves out checkpoints that come while another is",
        ),
        ({"stage_cuts": 3}, "stage_cuts is 3: it is the first unit of every stage but the first. Set a list"),
        ({"module": 3}, "module is 3: it must be the name of a submodule"),
        ({"initial_weights": ""}, "initial_weights is '': it must be a path"),
        ({"initial_weights": "no/such"}, "initial_weights is 'no/such': there is no such file or folder"),
        ({"timeout": float("inf")}, "timeout is inf: it is seconds, or a timedelta, of more than 0"),
        ({"timeout": float("nan")}, "timeout is nan: it is seconds, or a timedelta, of more than 0"),
        ({"seed": True}, "seed is True: a seed is a whole number"),
        ({"process_group_backend": "nccl"}, "process_group_backend is 'nccl': NCCL works on GPUs only"),
    ],
)
def test_what_cannot_be_meant_is_refused(given: dict[str, Any], start: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pl.Trainer(accelerator="cpu", devices=2, strategy=HybridParallelStrategy(**given), logger=False)
    assert str(caught.value).startswith(start)


@pytest.mark.parametrize(
    ("given", "start"),
    [
        ({"sync_batchnorm": True}, "sync_batchnorm is True: a step runs micro-batch by micro-batch"),
        ({"plugins": [AsyncCheckpointIO()]}, "plugins is 'AsyncCheckpointIO': a checkpoint is a folder that all ranks write"),
    ],
)
def test_plugins_that_would_do_nothing_are_refused(given: dict[str, Any], start: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pl.Trainer(accelerator="cpu", devices=2, strategy=HybridParallelStrategy(), logger=False, **given)
    assert str(caught.value).startswith(start)
