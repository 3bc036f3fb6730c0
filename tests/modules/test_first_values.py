"""First values in one process depend on the seed and the parameter's name, and on nothing else."""

from __future__ import annotations

from dataclasses import replace

import torch

from hybrid_strategy.models.llama import Llama
from hybrid_strategy.modules.first_values import give_first_values
from hybrid_strategy.parallel.materialise import Initialiser
from hybrid_strategy.spec.model_shape import ModelShape

SHAPE = ModelShape(16, 2, 4, 20, 24, 8)


def on_meta(shape: ModelShape = SHAPE, dtype: torch.dtype = torch.float32) -> Llama:
    with torch.device("meta"):
        return Llama(shape).to(dtype)


def made(seed: int = 5, dtype: torch.dtype = torch.float32, shape: ModelShape = SHAPE) -> Llama:
    model = on_meta(shape, dtype)
    give_first_values(model, seed, torch.device("cpu"))
    return model


def test_any_parameter_alone_has_the_models_values() -> None:
    model, initialiser = made(), Initialiser(on_meta(), 5)
    for name, parameter in reversed(list(model.named_parameters())):
        assert torch.equal(initialiser.whole(name), parameter), name


def test_leaves_torchs_random_state_and_follows_the_seed() -> None:
    state = torch.random.get_rng_state()
    first, again, other = made(), made(), made(6)
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_lower_precision_is_the_rounded_float32() -> None:
    assert torch.equal(made().lm_head.weight.bfloat16(), made(dtype=torch.bfloat16).lm_head.weight)


def test_ties_and_frozen_parameters_survive() -> None:
    model = on_meta(replace(SHAPE, tied_embeddings=True))
    model.norm.weight.requires_grad_(False)
    give_first_values(model, 5, torch.device("cpu"))
    assert model.lm_head.weight is model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, made().embed_tokens.weight)
    assert not model.norm.weight.requires_grad
