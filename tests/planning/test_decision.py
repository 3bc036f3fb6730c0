from __future__ import annotations

import pytest

from hybrid_strategy.planning.decision import bubble_of, decision_table, expected_mfu, microbatches_for
from hybrid_strategy.planning.ladder import ladder
from hybrid_strategy.planning.search import Question, search
from hybrid_strategy.spec.cluster import ClusterSpec
from hybrid_strategy.spec.model_shape import ModelShape

LLAMA_70B = ModelShape(8192, 80, 64, 28672, 128256, 8192, num_key_value_heads=8)
SMALL = ModelShape(512, 8, 8, 2048, 32000, 512)
NODES = ClusterSpec(num_nodes=16)


def test_bubble_and_efficiency() -> None:
    """p = 8, m = 32: 17.9 % idle, 82.1 % efficient; a time stretch of (m+p-1)/m is no efficiency."""
    assert bubble_of(8, 32) == pytest.approx(0.179, abs=5e-4)
    assert 1 - bubble_of(8, 32) == pytest.approx(0.821, abs=5e-4)


@pytest.mark.parametrize("pipeline", [2, 4, 8, 16])
@pytest.mark.parametrize("bubble", [0.05, 0.1, 0.2])
def test_enough_micro_batches(pipeline: int, bubble: float) -> None:
    enough = microbatches_for(pipeline, bubble)
    assert bubble_of(pipeline, enough) <= bubble + 1e-9 < bubble_of(pipeline, enough - 1)


def test_the_three_questions() -> None:
    large = {rule.question: rule for rule in decision_table(Question(LLAMA_70B, NODES, 1024))}
    assert large["Does it fit one GPU?"].answer.startswith("no")
    assert "1,051.33 GiB of states" in large["Does it fit one GPU?"].numbers
    assert large["Must the model be split?"].answer.startswith("yes")
    assert "tensor_parallel_size <= 8" in large["What does the network allow?"].answer
    small = {rule.question: rule for rule in decision_table(Question(SMALL, NODES, 1024))}
    assert small["Does it fit one GPU?"].answer.startswith("yes")
    assert small["Must the model be split?"].answer.startswith("no")


def test_little_work_does_not_hide_the_reduction() -> None:
    rules = {rule.question: rule for rule in decision_table(Question(SMALL, NODES, 128))}
    assert rules["Does the reduction of gradients hide behind computation?"].answer.startswith("too little")


def test_the_winner_is_explained() -> None:
    question = Question(LLAMA_70B, NODES, 1024, fixed={"pipeline_parallel_size": 8})
    words = [rule.question for rule in decision_table(question, search(question).winner)]
    assert words[-2:] == ["How many micro-batches?", "What utilisation to expect?"]


def test_thresholds_by_gpu() -> None:
    assert expected_mfu(ClusterSpec(gpu="A100-SXM-40GB")) > expected_mfu(ClusterSpec(gpu="H100-SXM-80GB")) > 0
    assert expected_mfu(ClusterSpec(gpu="GB200-186GB")) > 0


def test_the_ladder_adds_one_thing_at_a_time() -> None:
    question = Question(LLAMA_70B, NODES, 1024)
    steps = ladder(question, search(question).winner)
    assert steps[0].name == "data parallel"
    assert steps[-1].name == "the whole model"
    assert [step.name for step in steps[-3:-1]][-1] == "tensor parallel"
    sizes = {tuple(each for each in step.overrides if each.startswith("model.")) for step in steps[:-1]}
    assert len(sizes) == 1
    assert sizes.pop()[0] == "model.num_layers=2"
    assert all(step.compare and step.forecast.step_seconds > 0 for step in steps)
    assert all(step.forecast.fits for step in steps)
