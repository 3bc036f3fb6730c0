"""The sweeps that come with the package: what points they have, what they hold fixed, that the command line wins."""

from __future__ import annotations

import io
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from hybrid_strategy.cli.arguments import Arguments, parse, parser
from hybrid_strategy.cli.multirun import is_sweep, run_sweep
from hybrid_strategy.config.compose import Source
from hybrid_strategy.config.folders import shipped_folder
from hybrid_strategy.sweeping.launchers import RUNNERS
from hybrid_strategy.sweeping.points import Point, command_of
from hybrid_strategy.sweeping.prepare import prepare_alone
from hybrid_strategy.sweeping.session import Session

SWEEPS = sorted(path.stem for path in shipped_folder("sweeps").glob("*.yaml"))
TINY = ("model=llama_tiny", "trainer.accelerator=cpu", "logger=csv")


_made: dict[tuple[str, ...], Session] = {}
"""By their overrides: composing a point takes its time."""


class _Nothing:
    """A runner that runs nothing."""

    def run(self, points: object, tick: object) -> None:
        pass

    def alive(self, point: Point) -> bool:
        return False


@pytest.fixture
def points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Points by name, as they would be run, and what is printed above the table."""
    monkeypatch.chdir(tmp_path)
    for launcher in RUNNERS:
        monkeypatch.setitem(RUNNERS, launcher, lambda *_: _Nothing())
    kept: list[Session] = []

    def session(_: Console, *arguments: object) -> Session:
        kept.append(Session(Console(file=io.StringIO(), width=200), *arguments))  # type: ignore[arg-type]
        return kept[-1]

    monkeypatch.setattr("hybrid_strategy.cli.multirun.Session", session)

    def made(*overrides: str) -> tuple[dict[str, Point], str]:
        if overrides not in _made:
            run_sweep(Arguments(Source((*TINY, *overrides)), None, False, ()), lambda config, folder: None, "x:y")
            _made[overrides] = kept[-1]
        session = _made[overrides]
        return {point.name: point for point in session.points}, session.console.file.getvalue()  # type: ignore[attr-defined]

    made.session = lambda: kept[-1]  # type: ignore[attr-defined]
    return made


def test_there_are_those_that_are_promised():
    assert SWEEPS == ["checkpointing", "learning_rate_scaling", "microbatches", "parallel_sizes", "scaling"]


@pytest.mark.parametrize("name", SWEEPS)
def test_tokens_a_step_order_and_first_values_are_held_fixed_unless_swept(points, name):
    found, text = points(f"sweeps={name}", *(["cluster.devices=2"] if name == "parallel_sizes" else []))
    assert len(found) > 2
    swept = {key for point in found.values() for key in point.swept}
    for fact, key in (
        ("tokens_per_step", "data.global_batch_size"),
        ("seed", "seed"),
        ("learning_rate", "learning_rate.scaling"),
    ):
        values = {point.facts[fact] for point in found.values()}
        assert len(values) == 1 or any(each.endswith(key) for each in swept), (fact, values)
    assert "held fixed: " in text
    assert f"sweep {name}: {len(found)} points" in text


def test_parallel_sizes_are_the_layouts_of_the_world(points):
    found, _ = points("sweeps=parallel_sizes", "cluster.devices=2")
    assert sorted(found) == ["dp2", "dp2_zero1", "dp2_zero2", "dp2_zero3", "pp2", "tp2"]
    found, text = points(
        "sweeps=parallel_sizes", "cluster.devices=4", "strategy.sharding=zero1", "strategy.tensor_parallel_size=1,2,4"
    )
    assert sorted(found) == ["dp2_pp2_zero1", "dp2_tp2_zero1", "dp4_zero1", "pp4_zero1", "tp2_pp2_zero1"]
    assert "num_key_value_heads" in text


@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        (("strategy=tp2",), ["dp2_tp2", "dp2_tp2_zero1", "dp2_tp2_zero2", "dp2_tp2_zero3", "tp2_pp2"]),
        (("strategy=zero1",), ["dp2_pp2_zero1", "dp2_tp2_zero1", "dp4_zero1", "pp4_zero1", "tp2_pp2_zero1"]),
        (
            ("strategy=tp2", "strategy.tensor_parallel_size=1", "strategy.sharding=zero1"),
            ["dp2_pp2_zero1", "dp4_zero1", "pp4_zero1"],
        ),
    ],
)
def test_a_layout_that_is_chosen_on_the_command_line_is_not_free(points, strategy, names):
    found, _ = points("sweeps=parallel_sizes", "cluster.devices=4", *strategy)
    assert sorted(found) == names


def test_parallel_sizes_of_a_described_cluster_are_pruned_and_the_best_taken(points):
    cluster = ("sweeps=parallel_sizes", "hydra/launcher=slurm", "cluster=h100_sxm", "cluster.num_nodes=2", "model=llama3_8b")
    limits = ("strategy.tensor_parallel_size=1,8", "strategy.pipeline_parallel_size=1,2")  # composing a point takes its time
    cluster += ("data.global_batch_size=64", *limits)
    everything, _ = points(*cluster, "hydra.sweeper.prune=false")
    found, text = points(*cluster, "strategy.activation_checkpoint=full")
    assert 0 < len(found) < len(everything)
    assert "skipped" in text
    best, _ = points(*cluster, "strategy.activation_checkpoint=full", "hydra.sweeper.top=2")
    assert len(best) == 2
    assert set(best) <= set(found)
    assert all(point.facts["forecast_tokens_per_second"] > 0 for point in best.values())
    assert {point.resources.world_size for point in found.values()} == {16}


def test_rates_scale_from_the_baseline(points):
    found, _ = points("sweeps=learning_rate_scaling")
    assert len(found) == 30
    rates = {name: point.facts["learning_rate"] for name, point in found.items()}
    assert rates["bs32_none_lr0.001"] == rates["bs256_none_lr0.001"] == 1e-3
    assert rates["bs256_linear_lr0.001"] == pytest.approx(8e-3)
    assert rates["bs256_sqrt_lr0.001"] == pytest.approx(1e-3 * 8**0.5)
    samples = {point.facts["max_steps"] * point.facts["global_batch_size"] for point in found.values()}
    assert samples == {12800}


def test_a_point_of_a_sweep_can_be_overridden(points):
    found, _ = points("sweeps=learning_rate_scaling", "optimizer.learning_rate=2e-3", "data.global_batch_size=64")
    assert sorted(found) == ["linear", "none", "sqrt"]
    found, _ = points("sweeps=microbatches", "strategy.schedule=GPipe", "strategy.num_microbatches=4,8", "name=mine")
    assert sorted(found) == ["m4", "m8"]
    assert next(iter(found.values())).folder.parent.name == "mine"


def test_scaling_takes_the_nodes_that_its_ranks_need(points):
    cluster = ("cluster=h100_sxm", "strategy.data_parallel_size=1,4,8,32", "data.global_batch_size=64")
    found, _ = points("sweeps=scaling", "hydra/launcher=slurm", *cluster)
    shapes = [(point.resources.nodes, point.resources.tasks_per_node) for point in found.values()]
    assert shapes == [(1, 1), (1, 4), (1, 8), (4, 8)]


MINE = """# @package _global_
defaults:
  - override /hydra/sweeper: grid
name: mine
trainer: {max_steps: 7}
hydra:
  launcher: {time: 9}
  sweeper:
    params: {seed: '3,4'}
    points:
      - {strategy.data_parallel_size: 2, hydra.launcher.time: 5}
      - {strategy.tensor_parallel_size: 2}
      - {optimizer.weight_decay: 0.2}
"""


@pytest.mark.parametrize(
    "given",
    [
        ("-m", "strategy=dp2,tp2", "seed=3", "tags=[a b]", "hydra.launcher.time=3"),
        ("-m", "--config-dir", "my own", "model=mine", "seed=3,4"),
        ("-m", "--config-dir", "my own", "sweeps=mine"),
        ("-m", "--config-name", "mine", "--config-dir", "my own", "seed=3,4"),
        ("-m", "hydra/launcher=slurm", "cluster.num_nodes=1,2", "cluster.devices=2", "hydra.launcher.account=me"),
        ("sweeps=parallel_sizes", "cluster.devices=2"),
        ("sweeps=learning_rate_scaling", "optimizer.learning_rate=1e-3"),
    ],
    ids=lambda given: " ".join(given),
)
def test_the_command_of_a_point_runs_that_point_and_no_other(points, given):
    """What is printed for the best point and stands in the report: it is the same run, wherever it is typed."""
    folder = Path("my own")
    for group, name, text in (
        ("sweeps", "mine", MINE),
        ("model", "mine", "defaults: [llama_tiny]\nnum_layers: 3\n"),
        (".", "mine", "defaults: [train, _self_]\noptimizer: {weight_decay: 0.3}\n"),
    ):
        (folder / group).mkdir(parents=True, exist_ok=True)
        (folder / group / f"{name}.yaml").write_text(text)

    def parsed(words: tuple[str, ...]) -> Arguments:
        made = parser("train", "")
        made.add_argument("--multirun", "-m", action="store_true")
        return parse(made, words)

    start = () if any(word.startswith("model=") for word in given) else TINY
    run_sweep(parsed((*given, *start, "trainer.accelerator=cpu")), lambda config, folder: None, "x:y")
    session = points.session()
    found = list(session.points)
    assert len(found) > 1
    for point in (found[0], found[-1]):
        words = shlex.split(command_of(point, session.command))
        assert words[:2] == ["hybrid", "train"]
        again = parsed(tuple(words[2:]))
        if is_sweep(again):
            run_sweep(again, lambda config, folder: None, "x:y")
            (alone,) = points.session().points
        else:
            alone = prepare_alone(again.source, Path("alone").absolute(), Session(Console(), single=True)).point
        assert alone.digest == point.digest
        assert alone.launcher.get("account") == point.launcher.get("account")
