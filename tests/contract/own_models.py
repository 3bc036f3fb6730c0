"""Models of a user's own, as people write them; `plan` says what a pipeline and tensor parallelism must know of each."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid_strategy import ParallelPlan

WIDTH, HEADS, VOCAB, LENGTH, PIXELS, CLASSES = 8, 2, 16, 12, 8, 5


class Attention(nn.Module):
    """Attends to `memory`, or to itself; heads are seen by their width, so that a rank may hold some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        source = x if memory is None else memory

        def heads(each: Tensor) -> Tensor:
            return each.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(heads(self.query(x)), heads(self.key(source)), heads(self.value(source)))
        return self.out(mixed.transpose(1, 2).flatten(2))


def mlp(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class EncoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), mlp(WIDTH, 12)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Transformer(nn.Module):
    """`[b, s]` -> `[b, s, vocab]`."""

    plan = ParallelPlan(
        units=("tokens", "blocks.*", "norm", "head"),
        tensor={
            "blocks.*.attention": "replicate_input",
            "blocks.*.attention.query": "colwise",
            "blocks.*.attention.key": "colwise",
            "blocks.*.attention.value": "colwise",
            "blocks.*.attention.out": "rowwise",
            "blocks.*.mlp.0": "colwise",
            "blocks.*.mlp.2": "rowwise",
            "head": "vocab_head",
        },
        heads={"HEADS": HEADS},
    )

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(EncoderLayer() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x + self.places)
        return self.head(self.norm(x))


class ConvLayer(nn.Sequential):
    """Its skip connection lies inside, so that its output is all that goes on."""

    def __init__(self) -> None:
        super().__init__(nn.GroupNorm(2, WIDTH), nn.ReLU(), nn.Conv2d(WIDTH, WIDTH, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class ConvNet(nn.Module):
    """`[b, 3, p, p]` -> `[b, classes]`."""

    plan = ParallelPlan(units=("stem", "body.*", "head"))

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.body = nn.ModuleList(ConvLayer() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for layer in self.body:
            x = layer(x)
        return self.head(x.mean((2, 3)))


class SkipOutside(ConvNet):
    """Its skip connections go past the units, where a pipeline cannot see them."""

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for layer in self.body:
            x = x + layer(x)
        return self.head(x.mean((2, 3)))


class MixerLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.between, self.within = mlp(PIXELS * PIXELS // 4, 10), mlp(WIDTH, 12)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.between(self.first(x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.second(x))


class Mixer(nn.Module):
    """`[b, 3, p, p]` -> `[b, classes]`, patches of 2 x 2."""

    plan = ParallelPlan(
        units=("patches", "layers.*", "norm", "head"),
        tensor={
            "layers.*.between.0": "colwise",
            "layers.*.between.2": "rowwise",
            "layers.*.within.0": "colwise",
            "layers.*.within.2": "rowwise",
        },
    )

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 2, stride=2)
        self.layers = nn.ModuleList(MixerLayer() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


class DecoderLayer(nn.Module):
    """Hands the encoder's output on beside its own, so that a pipeline may cut after it."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross, self.mlp = Attention(), Attention(), mlp(WIDTH, 12)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))

    def forward(self, memory: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.own(self.norms[0](x))
        x = x + self.cross(self.norms[1](x), memory)
        return memory, x + self.mlp(self.norms[2](x))


class Start(nn.Module):
    """Where the decoder begins: the encoder's output, and the tokens so far."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)

    def forward(self, memory: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return memory, self.tokens(ids)


class EncoderDecoder(nn.Module):
    """`[b, s]`, `[b, t]` -> `[b, t, vocab]`."""

    plan = ParallelPlan(
        units=("source", "encoder.*", "start", "decoder.*", "head"),
        tensor={
            **{f"encoder.*.attention.{name}": "colwise" for name in ("query", "key", "value")},
            "encoder.*.attention.out": "rowwise",
            "encoder.*.mlp.0": "colwise",
            "encoder.*.mlp.2": "rowwise",
            "decoder.*.own": "replicate_input",
            "decoder.*.cross": "replicate_input",
            **{f"decoder.*.{each}.{name}": "colwise" for each in ("own", "cross") for name in ("query", "key", "value")},
            "decoder.*.own.out": "rowwise",
            "decoder.*.cross.out": "rowwise",
            "decoder.*.mlp.0": "colwise",
            "decoder.*.mlp.2": "rowwise",
        },
    )

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(VOCAB, WIDTH)
        self.encoder = nn.ModuleList(EncoderLayer() for _ in range(2))
        self.start = Start()
        self.decoder = nn.ModuleList(DecoderLayer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.source(source)
        for layer in self.encoder:
            memory = layer(memory)
        pair = self.start(memory, target)
        for layer in self.decoder:
            pair = layer(*pair)
        return self.head(pair[1])


class Careless(EncoderDecoder):
    """The same, but the memory goes past the decoder's layers, which a pipeline cannot see."""

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.source(source)
        for layer in self.encoder:
            memory = layer(memory)
        _, x = self.start(memory, target)
        for layer in self.decoder:
            _, x = layer(memory, x)
        return self.head(x)
