"""What the package exports, and that asking for it is cheap."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hybrid_strategy

EXPORTED = [
    "HybridParallelStrategy",
    "Layout",
    "ParallelPlan",
    "ParityOptions",
    "ParityReport",
    "__version__",
    "check_parity",
    "load_from_checkpoint",
]
HEAVY = ["torch", "numpy", "lightning", "pytorch_lightning", "hydra", "omegaconf", "wandb", "rich", "transformers", "tokenizers"]


def loaded_after(code: str) -> list[str]:
    """Which of the heavy libraries a fresh process has imported after `code`."""
    code += f"\nimport sys\nprint('loaded:', *[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.rpartition("loaded:")[2].split()


def test_exported_names() -> None:
    assert sorted(hybrid_strategy.__all__) == sorted(EXPORTED)
    for name in EXPORTED:
        assert getattr(hybrid_strategy, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'HybridStrategy'"):
        _ = hybrid_strategy.HybridStrategy


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert loaded_after("import hybrid_strategy") == []


@pytest.mark.parametrize("module", ["spec.layout", "schedules", "planning.build_plan", "planning.layouts", "registry", "errors"])
def test_floors_below_torch_import_nothing_heavy(module: str) -> None:
    assert loaded_after(f"import hybrid_strategy.{module}") == []


def test_plan_needs_no_torch() -> None:
    code = "from hybrid_strategy.cli.main import main\nassert main(['plan', 'model=llama_tiny', 'strategy=tp2_pp2']) == 0"
    assert not {"torch", "lightning", "wandb", "transformers"} & set(loaded_after(code))


def test_refusal_needs_no_torch() -> None:
    code = "from hybrid_strategy.cli.main import main\nassert main(['train', 'model=llama_tiny', 'strategy.shedule=1F1B']) == 2"
    assert not {"torch", "lightning", "wandb", "transformers"} & set(loaded_after(code))
