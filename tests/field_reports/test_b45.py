"""B45, kind of fault: a value that means something to one of the languages it passes through: Hydra's, the shell's, Slurm's.

Every value arrives as it was given, in the processes and in the script of a job; what Hydra cannot read is refused with the form
that it can; names that we give hold nothing that must be quoted.
"""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from hybrid_strategy.config.compose import Source, run_config
from hybrid_strategy.config.messages import quoted
from hybrid_strategy.config.storage import read_config, write_config
from hybrid_strategy.errors import ConfigError
from hybrid_strategy.sweeping.naming import word
from hybrid_strategy.sweeping.points import Point, Resources
from hybrid_strategy.sweeping.settings import SlurmSettings
from hybrid_strategy.sweeping.slurm.script import script_of

NASTY = (
    "runs/epoch=3-step=10.ckpt",
    "mlx5_0:1,mlx5_3:1",
    "run#1",
    "~/x",
    "with a space",
    "ünï ☃",
    "$HOME `id` $(id) ${x}",
    "it's",
    'say "so"',
    "a|b&c;d>e",
    "%j*?[x]",
    "!history",
    "-rf",
)
UNREADABLE = ("epoch=3.ckpt", "run#1", "~/x")
TINY = ("model=llama_tiny", "trainer=cpu")


@pytest.mark.parametrize("value", NASTY)
def test_a_value_reaches_the_ranks_unchanged(value: str, tmp_path: Path) -> None:
    config = run_config(Source((*TINY, *shlex.split(_typed(value)))))
    assert config.name == value
    write_config(config, tmp_path)
    assert read_config(tmp_path).name == value


def _typed(value: str) -> str:
    """What the error tells the user to type into the shell; an interpolation is escaped for OmegaConf."""
    return quoted(f"name={value}".replace("${", "\\${"))


@pytest.mark.parametrize("value", UNREADABLE)
def test_what_cannot_be_read_is_refused_with_the_form_that_can(value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_config(Source((*TINY, f"name={value}")))
    shown = str(caught.value).partition("Quote it: ")[2].rstrip(".")
    (typed,) = shlex.split(shown)
    assert run_config(Source((*TINY, typed))).name == value


@pytest.mark.parametrize("value", NASTY)
def test_a_script_hands_folder_and_variables_over_unchanged(value: str, tmp_path: Path) -> None:
    """A real shell runs the script's own lines up to where it would start Python."""
    folder = tmp_path / value.replace("/", "_").replace('"', "_")
    point = Point("p", folder, (), {}, (), Resources(), {}, "d")
    lines = script_of(point, SlurmSettings(environment={"MINE": value}), "s", "a:b").splitlines()
    kept = [line for line in lines if not line.startswith(("#SBATCH", "trap", '"$PYTHON"', "srun", "code"))]
    script = tmp_path / "script.sh"
    script.write_text("\n".join([*kept, 'printf "%s\\n%s" "$RUN" "$MINE"']))
    shown = subprocess.run(["bash", script], capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin"}).stdout
    assert shown == f"{folder}\n{value}"


def test_what_a_line_for_slurm_cannot_hold_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path / 'say "so"', tmp_path / "two\nlines"):
        point = Point("p", folder, (), {}, (), Resources(), {}, "d")
        with pytest.raises(ConfigError, match="cannot hold line breaks or double quotes"):
            script_of(point, SlurmSettings(), "s", "a:b")


@pytest.mark.parametrize("value", NASTY)
def test_names_of_points_need_no_quotes(value: str) -> None:
    assert shlex.quote(word("x", value)) == word("x", value)
    assert "=" not in word("x", value)
