"""B50, kind of fault: a number that is text: `1e-3` is a float to one reader and a string to the next.

Whatever way a value comes in, it has the type of its key, and it is logged with it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_strategy.config.compose import Source, run_config
from hybrid_strategy.config.storage import as_values, read_config, write_config
from hybrid_strategy.errors import ConfigError
from hybrid_strategy.sweeping.grid import choices_of

TINY = ("model=llama_tiny", "trainer=cpu")


def test_a_number_is_a_number_whatever_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\noptimizer:\n  learning_rate: 2e-5\n")
    monkeypatch.setenv("MY_RATE", "3e-4")
    sources = {
        1e-3: Source((*TINY, "optimizer.learning_rate=1e-3")),
        1e-4: Source((*TINY, "optimizer.learning_rate='1e-4'")),
        2e-5: Source((*TINY, "experiment=mine"), str(tmp_path)),
        3e-4: Source((*TINY, "optimizer.learning_rate=${oc.env:MY_RATE}")),
        5e-3: Source((*TINY, *choices_of({"optimizer.learning_rate": "5e-3,1e-2"}, [])[0].overrides[:1])),
    }
    for wanted, source in sources.items():
        config = run_config(source)
        assert config.optimizer.learning_rate == wanted
        assert type(as_values(config)["optimizer"]["learning_rate"]) is float
        write_config(config, tmp_path)
        assert read_config(tmp_path).optimizer.learning_rate == wanted


@pytest.mark.parametrize("value", ["fast", "1e-3x", "'1,0'", "[1e-3]"])
def test_text_that_is_no_number_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate"):
        run_config(Source((*TINY, f"optimizer.learning_rate={value}")))
