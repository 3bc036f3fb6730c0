"""A sliced model does what the whole one does: loss, every gradient, weights after AdamW; with no collective too many."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hybrid_strategy.errors import ModelError
from hybrid_strategy.models.llama import Llama
from hybrid_strategy.parallel.tensor.apply import apply_tensor_parallel
from hybrid_strategy.spec.model_shape import ModelShape
from hybrid_strategy.spec.parallel_plan import ParallelPlan
from tests.support.collectives import CountCollectives
from tests.support.ranks import run_ranks
from tests.support.tensor_models import Case, train


def sliced(case: Case, model: nn.Module, sequence_parallel: bool):
    return apply_tensor_parallel(
        model,
        model.parallel_plan(),
        group=dist.group.WORLD,
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        sequence_parallel=sequence_parallel,
    )


def check_parity(case: Case, sequence_parallel: bool, tolerance: float) -> None:
    whole, model = case.build(), case.build()
    shards = sliced(case, model, sequence_parallel)
    assert set(shards) == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, parameter in whole.named_parameters():
        assert torch.equal(shards[name].of(parameter), model.get_parameter(name)), name
        assert shards[name].full_shape == tuple(parameter.shape)
        assert shards[name].local_shape == tuple(model.get_parameter(name).shape)
    expected, got = train(case, whole), train(case, model, shards)
    torch.testing.assert_close(got.losses, expected.losses, rtol=tolerance, atol=tolerance)
    for kind in ("gradients", "weights"):
        for name, value in getattr(expected, kind).items():
            close = torch.allclose(getattr(got, kind)[name], shards[name].of(value), rtol=tolerance, atol=tolerance)
            assert close, f"{kind} of {name}: {getattr(got, kind)[name] - shards[name].of(value)}"


EXACT = [
    Case(),
    Case(vocab=7),
    Case(vocab=7, tied=True),
    Case(vocab=8, tied=True),
    Case("gpt", vocab=10, tied=True),
    Case("biased", vocab=7),
    Case("biased", vocab=11, tied=True),
]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("case", EXACT, ids=lambda case: f"{case.model}-{case.vocab}-{'tied' if case.tied else 'untied'}")
@pytest.mark.parametrize("size", [2, 4])
def test_float64_is_exact(size: int, case: Case, sequence_parallel: bool) -> None:
    run_ranks(check_parity, size, case, sequence_parallel, 1e-12)


@pytest.mark.parametrize("optimizer", ["plain", "foreach", "fused"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_float32_with_every_optimizer(optimizer: str, sequence_parallel: bool) -> None:
    run_ranks(check_parity, 2, Case("biased", 11, dtype=torch.float32, optimizer=optimizer), sequence_parallel, 1e-5)


def check_autocast(sequence_parallel: bool) -> None:
    case = Case(dtype=torch.float32, autocast=True)
    whole, model = case.build(), case.build()
    shards = sliced(case, model, sequence_parallel)
    expected, got = train(case, whole, steps=1), train(case, model, shards, steps=1)
    assert got.losses[0].dtype == torch.float32
    torch.testing.assert_close(got.losses, expected.losses, rtol=1e-2, atol=0)
    for name, value in expected.gradients.items():
        assert got.gradients[name].dtype == torch.float32
        difference = (got.gradients[name] - shards[name].of(value)).norm() / value.norm()
        assert difference < 0.05, (name, difference)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_autocast_bf16(sequence_parallel: bool) -> None:
    run_ranks(check_autocast, 2, sequence_parallel)


def count(layer_alone: bool, sequence_parallel: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Collectives of the forward and of the backward, of one layer or of the whole model with its loss."""
    case = Case()
    model = case.build()
    sliced(case, model, sequence_parallel)
    ids, labels = case.batch()
    with CountCollectives() as forward:
        if layer_alone:
            angles = torch.zeros(8, 4, dtype=torch.float64)
            length = 8 // dist.get_world_size() if sequence_parallel else 8
            loss = model.layers[0](torch.ones(3, length, 16, dtype=torch.float64, requires_grad=True), angles, angles).sum()
        else:
            loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
    with CountCollectives() as backward:
        loss.backward()
    return dict(forward.counts), dict(backward.counts)


def test_two_all_reduces_each_way_a_block() -> None:
    assert run_ranks(count, 2, True, False)[0] == ({"all_reduce": 2}, {"all_reduce": 2})


def test_sequence_parallel_replaces_each_by_a_pair() -> None:
    pair = {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}
    assert run_ranks(count, 2, True, True)[0] == (pair, pair)


def test_whole_model_gathers_no_logits() -> None:
    """Two blocks, the embedding forward, the head backward; the only gather is that of two numbers a row for the loss."""
    assert run_ranks(count, 2, False, False)[0] == ({"all_reduce": 5, "all_gather_into_tensor": 1}, {"all_reduce": 5})


def count_in_a_dry_run(sequence_parallel: bool) -> dict[str, int]:
    """A model of 8 ranks on one process, without memory: torch's fake group and fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
    with torch.device("meta"):
        model = Llama(ModelShape(4096, 2, 32, 14336, 128256, 8192, num_key_value_heads=8))
    sliced(Case(), model, sequence_parallel)
    ids = torch.zeros(1, 1024, dtype=torch.long)
    with FakeTensorMode(allow_non_fake_inputs=True), CountCollectives() as called:
        model.to_empty(device="cpu")
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    return dict(called.counts)


def test_dry_run_of_many_ranks() -> None:
    first = run_ranks(count_in_a_dry_run, 1, False, process_group=False)[0]
    assert first == {"all_reduce": 10, "all_gather_into_tensor": 1}
    first = run_ranks(count_in_a_dry_run, 1, True, process_group=False)[0]
    assert first == {"reduce_scatter_tensor": 10, "all_gather_into_tensor": 11}


def replicas(sequence_parallel: bool) -> dict[str, torch.Tensor]:
    case = Case("biased", 11, dtype=torch.float32, optimizer="fused")
    model = case.build()
    shards = sliced(case, model, sequence_parallel)
    outcome = train(case, model, shards, steps=20)
    return {name: each for name, each in outcome.weights.items() if shards[name].dim is None}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_replicas_stay_equal_to_the_last_bit(sequence_parallel: bool) -> None:
    first, *others = run_ranks(replicas, 4, sequence_parallel)
    assert "blocks.0.attention.q_norm.weight" in first
    for other in others:
        for name, value in first.items():
            assert torch.equal(value, other[name]), name


def check_compiled(sequence_parallel: bool) -> None:
    case = Case("gpt")
    model = case.build()
    shards = sliced(case, model, sequence_parallel)
    expected = train(case, copy.deepcopy(model), shards, steps=1)
    for layer in model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    got = train(case, model, shards, steps=1)
    torch.testing.assert_close(got.losses, expected.losses)
    for name, value in expected.gradients.items():
        torch.testing.assert_close(got.gradients[name], value)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_layers_compile_without_a_break(sequence_parallel: bool) -> None:
    run_ranks(check_compiled, 2, sequence_parallel)


def check_meta(case: Case) -> None:
    real, model = case.build(), case.build().to("meta")
    shards, meta_shards = sliced(case, real, False), sliced(case, model, False)
    assert shards == meta_shards
    for name, parameter in model.named_parameters():
        assert parameter.is_meta
        assert parameter.shape == real.get_parameter(name).shape


def test_meta_parameters_become_smaller_meta_parameters() -> None:
    run_ranks(check_meta, 2, Case("biased", tied=True))


def check_storage_and_identity() -> None:
    case = Case(tied=True)
    model = case.build()
    before = {name: id(each) for name, each in model.named_parameters()}
    model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    shards = sliced(case, model, True)
    assert before == {name: id(each) for name, each in model.named_parameters()}
    assert model.lm_head.weight is model.embed_tokens.weight
    assert shards["lm_head.weight"] == shards["embed_tokens.weight"]
    assert not model.layers[0].mlp.up_proj.weight.requires_grad
    for parameter in model.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    assert isinstance(model.lm_head, nn.Linear)
    assert (model.lm_head.out_features, model.layers[0].mlp.down_proj.in_features) == (32, 10)


def test_keeps_ties_identity_and_frees_the_rest() -> None:
    run_ranks(check_storage_and_identity, 2)


def check_copy() -> None:
    case = Case()
    model = case.build()
    sliced(case, model, True)
    ids, _ = case.batch()
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(model)(ids).argmax(-1), model(ids).argmax(-1))


def test_a_copied_model_works() -> None:
    run_ranks(check_copy, 2)


def check_absent() -> None:
    case = Case()
    model = case.build()
    model.embed_tokens, model.layers[1] = nn.Identity(), nn.Identity()
    plan = model.parallel_plan()
    shards = apply_tensor_parallel(
        model, plan, group=dist.group.WORLD, rank=dist.get_rank(), size=2, absent={"embed_tokens", "layers.1"}
    )
    assert set(shards) == {name for name, _ in model.named_parameters()}
    assert type(model.embed_tokens) is nn.Identity


def test_a_pipeline_cut_may_have_removed_modules() -> None:
    run_ranks(check_absent, 2)


def check_widths() -> None:
    for rules, expected in (
        (
            {"0": "rowwise", "2": "colwise"},
            "tensor['0'] is 'rowwise': its input must come split from a colwise layer. It is given all 8 features, and this rank "
            "holds the weights of 4 of them. Set colwise for the layers that make its input",
        ),
        ({"0": "colwise", "2": "colwise"}, "tensor['2'] is 'colwise': its input must be whole, and comes split from a colwise"),
        (
            {"0": "colwise"},
            "tensor['2'] is None: its input must be whole, and comes split from a colwise layer. It is given 6 of 12",
        ),
        ({"0": "colwise", "2": "rowwise", "3": "colwise"}, "tensor['4'] is None: its input must be whole"),
    ):
        model = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8), nn.Linear(8, 6), nn.LayerNorm(6))
        apply_tensor_parallel(model, ParallelPlan(tensor=rules), group=dist.group.WORLD, rank=dist.get_rank(), size=2)
        with pytest.raises(ModelError) as caught:
            model(torch.zeros(3, 8))
        assert str(caught.value).startswith(expected)


def test_a_layer_whose_input_is_not_what_its_rule_expects_is_named() -> None:
    run_ranks(check_widths, 2)
