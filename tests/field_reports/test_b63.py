"""B63, kind of fault: a run that goes on with another layout cannot say so, or its configuration is unresolved or has a gap.

What is logged is the resolved configuration as plain data; a changed one is accepted; a value that is missing is refused before.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hybrid_strategy.config.compose import Source, run_config
from hybrid_strategy.config.storage import as_values
from hybrid_strategy.errors import ConfigError
from hybrid_strategy.reporting.wandb_run import WandbRunLogger
from tests.support.wandb_files import config, runs

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
TINY = ("model=llama_tiny", "trainer=cpu")


def test_resolved_and_changed_on_the_way(tmp_path: Path) -> None:
    first = run_config(Source((*TINY, "model.hidden_size=64", "name=run_${seed}")))
    second = replace(first, strategy=replace(first.strategy, tensor_parallel_size=2))
    logger = WandbRunLogger(save_dir=str(tmp_path), id="run1", mode="offline")
    logger.log_hyperparams(as_values(first))
    logger.log_hyperparams(as_values(second))
    logger.finish()
    assert "problem" not in logger.where()
    (run,) = runs(tmp_path)
    stored = config(run)
    assert stored["name"] == "run_1234"
    assert stored["strategy"]["tensor_parallel_size"] == 2
    assert "${" not in str({key: value for key, value in stored.items() if key != "_wandb"})


def test_a_missing_value_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match=r"hidden_size"):
        run_config(Source((*TINY, "model.hidden_size=???")))
