"""Libraries talk to the log; the user's terminal is spared."""

from __future__ import annotations

import subprocess
import sys

_CODE = """
import os, sys, warnings, logging
import lightning.pytorch as pl
terminal = os.fdopen(os.dup(2), "w", buffering=1)
os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
sys.stderr = terminal
from hybrid_strategy.reporting.noise import keep_terminal_clear
keep_terminal_clear()
logging.getLogger("lightning.pytorch").info("said by lightning")
warnings.warn_explicit("said by torch", UserWarning, "/site-packages/torch/x.py", 1)
warnings.warn("said by the user")
"""


def test_only_what_concerns_the_user_is_on_the_terminal(tmp_path):
    log = tmp_path / "log"
    found = subprocess.run([sys.executable, "-c", _CODE, str(log)], capture_output=True, text=True, check=True)
    assert found.stderr.strip().splitlines()[-1] == "warning: said by the user"
    assert "said by torch" not in found.stderr
    text = log.read_text()
    assert "said by lightning" in text
    assert "said by torch" in text
