"""Out to Hugging Face and back in: the same logits there, the same weights here, from any layout to any other."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from hybrid_strategy import HybridParallelStrategy
from hybrid_strategy.cli.main import main
from hybrid_strategy.modules.language_model import LanguageModel
from hybrid_strategy.registry import parts
from hybrid_strategy.spec.model_shape import ModelShape
from tests.support.ranks import RankFailedError, run_ranks

LLAMA, GPT = parts("models")["llama"].tiny, replace(parts("models")["gpt"].tiny, num_key_value_heads=4)
OPTIONS = {"llama": {"rope_theta": 500.0, "norm_eps": 1e-3}, "gpt": {"norm_eps": 1e-3}}
SHAPES = {
    "llama": LLAMA,
    "llama_tied": replace(LLAMA, tied_embeddings=True, head_dim=6),
    "gpt": GPT,
    "gpt_tied": replace(GPT, tied_embeddings=True),
}
SPLIT = {
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2, "num_microbatches": 2},
    "zero3": {"sharding": "zero3"},
}


@dataclass
class Run:
    shape: ModelShape
    strategy: dict[str, Any] = field(default_factory=dict)
    save_to: str = ""
    steps: int = 2


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, shape: ModelShape) -> None:
        size = (8, shape.sequence_length + 1)
        self.rows = torch.randint(0, shape.vocab_size, size, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index, :-1], "labels": self.rows[index, 1:]}


def trainer_of(run: Run, devices: int, strategy: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_steps=run.steps, **quiet)


def train(run: Run) -> None:
    """Trains, or only begins, and saves."""
    trainer = trainer_of(run, 2, HybridParallelStrategy(**run.strategy))
    module, loader = LanguageModel(run.shape, options=OPTIONS[run.shape.family]), DataLoader(Rows(run.shape), batch_size=2)
    if run.steps:
        trainer.fit(module, loader)
    else:
        trainer.validate(module, loader, verbose=False)
    trainer.save_checkpoint(run.save_to)


def started(shape: ModelShape, strategy: dict[str, Any], weights: Path, folder: Path) -> dict[str, torch.Tensor]:
    """The weights, by the module's own names, of a run in a layout that begins with `weights`."""
    given = Run(shape, {**strategy, "initial_weights": str(weights)}, str(folder / "began.ckpt"), 0)
    run_ranks(train, 2, given, process_group=False)
    return exported(folder / "began.ckpt", folder / "began.safetensors", "--names", "own")


def exported(checkpoint: Path, out: Path, *more: str) -> dict[str, torch.Tensor]:
    assert main(["export", str(checkpoint), str(out), *more]) == 0
    return load_file(out)


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def logits(shape: ModelShape, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Those of one whole model."""
    model = parts("models")[shape.family].build(shape, **OPTIONS[shape.family])
    missing, unexpected = model.load_state_dict(
        {name.removeprefix("model."): each for name, each in weights.items()}, strict=False
    )
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if shape.tied_embeddings else set())
    with torch.no_grad():
        return model.eval()(Rows(shape).rows[:, :-1])


@pytest.mark.parametrize(("name", "layout"), [("llama", "tp2"), ("llama_tied", "pp2"), ("gpt", "zero3"), ("gpt_tied", "tp2")])
def test_hugging_face_computes_the_same_and_its_folder_is_read_back(name: str, layout: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shape, checkpoint = SHAPES[name], tmp_path / "a.ckpt"
    run_ranks(train, 2, Run(shape, SPLIT[layout], str(checkpoint)), process_group=False)
    own = exported(checkpoint, tmp_path / "own.safetensors", "--names", "own")
    assert main(["export", str(checkpoint), str(tmp_path / "hf"), "--shard-size", "8KB"]) == 0
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 1
    theirs, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert not told["mismatched_keys"]
    with torch.no_grad():
        found = theirs.eval()(input_ids=Rows(shape).rows[:, :-1]).logits
    torch.testing.assert_close(found, logits(shape, own), rtol=1e-6, atol=1e-6)
    for other in (each for each in SPLIT if each != layout):
        assert_same(started(shape, SPLIT[other], tmp_path / "hf", tmp_path), own)


@pytest.mark.parametrize(("name", "layout"), [("llama", "pp2"), ("gpt_tied", "tp2")])
def test_a_folder_that_hugging_face_wrote_is_begun_with(name: str, layout: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shape = SHAPES[name]
    family = parts("models")[shape.family]
    config = family.exchange.config(shape, OPTIONS[shape.family])
    torch.manual_seed(3)
    theirs = getattr(transformers, family.exchange.architecture)(transformers.AutoConfig.for_model(**config)).eval()
    theirs.save_pretrained(tmp_path / "hf")
    own = started(shape, SPLIT[layout], tmp_path / "hf", tmp_path)
    with torch.no_grad():
        wanted = theirs(input_ids=Rows(shape).rows[:, :-1]).logits
    torch.testing.assert_close(logits(shape, own), wanted, rtol=1e-6, atol=1e-6)


def train_plainly(run: Run) -> None:
    trainer = trainer_of(run, 1, SingleDeviceStrategy("cpu"))
    trainer.fit(LanguageModel(run.shape, options=OPTIONS[run.shape.family]), DataLoader(Rows(run.shape), batch_size=2))
    trainer.save_checkpoint(run.save_to)


def go_on(run: Run) -> float:
    """Trains from the checkpoint `save_to`, or validates it where there are no steps to do; returns the loss."""
    trainer = trainer_of(run, 2, HybridParallelStrategy(**run.strategy))
    module, loader = LanguageModel(run.shape, options=OPTIONS[run.shape.family]), DataLoader(Rows(run.shape), batch_size=2)
    if run.steps:
        trainer.fit(module, loader, ckpt_path=run.save_to)
    return trainer.validate(module, loader, verbose=False, ckpt_path=run.save_to)[0]["val_loss"]


def validated(checkpoint: Path, layout: str) -> float:
    losses = run_ranks(go_on, 2, Run(LLAMA, SPLIT[layout], str(checkpoint), 0), process_group=False)
    assert losses[0] == losses[1]
    return losses[0]


def test_a_single_file_of_lightning_or_a_checkpoint_is_begun_with(tmp_path: Path) -> None:
    run_ranks(train_plainly, 1, Run(LLAMA, save_to=str(tmp_path / "plain.ckpt")), process_group=False)
    own = started(LLAMA, SPLIT["pp2"], tmp_path / "plain.ckpt", tmp_path)
    plain = torch.load(tmp_path / "plain.ckpt", weights_only=True)["state_dict"]
    assert_same(own, plain)
    assert validated(tmp_path / "plain.ckpt", "pp2") == pytest.approx(validated(tmp_path / "began.ckpt", "tp2"), rel=1e-6)
    with pytest.raises(RankFailedError, match=r"training cannot go on from a single file.*Set initial_weights"):
        run_ranks(go_on, 2, Run(LLAMA, SPLIT["tp2"], str(tmp_path / "plain.ckpt")), process_group=False)
    (tmp_path / "again").mkdir()
    assert_same(started(LLAMA, SPLIT["zero3"], tmp_path / "began.ckpt", tmp_path / "again"), plain)
    assert_same(started(LLAMA, SPLIT["tp2"], tmp_path / "began.safetensors", tmp_path / "again"), plain)


def test_weights_of_another_model_are_refused_on_all_ranks(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run_ranks(train, 2, Run(LLAMA, SPLIT["tp2"], str(tmp_path / "a.ckpt"), 0), process_group=False)
    assert main(["export", str(tmp_path / "a.ckpt"), str(tmp_path / "hf")]) == 0
    with pytest.raises(
        RankFailedError, match=r"the shape in the file differs from the model's.*The model has \(69, 16\)"
    ) as caught:
        started(replace(LLAMA, vocab_size=69), SPLIT["pp2"], tmp_path / "hf", tmp_path)
    assert "rank 0:" in str(caught.value)
    assert "rank 1:" in str(caught.value)
    with pytest.raises(RankFailedError, match=r"Missing in it: model\.layers\.3"):
        started(replace(LLAMA, num_layers=4), SPLIT["tp2"], tmp_path / "hf", tmp_path)
    heads = replace(LLAMA, num_attention_heads=2, num_key_value_heads=1)
    with pytest.raises(RankFailedError, match=r"num_attention_heads 4 there, 2 here; .*Set the model to it") as caught:
        started(heads, SPLIT["zero3"], tmp_path / "hf", tmp_path)
    assert str(caught.value).count("its config.json is of another model") >= 2


def test_what_cannot_be_exported_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grouped = replace(GPT, num_key_value_heads=2)
    run_ranks(train, 2, Run(grouped, SPLIT["tp2"], str(tmp_path / "run" / "checkpoints" / "a.ckpt"), 0), process_group=False)
    run_dir = str(tmp_path / "run")
    assert main(["export", run_dir, str(tmp_path / "hf")]) == 2
    assert "model.num_key_value_heads is 2: GPT-2 has a key/value head for each query head" in capsys.readouterr().err
    for arguments, words in (
        (("hf", "--names", "own"), "a Hugging Face folder needs names"),
        (("a.safetensors", "--names", "mine"), "there are no such names"),
        (("a.safetensors", "--names", "own", "--dtype", "int8"), "weights are not exported in it"),
        (("hf", "--names", "own", "--shard-size", "big"), "it is no size"),
        (("a.safetensors", "--names", "own", "--shard-size", "8KB"), "a single file is not divided"),
    ):
        assert main(["export", run_dir, str(tmp_path / arguments[0]), *arguments[1:]]) == 2
        assert words in capsys.readouterr().err
    assert main(["export", str(tmp_path / "none"), str(tmp_path / "hf")]) == 2
    assert main(["export", run_dir, str(tmp_path / "a.safetensors"), "--names", "own", "--dtype", "bfloat16"]) == 0
    assert {each.dtype for each in load_file(tmp_path / "a.safetensors").values()} == {torch.bfloat16}
    plan = json.loads((tmp_path / "run" / "checkpoints" / "a.ckpt" / "plan.json").read_text())
    assert plan["model"]["shape"]["family"] == "gpt"


@pytest.mark.parametrize(
    ("family", "change", "told"),
    [
        ("llama", {"rope_theta": 1e6, "rope_parameters": None}, ["rope_theta 1000000.0 there, 500.0 here"]),
        ("llama", {"rope_parameters": {"rope_theta": 500.0, "rope_type": "llama3"}}, ["rope_type llama3 there, default here"]),
        ("llama", {"rope_scaling": {"factor": 8.0}}, ["rope_scaling {'factor': 8.0} there, nothing of it here"]),
        ("llama", {"num_attention_heads": 99, "head_dim": None}, ["num_attention_heads 99 there, 4 here"]),
        ("llama", {"max_position_embeddings": 9, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-3, "bos_token_id": 1}, []),
        ("gpt", {"activation_function": "relu", "attn_pdrop": 0.5}, ["activation_function relu there, gelu_new here"]),
    ],
)
def test_a_config_that_asks_for_other_values_is_noticed(family: str, change: dict[str, Any], told: list[str]) -> None:
    exchange = parts("models")[family].exchange
    given = exchange.config(SHAPES[family], OPTIONS[family]) | change
    assert exchange.differences(given, SHAPES[family], OPTIONS[family]) == told
