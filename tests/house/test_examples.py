"""The examples, and the script in the README, run as they are."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import free_port, run_ranks

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(*arguments: str, cwd: Path) -> str:
    """Runs Python with these arguments; what it printed."""
    process = subprocess.Popen([sys.executable, *arguments], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        shown, errors = process.communicate(timeout=150)
    except subprocess.TimeoutExpired:
        process.terminate()  # so that it ends its own processes
        process.communicate()
        raise
    assert process.returncode == 0, shown + errors
    return shown


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))  # Lightning's own choice is among those that connections get as well


def _as_a_rank(script: str) -> str:
    """Runs a script as torchrun runs it in each of its processes; what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        runpy.run_path(script, run_name="__main__")
    return shown.getvalue()


def torchrun(script: Path) -> str:
    """What the first of two ranks printed; torchrun itself starts one test only, since processes need seconds to import."""
    printed: list[str] = run_ranks(_as_a_rank, 2, str(script), process_group=False)
    return printed[0]


@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_plain_script(launcher: str, tmp_path: Path) -> None:
    script = EXAMPLES / "plain_lightning.py"
    shown = run(str(script), cwd=tmp_path) if launcher == "python" else torchrun(script)
    loss = re.search(r"val_loss (\d\.\d+)", shown)
    assert loss is not None
    assert float(loss[1]) < 0.6, "ln 4 = 1.39 is a guess"


def test_strategy_by_name() -> None:
    assert "trained 4 steps on 2 processes" in torchrun(EXAMPLES / "string_name.py")


def test_hydra_application_under_torchrun(tmp_path: Path) -> None:
    arguments = [str(EXAMPLES / "hydra_app" / "app.py"), "strategy=pp2", "devices=2", f"hydra.run.dir={tmp_path}"]
    assert "trained 10 steps with HybridParallelStrategy" in run(*TORCHRUN, *arguments, cwd=tmp_path)


def test_hydra_application_finds_the_shipped_options(tmp_path: Path) -> None:
    shown = run(str(EXAMPLES / "hydra_app" / "app.py"), "strategy=tp2", "--cfg", "job", cwd=tmp_path)
    assert "tensor_parallel_size: 2" in shown


@pytest.mark.parametrize("sizes", ["as it is", "tensor_parallel_size=2"])
def test_script_in_the_readme(sizes: str, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (script,) = (block for block in blocks if "__main__" in block)
    if sizes != "as it is":
        script, count = re.subn(r"(HybridParallelStrategy)\(.*\)$", rf"\1({sizes})", script, flags=re.MULTILINE)
        assert count == 1
    (tmp_path / "script.py").write_text(script)
    torchrun(tmp_path / "script.py")
