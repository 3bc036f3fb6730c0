"""The ways in which Lightning and its friends reach the strategy."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys

from tests.support.ranks import run_ranks

ORDERS = {
    "lightning first": "import hybrid_strategy",
    "hybrid_strategy first": "import hybrid_strategy\nimport lightning.pytorch as pl",
    "lightning inside its import": "from hybrid_strategy import HybridParallelStrategy\nimport lightning.pytorch as pl",
}
BY_NAME = """
trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="hybrid", logger=False, enable_checkpointing=False)
print(type(trainer.strategy).__module__, type(trainer.strategy).__name__, trainer.strategy.layout.name)
"""
UNKNOWN = """
import lightning.pytorch as pl
try:
    pl.Trainer(accelerator="cpu", devices=2, strategy="hybrid")
except ValueError as error:
    print(error)
else:
    sys.exit("the name is known without the import")
"""


IN_TURN = """
import os, sys, torch, torchmetrics
assert "lightning" not in sys.modules
for code in sys.argv[1:]:
    if os.fork() == 0:
        exec(code)
        sys.stdout.flush()
        os._exit(0)
    if os.wait()[1]:
        sys.exit(f"failed: {code}")
"""
"""Each code in a process of its own, which knows neither Lightning nor this package; what takes them seconds to import it has."""


def test_name_is_known_in_either_order_of_imports() -> None:
    """And not known without the import, in the words that docs/errors.md explains."""
    codes = [f"{UNKNOWN if order == 'lightning first' else ''}{ORDERS[order]}{BY_NAME}" for order in ORDERS]
    done = subprocess.run([sys.executable, "-c", IN_TURN, *codes], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("hybrid_strategy.strategy.hybrid HybridParallelStrategy dp2") == len(ORDERS)
    assert done.stdout.count("You selected an invalid strategy name: `strategy='hybrid'`") == 1


def _command(*arguments: str) -> tuple[int, str]:
    """LightningCLI with these arguments: its exit code, and what it said or made."""
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            cli = LightningCLI(BoringModel, run=False, save_config_callback=None, args=list(arguments))
    except SystemExit as end:
        return int(end.code or 0), said.getvalue()
    options = cli.trainer.strategy.options
    made = type(cli.trainer.strategy).__name__, options.tensor_parallel_size, options.sharding, options.timeout
    return 0, " ".join(map(str, made))


def test_lightning_cli_finds_the_class() -> None:
    strategy = ["--trainer.strategy", "hybrid_strategy.HybridParallelStrategy"]
    sizes = ["--trainer.strategy.tensor_parallel_size", "2", "--trainer.strategy.sharding", "zero1"]
    trainer = ["--trainer.accelerator", "cpu", "--trainer.devices", "4", "--trainer.logger", "false"]
    found = run_ranks(_command, 1, *strategy, *sizes, "--trainer.strategy.timeout", "60", *trainer, process_group=False)
    assert found == [(0, "HybridParallelStrategy 2 zero1 0:01:00")]


def test_lightning_cli_refuses_an_unknown_argument() -> None:
    strategy = ["--trainer.strategy", "hybrid_strategy.HybridParallelStrategy", "--trainer.strategy.tensor_size", "2"]
    ((code, said),) = run_ranks(_command, 1, *strategy, process_group=False)
    assert code == 2
    assert "tensor_size" in said
