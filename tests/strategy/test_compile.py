"""`compile=True`: layers under `torch.compile` give what one eager process gives, in every layout, or are refused by name.

All but one of the runs stop before code is generated (`aot_eager`): graphs, gradients, recomputation and collectives are those
that a compiler gets. One goes all the way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from hybrid_strategy import HybridParallelStrategy
from hybrid_strategy.errors import ConfigError
from hybrid_strategy.models.gpt import PART as GPT
from hybrid_strategy.parallel import compiled
from hybrid_strategy.parallel.compiled import compile_units, uncompiled
from hybrid_strategy.planning import compiler
from hybrid_strategy.planning.compiler import check_compiler
from tests.support.ranks import RankFailedError, run_ranks
from tests.support.training import SHAPE, Case, TinyLM, compare, train_here

VALIDATING = {"val_check_interval": 2, "check_val_every_n_epoch": None}
CASES = {
    "zero3_full": ({"sharding": "zero3", "activation_checkpoint": "full"}, 2),
    "sequence_selective": ({"tensor_parallel_size": 2, "sequence_parallel": True, "activation_checkpoint": "selective"}, 1),
    "pipeline_zero1": ({"pipeline_parallel_size": 2, "sharding": "zero1", "num_microbatches": 3}, 1),
}
"""Strategy, and data-parallel ranks."""


class DropoutLM(TinyLM):
    """With dropout, inside tensor-parallel sub-blocks and between them."""

    def configure_model(self) -> None:
        if self.model is None:
            shape = replace(SHAPE, num_layers=1, family="gpt", gated_mlp=False, bias=True, learned_positions=True)
            with torch.device("meta"):
                self.model = GPT.build(replace(shape, num_key_value_heads=4), dropout=0.3)


def case_of(strategy: dict[str, Any], data_parallel: int = 1, **more: Any) -> Case:
    return Case(strategy, {"limit_val_batches": 0}, batch_size=8 // data_parallel, steps=2, **more)


def train_all(cases: list[Case], backend: str = "aot_eager") -> list[tuple[dict[str, Any], int, int]]:
    """Records of this rank, with the graphs that it compiled and the breaks that these had."""
    found = []
    for case in cases:
        torch._dynamo.reset()
        counters.clear()
        compiled.BACKEND = backend
        record = train_here(case)
        found.append((record, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
    return found


def trained(world_size: int, cases: list[Case], *backend: str) -> list[list[tuple[dict[str, Any], int, int]]]:
    """For each case what every rank found."""
    ranks = run_ranks(train_all, world_size, cases, *backend, timeout=150, process_group=False)
    return [[rank[index] for rank in ranks] for index in range(len(cases))]


def records(ranks: list[tuple[dict[str, Any], int, int]]) -> list[dict[str, Any]]:
    return [record for record, _, _ in ranks]


@pytest.fixture(scope="module")
def eager() -> list[dict[str, Any]]:
    return records(trained(1, [replace(case_of({}), trainer=VALIDATING)])[0])


def same_as(eager: list[dict[str, Any]], ranks: list[tuple[dict[str, Any], int, int]]) -> None:
    compare(eager, records(ranks))
    for _, graphs, breaks in ranks:
        assert graphs > 0
        assert breaks == 0


def test_compiled_layers_give_what_one_eager_process_gives(eager: list[dict[str, Any]]) -> None:
    cases = [case_of({**strategy, "compile": True}, data) for strategy, data in CASES.values()]
    for ranks in trained(2, cases):
        same_as(eager, ranks)


def test_generated_code_gives_what_one_eager_process_gives(eager: list[dict[str, Any]]) -> None:
    (ranks,) = trained(2, [replace(case_of({"sharding": "zero2", "compile": True}, 2), trainer=VALIDATING)], "inductor")
    same_as(eager, ranks)
    for record, _, _ in ranks:
        assert record["final"]["val_loss"] == pytest.approx(eager[0]["final"]["val_loss"], rel=1e-6)


def test_dropout_draws_what_it_draws_without_compilation() -> None:
    strategy = {"tensor_parallel_size": 2, "activation_checkpoint": "full"}
    plain, compiled_too = (case_of({**strategy, "compile": each}, module=DropoutLM) for each in (False, True))
    eager_ranks, compiled_ranks = trained(2, [plain, compiled_too])
    compare(records(eager_ranks), records(compiled_ranks))
    assert all(graphs > 0 for _, graphs, _ in compiled_ranks)


def test_a_layer_that_selective_recomputation_cannot_compile_whole_is_refused() -> None:
    strategy = {"tensor_parallel_size": 2, "activation_checkpoint": "selective", "compile": True}
    rule = "compile is True: with activation_checkpoint=selective every layer must compile as one graph. DecoderLayer: "
    with pytest.raises(RankFailedError, match=rule) as caught:
        trained(2, [case_of(strategy, module=DropoutLM)])
    assert "Set false, or activation_checkpoint=full or none." in str(caught.value)


# ------------------------------------------------------------------------------------------------------------ in one process


class Layer(nn.Module):
    """Reads a number of its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(4, 4), number

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.number


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code is what was traced."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(compiled, "BACKEND", "eager")


@pytest.mark.usefixtures("traced")
def test_names_and_keys_stay() -> None:
    model, same = nn.Sequential(*(Layer(1) for _ in range(2))), nn.Sequential(*(Layer(1) for _ in range(2)))
    compile_units(list(model), whole=False)
    assert [(name, type(each)) for name, each in model.named_modules()] == [(n, type(each)) for n, each in same.named_modules()]
    assert model.state_dict().keys() == same.state_dict().keys()


@pytest.mark.usefixtures("traced")
def test_layers_of_one_kind_share_what_was_compiled_and_many_of_other_kinds_are_all_compiled() -> None:
    for numbers, graphs in (([1] * 12, 1), (list(range(12)), 12)):
        torch._dynamo.reset()
        counters.clear()
        model = nn.Sequential(*(Layer(number) for number in numbers))
        compile_units(list(model), whole=False)
        with torch.no_grad():
            model(torch.ones(2, 4))
        assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.usefixtures("traced")
def test_hooks_within_a_layer_are_seen_whenever_they_come_or_go() -> None:
    layer, seen = Layer(1), list[int]()
    compile_units([layer], whole=False)
    layer(torch.ones(2, 4))
    for calls in (1, 2):
        handle = layer.linear.register_forward_hook(lambda *_: seen.append(1))
        layer(torch.ones(2, 4))
        handle.remove()
        layer(torch.ones(2, 4))
        assert len(seen) == calls


@pytest.mark.usefixtures("traced")
def test_what_looks_into_layers_may_run_them_as_they_are_written() -> None:
    layer = Layer(1)
    compile_units([layer], whole=False)
    with uncompiled():
        layer(torch.ones(2, 4))
    assert not counters["stats"]["unique_graphs"]


# ------------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        ({"compile": "yes"}, "compile is 'yes': it must be true or false"),
        (
            {"pipeline_parallel_size": 2, "schedule": "ZBVZeroBubble"},
            "compile is True: it cannot be combined with the schedule ZBVZeroBubble. That schedule splits the backward pass",
        ),
        ({"context_parallel_size": 2}, "compile is True: it cannot be combined with context parallelism"),
    ],
)
def test_what_cannot_be_right_is_refused_before_processes_start(strategy: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        HybridParallelStrategy(**{"compile": True, **strategy}).options.layout(2)


def test_a_machine_that_cannot_build_generated_code_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    check_compiler("cpu")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"compile is True: .* There is no C\+\+ compiler no-such-compiler\. Install one"):
        check_compiler("cpu")
    monkeypatch.setattr(compiler, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"compile is True: .* There is no package triton"):
        check_compiler("cuda")


class Bare(TinyLM):
    """Its model says nothing of layers."""

    def configure_model(self) -> None:
        self.model = nn.Embedding(64, 64)


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(RankFailedError, match="compile is True: Embedding does not say what its layers are"):
        trained(1, [case_of({"compile": True}, module=Bare)])
