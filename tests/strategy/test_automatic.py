"""`Trainer(strategy="hybrid")` and what is counted of modules that tell little."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
from torch import nn

import hybrid_strategy
from hybrid_strategy.modules.language_model import LanguageModel
from hybrid_strategy.planning.bare import bare_layout
from hybrid_strategy.planning.numerics import NUMERICS
from hybrid_strategy.spec.model_shape import ModelShape
from hybrid_strategy.strategy import automatic
from hybrid_strategy.strategy.automatic import decided, with_layout
from hybrid_strategy.strategy.counting import as_built, count_parameters, equivalent_shape, told_shape

SHAPE = ModelShape(64, 2, 4, 128, 512, 32)
LLAMA_70B = ModelShape(8192, 80, 64, 28672, 128256, 8192, num_key_value_heads=8)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 8)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Own(pl.LightningModule):
    def __init__(self, width: int = 256, layers: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 1000)


def test_a_module_that_builds_itself_later_is_counted_and_left_alone() -> None:
    module = LanguageModel(SHAPE)
    seen = as_built(module)
    assert count_parameters(seen) == SHAPE.num_parameters
    assert module.model is None
    assert told_shape(seen) == SHAPE


def test_a_module_that_tells_nothing_is_planned_as_a_decoder_as_large() -> None:
    module = Own()
    assert told_shape(module) is None
    shape = equivalent_shape(module, 128)
    assert shape is not None
    assert (shape.hidden_size, shape.num_layers, shape.num_attention_heads, shape.sequence_length) == (256, 6, 8, 128)
    assert shape.num_parameters == pytest.approx(count_parameters(module), rel=0.01)
    assert equivalent_shape(nn.Linear(3, 3), 128) is None


def test_only_what_fits_no_other_way_is_split() -> None:
    layout, why = bare_layout(LLAMA_70B.num_parameters, 64, 80e9, NUMERICS["mixed"], LLAMA_70B)
    assert layout.sharding == "zero3"
    assert layout.data_parallel_size == 64
    layout, why = bare_layout(LLAMA_70B.num_parameters, 8, 192e9, NUMERICS["mixed"], LLAMA_70B)
    assert layout.tensor_parallel_size * layout.pipeline_parallel_size > 1
    assert "data parallelism alone does not fit" in why
    layout, why = bare_layout(LLAMA_70B.num_parameters, 8, 80e9, NUMERICS["mixed"])
    assert layout.sharding == "zero3"
    assert "it may not fit" in why


def test_the_bare_name_decides_and_anything_given_does_not() -> None:
    bare = pl.Trainer(accelerator="cpu", devices=1, strategy="hybrid", logger=False, enable_checkpointing=False).strategy
    assert bare.automatic
    given = hybrid_strategy.HybridParallelStrategy(sharding="zero1")
    assert not given.automatic
    options = decided(bare, bare.options, Own())
    assert options.layout(1).name == "single"
    layout, _ = bare_layout(LLAMA_70B.num_parameters, 8, 192e9, NUMERICS["mixed"], LLAMA_70B)
    assert with_layout(options, layout).layout(8) == layout


def test_a_second_trainer_takes_the_layout_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = pl.Trainer(accelerator="cpu", devices=1, strategy="hybrid", logger=False, enable_checkpointing=False).strategy
    layout, _ = bare_layout(LLAMA_70B.num_parameters, 8, 192e9, NUMERICS["mixed"], LLAMA_70B)
    monkeypatch.setattr(automatic, "earlier_layout", lambda module: layout)
    assert decided(bare, bare.options, Own()).layout(8) == layout
