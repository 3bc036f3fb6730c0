"""The entry of a rank, piece by piece; whole runs of it are in `test_local`."""

from __future__ import annotations

import gc
import json

from hybrid_strategy.launch import worker


def test_the_collector_sleeps_while_a_rank_imports_and_no_longer() -> None:
    try:
        assert worker._imported("json:loads") is json.loads
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0, "what was imported is looked at again and again"
    finally:
        gc.unfreeze()
