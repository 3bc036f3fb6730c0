"""B44, kind of fault: a folder whose name is made more than once: by each rank, again after a requeue, alike for two jobs.

The parent names the folder once, absolute, and writes it down; every rank reads it there; two runs of a second have two folders.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_strategy.config.compose import Source, run_config
from hybrid_strategy.config.storage import read_config, write_config
from tests.support.ranks import run_ranks

TINY = ("model=llama_tiny", "trainer=cpu")


def _seen(folder: str, elsewhere: str) -> tuple[str, str]:
    """What a rank knows of its folder, wherever it stands."""
    import os

    os.chdir(elsewhere)
    config = read_config(Path(folder))
    return config.paths.run_dir, str(config.callbacks["checkpoint"]["dirpath"])


def test_runs_of_one_second_have_folders_of_their_own() -> None:
    folders = {run_config(Source(TINY)).paths.run_dir for _ in range(5)}
    assert len(folders) == 5


def test_every_rank_reads_the_same_absolute_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = run_config(Source((*TINY, "name='a=b, c'", "paths.output_dir=here")))
    folder = Path(config.paths.run_dir)
    assert folder.is_relative_to(tmp_path / "here")
    folder.mkdir(parents=True)
    write_config(config, folder)
    other = tmp_path / "elsewhere"
    other.mkdir()
    assert run_ranks(_seen, 2, str(folder), str(other), process_group=False) == [(str(folder), str(folder / "checkpoints"))] * 2
