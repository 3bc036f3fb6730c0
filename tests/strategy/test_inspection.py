"""`hybrid inspect`: what it says of models of a user's own, and what it does not understand."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from hybrid_strategy.cli import inspect as command
from hybrid_strategy.config.build import build_data, build_module
from hybrid_strategy.config.compose import Source, run_config
from hybrid_strategy.config.plan import plan_of
from hybrid_strategy.errors import ConfigError
from hybrid_strategy.reporting.console import make_console
from hybrid_strategy.spec.parallel_plan import ParallelPlan
from hybrid_strategy.strategy.inspection import Inspection, inspect
from tests.contract import own_models
from tests.support.ranks import run_ranks

KINDS = [own_models.Transformer, own_models.ConvNet, own_models.Mixer, own_models.EncoderDecoder]


class Module(pl.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.model(*batch).square().mean()
        self.log("loss", loss)
        return loss


def _batch(kind: type[nn.Module]) -> list[Tensor]:
    ids = torch.randint(0, own_models.VOCAB, (4, own_models.LENGTH), generator=torch.Generator().manual_seed(0))
    if issubclass(kind, (own_models.ConvNet, own_models.Mixer)):
        return [torch.randn(4, 3, own_models.PIXELS, own_models.PIXELS)]
    return [ids, ids.flip(1)] if issubclass(kind, own_models.EncoderDecoder) else [ids]


def _look(kind: type[nn.Module], plan: ParallelPlan | None = None) -> Inspection:
    return inspect(Module(kind()), None, plan, _batch(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_units_are_found_in_the_order_of_forward(kind: Any) -> None:
    found = _look(kind)
    assert tuple(found.units) == kind.plan.units
    assert found.plan_from == "proposed"
    assert found.not_understood == []
    assert found.unused == []
    assert found.outside == (["places"] if kind is own_models.Transformer else [])


def test_a_given_plan_is_shown_and_checked() -> None:
    found = _look(own_models.Transformer, own_models.Transformer.plan)
    assert found.plan_from == "given"
    assert found.rules["blocks.*.attention.out"] == "rowwise"
    assert found.not_understood == []
    wrong = ParallelPlan(units=("tokens", "blocks.*", "nrom", "head"), tensor={"blocks.*.attentoin": "replicate_input"})
    assert [text.partition(" is ")[0] for text in _look(own_models.Transformer, wrong).not_understood][:2] == [
        "tensor",
        "parallel_plan.units",
    ]


@pytest.mark.parametrize(
    ("kind", "units"),
    [(own_models.Careless, ["start", "decoder.0"]), (own_models.SkipOutside, ["body.0", "body.1", "body.2", "body.3"])],
)
def test_a_value_that_goes_past_a_cut_is_named(kind: Any, units: list[str]) -> None:
    found = _look(kind, kind.plan)
    assert [text.split(" is not right")[0] for text in found.not_understood] == [f"a cut after {unit}" for unit in units]
    assert "only the output of the unit before it crosses a cut" in found.not_understood[0]


def test_what_goes_past_cuts_is_proposed() -> None:
    found = _look(own_models.Careless)
    assert (found.units, found.carried, found.not_understood) == (list(own_models.Careless.plan.units), ["encoder.1"], [])
    plan = ParallelPlan(units=own_models.Careless.plan.units, carried=("encoder.1",))
    assert _look(own_models.Careless, plan).not_understood == []
    wrong = ParallelPlan(units=own_models.Careless.plan.units, carried=("encoder.9",))
    assert "parallel_plan.carried is 'encoder.9'" in _look(own_models.Careless, wrong).not_understood[0]


class HuggingFace(pl.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss


def test_models_of_hugging_face_are_understood() -> None:
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

    ids = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(0))
    gpt = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=3, n_head=2))
    found = inspect(HuggingFace(gpt), None, None, ids)
    assert found.units == ["transformer.wte", "transformer.h.*", "transformer.ln_f", "lm_head"]
    assert found.outside == ["transformer.wpe.weight"], "added to the output of the unit before: every stage computes it itself"
    assert found.not_understood == []
    assert found.tied == [["transformer.wte.weight", "lm_head.weight"]]
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    found = inspect(HuggingFace(BertForMaskedLM(BertConfig(vocab_size=64, **sizes))), None, None, ids)
    assert found.units == ["bert.embeddings", "bert.encoder.layer.*", "cls"]
    assert found.not_understood == []


class Odd(nn.Module):
    """Tied, frozen and unused parameters, a layer that is called twice, one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(own_models.VOCAB, 8)
        self.shared = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.never = nn.Linear(8, 8)
        self.head = nn.Linear(8, own_models.VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.layers[1].requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.shared(self.embed(ids))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.shared(x))


def test_what_is_odd_is_said() -> None:
    found = _look(Odd)
    assert found.tied == [["embed.weight", "head.weight"]]
    assert found.frozen == ["layers.1.weight", "layers.1.bias"]
    assert found.unused == ["never.weight", "never.bias"]
    assert "shared is called 2 times" in " ".join(found.not_understood)


class Around(Module):
    """A submodule that holds not all: a table tied with a layer of it, and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6)))
        self.table, self.never = nn.Embedding(6, 6), nn.Linear(2, 2)
        self.table.weight = self.model[0].weight


def test_what_lies_outside_of_the_submodule_is_said() -> None:
    module = Around()
    found = inspect(module, None, None, [torch.randn(2, 6)])
    assert found.tied == [["0.weight", "Around.table.weight"]]
    assert found.unused == ["Around.never.weight", "Around.never.bias"]
    module.automatic_optimization = False
    found = inspect(module, None, None, [torch.randn(2, 6)])
    assert not found.was_run
    assert "optimizes by hand" in found.not_understood[0]


def test_the_answer_is_printed(capsys: Any) -> None:
    command.show(Inspection("Empty", "proposed"), make_console())
    command.show(_look(own_models.Transformer), make_console())
    text = capsys.readouterr().out
    assert "blocks.*.attention.query" in text
    assert "units=('tokens', 'blocks.*', 'norm', 'head')" in text
    assert "in no unit, so held by every pipeline stage: \n  places" in text


def _printed(arguments: list[str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert command.run(arguments) == 0
    return out.getvalue()


def test_the_command_looks_at_a_model_of_the_configuration(tmp_path: Any) -> None:
    arguments = ["model=llama_tiny", "strategy=tp2_pp2", f"paths.cache_dir={tmp_path}", "data.max_bytes=100000", "--json"]
    found = json.loads(run_ranks(_printed, 1, arguments, process_group=False)[0])
    assert found["units"] == ["embed_tokens", "layers.*", "norm", "lm_head"]
    assert found["not_understood"] == []
    assert found["was_run"]


def test_what_is_no_lightning_module_is_refused_by_its_target() -> None:
    config = run_config(Source(("model._target_=collections.Counter", "data._target_=collections.Counter")))
    for group, build in (("model", build_module), ("data", build_data)):
        with pytest.raises(ConfigError, match=rf"^{group}\._target_ is 'collections.Counter': it must make a Lightning"):
            build(config, plan_of(config))
