"""The ways in which Lightning and its friends reach the strategy."""

from __future__ import annotations

import subprocess
import sys

import pytest

ORDERS = {
    "lightning first": "import lightning.pytorch as pl\nimport hybrid_strategy",
    "hybrid_strategy first": "import hybrid_strategy\nimport lightning.pytorch as pl",
    "lightning inside its import": "from hybrid_strategy import HybridParallelStrategy\nimport lightning.pytorch as pl",
}
BY_NAME = """
trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="hybrid", logger=False, enable_checkpointing=False)
print(type(trainer.strategy).__module__, type(trainer.strategy).__name__, trainer.strategy.layout.name)
"""
CLI = """
import sys
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

cli = LightningCLI(BoringModel, run=False, save_config_callback=None, args=sys.argv[1:])
options = cli.trainer.strategy.options
print(type(cli.trainer.strategy).__name__, options.tensor_parallel_size, options.sharding, options.timeout)
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a fresh process."""
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("order", ORDERS)
def test_name_is_known_in_either_order_of_imports(order: str) -> None:
    done = run(ORDERS[order] + BY_NAME)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-3:] == ["hybrid_strategy.strategy.hybrid", "HybridParallelStrategy", "dp2"]


def test_name_is_not_known_without_the_import() -> None:
    """The wording that docs/errors.md explains."""
    done = run("import lightning.pytorch as pl" + BY_NAME)
    assert "You selected an invalid strategy name: `strategy='hybrid'`" in done.stderr


def test_lightning_cli_finds_the_class() -> None:
    strategy = ["--trainer.strategy", "hybrid_strategy.HybridParallelStrategy"]
    sizes = ["--trainer.strategy.tensor_parallel_size", "2", "--trainer.strategy.sharding", "zero1"]
    trainer = ["--trainer.accelerator", "cpu", "--trainer.devices", "4", "--trainer.logger", "false"]
    done = run(CLI, *strategy, *sizes, "--trainer.strategy.timeout", "60", *trainer)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "HybridParallelStrategy 2 zero1 0:01:00"


def test_lightning_cli_refuses_an_unknown_argument() -> None:
    done = run(CLI, "--trainer.strategy", "hybrid_strategy.HybridParallelStrategy", "--trainer.strategy.tensor_size", "2")
    assert done.returncode == 2
    assert "tensor_size" in done.stderr
