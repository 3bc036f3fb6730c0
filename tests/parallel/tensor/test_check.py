"""Plans that do not fit are refused by name, with the valid values, without a process group."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hybrid_strategy.errors import ConfigError, LayoutError, ModelError
from hybrid_strategy.parallel.tensor.apply import apply_tensor_parallel
from hybrid_strategy.parallel.tensor.check import assign_styles, check_tensor_parallel, is_inside
from hybrid_strategy.registry import parts
from hybrid_strategy.spec.parallel_plan import TENSOR_STYLES, ParallelPlan
from tests.support.tensor_models import Case


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Mixed(nn.Module):
    """What tensor parallelism cannot slice, and what it can."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(6, 8, max_norm=1.0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)) for _ in range(2))
        self.scaled = Scaled(8, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.conv = nn.Conv1d(8, 8, 1)
        self.normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.short = nn.Linear(8, 3)


def refused(plan: ParallelPlan, size: int = 2, model: nn.Module | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        apply_tensor_parallel(model or Mixed(), plan, group=None, rank=0, size=size)
    return str(caught.value)


def test_registry_has_the_styles_of_the_spec() -> None:
    assert set(parts("parallel.tensor.styles")) == set(TENSOR_STYLES)
    for style in parts("parallel.tensor.styles").values():
        assert style.__doc__ or type(style).__module__


def test_heads() -> None:
    plan = ParallelPlan(heads={"num_attention_heads": 12, "num_key_value_heads": 4})
    for size in (1, 2, 4):
        check_tensor_parallel(plan, size)
    with pytest.raises(
        LayoutError, match=r"^tensor_parallel_size is 3: it must divide num_key_value_heads. 3 does not divide 4\."
    ):
        check_tensor_parallel(plan, 3)
    with pytest.raises(LayoutError, match=r"8 does not divide 12. Set tensor_parallel_size to 1 or 2 or 4\.$"):
        check_tensor_parallel(plan, 8)


def test_no_rules_shows_the_layers_and_a_plan_to_write() -> None:
    text = refused(ParallelPlan(units=("blocks.*",)))
    assert text.startswith("tensor_parallel_size is 2: Mixed has no tensor-parallel rules. Its layers: tokens Embedding(6, 8),")
    assert "blocks.*.0 Linear(8, 12), blocks.*.2 Linear(12, 8)" in text
    assert '"blocks.*": "replicate_input", "blocks.*.0": "colwise", "blocks.*.2": "rowwise"' in text
    assert refused(ParallelPlan(), model=nn.Conv1d(2, 2, 1)).endswith(
        "no Linear and no Embedding. Set tensor_parallel_size to 1."
    )


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"blocks.*.1.up": "colwise"}, "tensor is 'blocks.*.1.up': it matches no module of the model"),
        ({"blocks.*.0": "column"}, "tensor['blocks.0.0'] is 'column': there is no part of this name. Known: colwise,"),
        ({"blocks.*.1": "rowwise"}, "it is for torch.nn.Linear only. blocks.0.1 is a torch.nn.modules.activation.GELU"),
        (
            {"scaled": "colwise"},
            "test_check.Scaled. Use torch.nn.Linear there, leave 'scaled' out",
        ),
        ({"attention.out_proj": "rowwise"}, "attention.out_proj is a torch.nn.modules.linear.NonDynamicallyQuantizableLinear"),
        ({"conv": "colwise"}, "conv is a torch.nn.modules.conv.Conv1d"),
        ({"normed": "colwise"}, "it is for torch.nn.Linear only"),
        ({"short": "vocab_embedding"}, "it is for torch.nn.Embedding only. short is a torch.nn.modules.linear.Linear"),
        ({"tokens": "vocab_embedding"}, "tokens.max_norm is 1.0: an embedding split by vocabulary cannot honour it"),
        ({"blocks.*.0": "colwise", "blocks.1.0": "rowwise"}, "one module has one style. It also has 'colwise'. Remove one rule."),
    ],
)
def test_rules_that_do_not_fit(rules: dict[str, str], expected: str) -> None:
    assert expected in refused(ParallelPlan(tensor=rules))


def test_a_slice_for_every_rank() -> None:
    text = refused(ParallelPlan(tensor={"short": "colwise"}), size=4)
    assert "short.weight has 3 of them, so the last rank would hold none. Set tensor_parallel_size to 3 or less." in text


def test_nothing_is_changed_when_a_later_rule_is_refused() -> None:
    model = Mixed()
    refused(ParallelPlan(tensor={"blocks.*.0": "colwise", "conv": "colwise"}), model=model)
    assert model.blocks[0][0].weight.shape == (12, 8)


def test_ties_must_be_sliced_alike() -> None:
    model = Case("biased", 8).build()
    model.blocks[0].up.weight = model.blocks[0].down.weight = nn.Parameter(torch.zeros(16, 16))
    rules = {"blocks.0.up": "colwise", "blocks.0.down": "rowwise"}
    assert "tied parameters must be sliced alike" in refused(ParallelPlan(tensor=rules), model=model)
    model = Case("biased", 8, tied=True).build()
    assert "tied parameters must be sliced alike" in refused(ParallelPlan(tensor={"tokens": "vocab_embedding"}), model=model)


def test_absent_modules() -> None:
    model = Mixed()
    del model.blocks[1]
    assert assign_styles(model, ParallelPlan(tensor={"blocks.1.0": "colwise"}), 2, absent={"blocks.1"}) == {}
    assert assign_styles(model, ParallelPlan(tensor={"blocks.*.0": "colwise"}), 2, absent={"blocks.0"}) == {}
    with pytest.raises(ModelError, match="matches no module"):
        assign_styles(model, ParallelPlan(tensor={"block.1.0": "colwise"}), 2, absent={"blocks.1"})


def test_inside() -> None:
    styles = {"layers.0.mlp": "replicate_input", "layers.0.mlp.up": "colwise"}
    assert is_inside("layers.0.mlp", styles)
    assert is_inside("layers.0.mlp.up", styles)
    assert not is_inside("layers.0", styles)
    assert not is_inside("", styles)
