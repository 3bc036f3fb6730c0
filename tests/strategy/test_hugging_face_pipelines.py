"""Encoder-decoders of transformers in pipelines, their code untouched."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hybrid_strategy import ParallelPlan
from tests.contract.items import Item, compare_item
from tests.contract.layouts import LAYOUTS, ContractLayout
from tests.contract.models import LossRecorder, make_trainer

transformers = pytest.importorskip("transformers")

T5 = ParallelPlan(units=("encoder.block.*", "encoder.final_layer_norm", "decoder.block.*", "decoder.final_layer_norm", "lm_head"))
T5_CARRIED = ParallelPlan(units=T5.units, carried=("encoder.final_layer_norm",))
WHISPER = ParallelPlan(
    units=("model.encoder.conv1", "model.encoder.conv2", "model.encoder.layers.*", "model.decoder.layers.*", "proj_out"),
    carried=("model.encoder.layers.*",),
)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=32,
        d_model=8,
        d_kv=4,
        d_ff=12,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config)


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=32,
        d_model=8,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=12,
        decoder_ffn_dim=12,
        num_mel_bins=4,
        max_source_positions=6,
        max_target_positions=12,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        use_cache=False,
        dropout=0.0,
    )
    return transformers.WhisperForConditionalGeneration(config)


class Fitting(pl.LightningModule):
    def __init__(self, build: Any, plan: ParallelPlan) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = build()
            for each in self.model.parameters():
                each.data += 0.05 * torch.randn_like(each)
        self.parallel_plan = lambda: plan

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(**batch).loss  # type: ignore[no-any-return]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.model(**batch).loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def _rows(build: Any) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 32, (16, 2, 9), generator=generator)
    if build is t5:
        return [{"input_ids": each[0], "labels": each[1, :7]} for each in ids]
    sounds = torch.randn(16, 4, 12, generator=generator)
    return [{"input_features": sound, "labels": each[1]} for sound, each in zip(sounds, ids, strict=True)]


def _train(build: Any, plan: ParallelPlan, layout: ContractLayout, folder: str) -> Any:
    losses = LossRecorder()
    data = DataLoader(_rows(build), batch_size=layout.batch_size)
    trainer = make_trainer(layout, max_epochs=2, callbacks=[losses], gradient_clip_val=1.0)
    trainer.fit(Fitting(build, plan), data, data)
    return {"losses": losses.losses, "val": float(trainer.callback_metrics["val"])}


@pytest.mark.parametrize(
    ("build", "plan", "layout"),
    [
        (t5, T5_CARRIED, "pp2_1f1b"),
        (t5, T5_CARRIED, "pp2_zbv"),
        (t5, T5_CARRIED, "dp2_pp2"),
        (whisper, WHISPER, "pp2_interleaved"),
        (whisper, WHISPER, "dp2_pp2"),
    ],
)
def test_encoder_decoders_are_right_with_their_memory_carried(build: Any, plan: ParallelPlan, layout: str) -> None:
    item = Item(f"{build.__name__}_carried", 8, partial(_train, build, plan), relative=4e-6)
    result, why = compare_item(item, LAYOUTS[layout])
    assert result == "same", "\n".join(why[:10])


@pytest.mark.parametrize(
    ("build", "plan", "layout", "words"),
    [
        (t5, T5, "pp2_1f1b", "Set carried=('encoder.final_layer_norm',) in parallel_plan()"),
        (t5, T5, "pp2_interleaved", "Set carried=('encoder.final_layer_norm',) in parallel_plan()"),
        (whisper, ParallelPlan(units=WHISPER.units), "pp2_interleaved", "Set carried=('model.encoder.layers.1',) in"),
    ],
)
def test_without_it_they_are_refused_by_name(build: Any, plan: ParallelPlan, layout: str, words: str) -> None:
    item = Item(f"{build.__name__}_refused", 8, partial(_train, build, plan), refused={layout: words})
    result, why = compare_item(item, LAYOUTS[layout])
    assert result == "refused", "\n".join(why[:10])
