"""What units hand on to each other, over a cut as well: right in every kind of container and number, or refused on every rank."""

from __future__ import annotations

import os
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybrid_strategy import ParallelPlan
from tests.contract import own_models
from tests.contract.items import Item, compare_item
from tests.contract.layouts import LAYOUTS, ContractLayout
from tests.contract.model_items import _train

PP4 = ContractLayout("pp4", 4, 1, {"pipeline_parallel_size": 4, "num_microbatches": 4})
ZERO3 = ContractLayout("dp2_pp2_zero3", 4, 2, {"pipeline_parallel_size": 2, "num_microbatches": 2, "sharding": "zero3"})
UNITS = own_models.ConvNet.plan.units


@dataclass
class State:
    x: Tensor
    energy: Tensor
    sign: int = -1


class StateLayer(own_models.ConvLayer):
    """Takes and returns an object of the user's."""

    def forward(self, state: Any) -> Any:
        x = super().forward(state.x)
        return State(x, state.energy + x.square().mean((1, 2, 3)), state.sign)


class Hidden:
    """An object whose tensors nobody sees."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class HiddenLayer(own_models.ConvLayer):
    def forward(self, state: Any) -> Any:
        return Hidden(super().forward(state.x))


class ConjugateLayer(own_models.ConvLayer):
    """Hands on numbers whose conjugation torch has put off."""

    def forward(self, spectrum: Tensor) -> Tensor:
        return torch.fft.fft(super().forward(spectrum.real)).conj()


class CountedLayer(own_models.ConvLayer):
    """Hands lengths on, which the model looks at in between."""

    def forward(self, pair: Any) -> Any:
        return super().forward(pair[0]), pair[1]


@dataclass
class Strict:
    """Nobody else can make one."""

    x: Tensor
    width: InitVar[int]

    def __post_init__(self, width: int) -> None:
        assert self.x.shape[1] == width


class StrictStem(nn.Conv2d):
    def forward(self, images: Tensor) -> Any:
        return Strict(super().forward(images), own_models.WIDTH)


class FromStrict(own_models.ConvLayer):
    def forward(self, state: Any) -> Tensor:
        return super().forward(state.x)


class SpectralLayer(own_models.ConvLayer):
    """Complex numbers go in and come out, and are weighted by complex ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(own_models.PIXELS, dtype=torch.cfloat))

    def forward(self, spectrum: Tensor) -> Tensor:
        return torch.fft.fft(super().forward(torch.fft.ifft(spectrum).real)) * self.weight


class NumberLayer(own_models.ConvLayer):
    """Hands on a number of Python, another one for every batch."""

    def forward(self, pair: Any) -> Any:
        x = super().forward(pair[0])
        return x, float(x.detach().mean())


class LongerLayer(own_models.ConvLayer):
    """Hands on as many values as it finds."""

    def forward(self, pair: Any) -> Any:
        x = super().forward(pair[0])
        return x, x[x > x.mean()]


class _Net(own_models.ConvNet):
    layer: type[nn.Module]

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(self.layer() for _ in range(4))


class States(_Net):
    layer = StateLayer

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        state = State(x, x.new_zeros(len(x)))
        for layer in self.body:
            state = layer(state)
        return self.head(state.x.mean((2, 3))) + state.sign * 0.1 * state.energy[:, None] * torch.arange(own_models.CLASSES)


class Spectral(_Net):
    layer = SpectralLayer

    def forward(self, images: Tensor) -> Tensor:
        spectrum = torch.fft.fft(self.stem(images))
        for layer in self.body:
            spectrum = layer(spectrum)
        return self.head(torch.fft.ifft(spectrum).real.mean((2, 3)))


class Hiddens(_Net):
    layer = HiddenLayer

    def forward(self, images: Tensor) -> Tensor:
        state = Hidden(self.stem(images))
        for layer in self.body:
            state = layer(state)
        return self.head(state.x.mean((2, 3)))


class Conjugates(_Net):
    layer = ConjugateLayer

    def forward(self, images: Tensor) -> Tensor:
        spectrum = torch.fft.fft(self.stem(images))
        for layer in self.body:
            spectrum = layer(spectrum)
        return self.head(spectrum.imag.mean((2, 3)))


class Counted(_Net):
    layer = CountedLayer

    def forward(self, images: Tensor) -> Tensor:
        pair = self.stem(images), torch.full((len(images),), 8)
        for layer in self.body:
            pair = layer(pair)
            assert (pair[1] > 0).all()
        return self.head(pair[0].mean((2, 3)))


class StrictWithin(own_models.ConvNet):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body[0] = StrictStem(3, own_models.WIDTH, 3, padding=1), FromStrict()


class Numbers(_Net):
    layer: type[nn.Module] = NumberLayer

    def forward(self, images: Tensor) -> Tensor:
        pair = self.stem(images), torch.ones(())
        for layer in self.body:
            pair = layer(pair)
        return self.head(pair[0].mean((2, 3))) * torch.as_tensor(pair[1]).mean()


class Longer(Numbers):
    layer = LongerLayer


class InPlace(own_models.ConvNet):
    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for layer in self.body:
            x = layer(x)
            x *= 1.1
        return self.head(x.mean((2, 3)))


class OneReplicasLayer(own_models.ConvLayer):
    """Hands on one tensor more from its third call on, on one data-parallel rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, states: Any) -> Any:
        self.calls += 1
        x = super().forward(states[0])
        return (x, x) if self.calls > 2 and os.environ["RANK"] == "0" else (x,)


class OneReplica(own_models.ConvNet):
    plan = ParallelPlan(units=UNITS)

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(OneReplicasLayer() for _ in range(4))

    def forward(self, images: Tensor) -> Tensor:
        states = (self.stem(images),)
        for layer in self.body:
            states = layer(states)
        return self.head(states[0].mean((2, 3)))


class CarriedInPlace(InPlace):
    """What is carried is changed in place, where it is made and behind the cuts."""

    plan = ParallelPlan(units=UNITS, carried=("stem", "body.*"))

    def forward(self, images: Tensor) -> Tensor:
        first = self.stem(images)
        first += 0.5
        x = first
        for layer in self.body:
            x = layer(x + first)
            x *= 1.1
        return self.head(x.mean((2, 3)))


def _compare(kind: Any, layout: ContractLayout, words: str = "") -> None:
    refused = {layout.name: words} if words else {}
    item = Item(f"handed_on_{kind.__name__}", 8, partial(_train, kind, True, False, True), refused=refused, relative=4e-6)
    result, why = compare_item(item, layout)
    assert result == ("refused" if words else "same"), "\n".join(why[:10])


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        (States, LAYOUTS["pp2_interleaved"]),
        (States, PP4),
        (Spectral, LAYOUTS["dp2_pp2"]),
        (Spectral, LAYOUTS["pp2_zbv"]),
        (CarriedInPlace, LAYOUTS["pp2_interleaved"]),
        (CarriedInPlace, PP4),
        (Conjugates, LAYOUTS["pp2_1f1b"]),
        (Counted, LAYOUTS["pp2_1f1b"]),
        (StrictWithin, LAYOUTS["pp2_1f1b"]),
    ],
)
def test_it_is_right(kind: Any, layout: ContractLayout) -> None:
    _compare(kind, layout)


@pytest.mark.parametrize(
    ("kind", "layout", "words"),
    [
        (Numbers, LAYOUTS["pp2_1f1b"], "what a stage hands on must look the same for all micro-batches of one shape"),
        (Longer, LAYOUTS["pp2_interleaved"], "what a stage hands on must look the same for all micro-batches of one shape"),
        (OneReplica, ZERO3, "what a stage hands on must look the same for all micro-batches of one shape"),
        (OneReplica, LAYOUTS["dp2_pp2"], "what a stage hands on must look the same for all micro-batches of one shape"),
        (Hiddens, LAYOUTS["pp2_1f1b"], "Make it a dataclass, a dict, a list or a tuple"),
        (InPlace, LAYOUTS["pp2_1f1b"], "Write x = x + y instead of x += y"),
        (InPlace, LAYOUTS["pp2_interleaved"], "Write x = x + y instead of x += y"),
    ],
)
def test_it_is_refused(kind: Any, layout: ContractLayout, words: str) -> None:
    _compare(kind, layout, words)
