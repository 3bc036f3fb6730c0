"""The wheel works where there is no checkout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

RUN = """
import sys
from pathlib import Path

target, checkout = sys.argv[1], sys.argv[2]
ours = [path for path in sys.path if "site-packages" not in path and Path(path or ".").resolve().is_relative_to(checkout)]
sys.path[:] = [target] + [path for path in sys.path if path not in ours]
import hybrid_strategy
assert Path(hybrid_strategy.__file__).is_relative_to(target), hybrid_strategy.__file__
from hybrid_strategy.cli.main import main
sys.exit(main(sys.argv[3:]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, installed into a folder of its own."""
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    return target


def run_installed(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`hybrid ARGUMENTS` of the installed wheel, far from the checkout."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-c", RUN, str(installed), str(ROOT), *arguments]
    return subprocess.run(command, cwd=installed.parent, env=environment, capture_output=True, text=True, check=False)


def test_wheel_holds_code_types_plugins_and_configurations(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, inside in (("conf", "hybrid_strategy/conf"), ("sweeps", "hybrid_strategy/sweeps")):
        for path in (ROOT / folder).rglob("*.yaml"):
            assert f"{inside}/{path.relative_to(ROOT / folder).as_posix()}" in names
    for path in (*(ROOT / "src").rglob("*.py"), *(ROOT / "src").rglob("*.css")):
        assert path.relative_to(ROOT / "src").as_posix() in names
    assert "hybrid_strategy/py.typed" in names
    assert "hydra_plugins/__init__.py" not in names, "a namespace that other packages share must not be claimed"
    assert not [name for name in names if name.startswith(("tests", "docs", "examples"))]


def test_wheel_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
        scripts = archive.read(metadata.replace("METADATA", "entry_points.txt")).decode()
        assert archive.read(metadata.replace("METADATA", "licenses/LICENSE"))
    version = re.search(r'^__version__ = "(.+)"$', (ROOT / "src/hybrid_strategy/__init__.py").read_text(), re.MULTILINE)
    assert version is not None
    assert f"\nVersion: {version[1]}\n" in text
    assert "\nLicense-Expression: Apache-2.0\n" in text
    assert "hybrid = hybrid_strategy.cli.main:main" in scripts
    assert f"## [{version[1]}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {version[1]}" in (ROOT / "CITATION.cff").read_text()


def test_installed_copy_composes_and_plans(installed: Path) -> None:
    shown = run_installed(installed, "train", "strategy=tp2_pp2", "model=llama_tiny", "--cfg", "job")
    assert shown.returncode == 0, shown.stderr
    assert "tensor_parallel_size: 2" in shown.stdout
    planned = run_installed(installed, "plan", "strategy=tp2_pp2", "model=llama_tiny", "--json")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["world_size"] == 4


def test_installed_copy_is_found_by_other_hydra_applications(installed: Path) -> None:
    searched = run_installed(installed, "train", "--info", "searchpath")
    assert searched.returncode == 0, searched.stderr
    assert str(installed / "hybrid_strategy" / "conf") in searched.stdout.replace("\n", "")


def test_make_lets_python_keep_what_it_compiled() -> None:
    """`make install` compiles nothing; where nobody else may either, each process of the suite takes 7 s more to start."""
    asked = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    asked.pop("MAKEFLAGS", None)
    shown = subprocess.run(
        ["make", "--eval", "show: ; @env", "show"], cwd=ROOT, env=asked, capture_output=True, text=True, check=True
    )
    assert "HOME=" in shown.stdout
    assert "PYTHONDONTWRITEBYTECODE" not in shown.stdout
