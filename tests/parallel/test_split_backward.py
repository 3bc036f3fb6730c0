"""The two halves of a backward pass together are the whole one, whatever the layer does and however it is recomputed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid_strategy.parallel.activation_checkpoint import checkpoint_units
from hybrid_strategy.parallel.split_backward import backward_input, backward_weight, weights_later

WIDTH = 6


class Layer(nn.Module):
    """Linear layers with and without bias, one used twice, a frozen one, a norm and a product that is written out."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH, bias=False)
        self.twice, self.frozen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.written = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.bias = nn.Linear(WIDTH, WIDTH)
        self.bias.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        x = self.twice(torch.tanh(self.twice(x)))
        return self.bias(F.dropout(self.frozen(x) @ self.written, 0.2))


def layers(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer())
    checkpoint_units(list(model), kind)
    return model


def gradients(model: nn.Module, x: Tensor, backward: Callable[[Tensor], None], dtype: torch.dtype | None) -> dict[str, Any]:
    torch.manual_seed(1)
    with torch.autocast("cpu", dtype) if dtype else nullcontext():
        output = model(x)
    backward(output)
    return {"x": x.grad, **{name: each.grad for name, each in model.named_parameters()}}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "autocast"])
@pytest.mark.parametrize("kind", ["none", "selective", "full"])
def test_both_halves_are_the_whole_and_recompute_once(kind: str, dtype: torch.dtype | None) -> None:
    x = torch.randn(2, 3, WIDTH)
    fill = torch.randn(2, 3, WIDTH)

    def at_once(output: Tensor) -> None:
        torch.autograd.backward(output, fill.to(output.dtype))

    wanted = gradients(layers("none"), x.clone().requires_grad_(), at_once, dtype)
    model, given = layers(kind), x.clone().requires_grad_()

    def in_halves(output: Tensor) -> None:
        work = backward_input([output], [fill.to(output.dtype)], [given])
        assert given.grad is not None
        assert model[0].up.weight.grad is None
        backward_weight(work)

    with weights_later(wanted=True):
        found = gradients(model, given, in_halves, dtype)
    assert {name for name, each in found.items() if each is None} == {name for name, each in wanted.items() if each is None}
    for name, value in wanted.items():
        if value is not None:
            torch.testing.assert_close(
                found[name], value, msg=name, rtol=2**-7 if dtype else 1.3e-6, atol=2**-6 if dtype else 1e-5
            )
    assert [layer.calls for layer in model] == [1 if kind == "none" else 2] * 2
    assert F.linear is torch._C._nn.linear


def test_hooks_of_a_weight_see_its_whole_gradient_once() -> None:
    seen: list[Tensor] = []
    layer, x = nn.Linear(WIDTH, WIDTH, bias=False), torch.randn(4, WIDTH, requires_grad=True)
    layer.weight.register_hook(lambda gradient: seen.append(gradient) or gradient * 2)
    with weights_later(wanted=True):
        work = backward_input([layer(torch.tanh(layer(x)))], [torch.ones(4, WIDTH)], [x])
        assert not seen
        backward_weight(work)
    assert len(seen) == 1
    assert torch.equal(layer.weight.grad, 2 * seen[0])


def test_a_penalty_on_gradients_within_the_step_is_differentiated_too() -> None:
    def run(split: bool) -> list[Tensor]:
        torch.manual_seed(2)
        layer, x = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH, requires_grad=True)
        with weights_later(wanted=split):
            output = torch.tanh(layer(x))
            (inner,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            loss = output.square().mean() + inner.square().mean()
            if split:
                backward_weight(backward_input([loss], [None], [x]))
            else:
                loss.backward()
        return [x.grad, layer.weight.grad, layer.bias.grad]

    for found, wanted in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(found, wanted)


def test_evaluation_and_what_is_no_parameter_go_the_usual_way() -> None:
    weight, x = torch.randn(WIDTH, WIDTH, requires_grad=True), torch.randn(4, WIDTH)
    with weights_later(wanted=True):
        assert "_Linear" not in type(F.linear(x, weight * 1).grad_fn).__name__
        with torch.no_grad():
            assert not F.linear(x, nn.Parameter(weight)).requires_grad
