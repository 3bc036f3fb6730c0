"""Hand-written torch training loops, the peers of `step_overhead.py`: the same model, values, batches and optimizer in each.

`make(kind, ...)` gives a function `step(tokens) -> loss`; `kind` is a key of `LOOPS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from hybrid_strategy.models.llama import PART as LLAMA
from hybrid_strategy.models.llama import rotary_tables
from hybrid_strategy.modules.first_values import give_first_values
from hybrid_strategy.spec.model_shape import ModelShape

SHAPE = ModelShape(
    hidden_size=256, num_layers=8, num_attention_heads=4, intermediate_size=704, vocab_size=512, sequence_length=64
)
SEED = 7
Step = Callable[[Tensor, Tensor], Tensor]
"""Token ids and labels, both `[b, s]` of this data-parallel rank -> the loss (on the last stage)."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the axes, and micro-batches of a step."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    num_microbatches: int = 1


def optimizer_of(parameters: object) -> torch.optim.Optimizer:
    """The optimizer of every variant, ours too."""
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, foreach=False)  # type: ignore[arg-type]


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build() -> nn.Module:
    """The whole model with its first values."""
    with torch.device("meta"):
        model = LLAMA.build(SHAPE)
    give_first_values(model, SEED, torch.device("cpu"))
    return model


def _plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(ids: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(ids), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def single(sizes: Sizes) -> Step:
    """One process."""
    model = build()
    return _plain(model, optimizer_of(model.parameters()))


def ddp(sizes: Sizes) -> Step:
    """`DistributedDataParallel`."""
    model = DistributedDataParallel(build(), gradient_as_bucket_view=True)
    return _plain(model, optimizer_of(model.parameters()))


def zero1(sizes: Sizes) -> Step:
    """`DistributedDataParallel` with `ZeroRedundancyOptimizer`."""
    model = DistributedDataParallel(build(), gradient_as_bucket_view=True)
    settings = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "foreach": False}
    return _plain(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **settings))


def _fully_sharded(reshard: bool) -> Step:
    model = build()
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    return _plain(model, optimizer_of(model.parameters()))


def zero2(sizes: Sizes) -> Step:
    """`fully_shard` that keeps parameters after forward."""
    return _fully_sharded(False)


def zero3(sizes: Sizes) -> Step:
    """`fully_shard`."""
    return _fully_sharded(True)


def _tensor_parallel(plan: dict[str, object], layer_plan: dict[str, object]) -> Step:
    model = build()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = {**plan, **{f"layers.*.{name}": style for name, style in layer_plan.items()}}
    parallelize_module(model, mesh, whole)  # type: ignore[arg-type]
    optimizer = optimizer_of(model.parameters())

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        with loss_parallel():
            loss = loss_of(model(ids), labels)
            loss.backward()
        optimizer.step()
        return loss.detach().full_tensor()  # type: ignore[attr-defined, no-any-return]

    return step


_PROJECTIONS_IN = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_PROJECTIONS_OUT = ("self_attn.o_proj", "mlp.down_proj")


def tensor_obvious(sizes: Sizes) -> Step:
    """Every projection makes its own input whole: the plan of torch's tutorial."""
    plan = {"embed_tokens": RowwiseParallel(input_layouts=Replicate()), "lm_head": _head()}
    layers = {name: ColwiseParallel() for name in _PROJECTIONS_IN} | {name: RowwiseParallel() for name in _PROJECTIONS_OUT}
    return _tensor_parallel(plan, layers)


def tensor_one(sizes: Sizes) -> Step:
    """One point a sub-block where the input becomes whole."""
    plan = {"embed_tokens": RowwiseParallel(input_layouts=Replicate()), "lm_head": _head()}
    layers = {name: ColwiseParallel() for name in _PROJECTIONS_IN} | {name: RowwiseParallel() for name in _PROJECTIONS_OUT}
    layers["self_attn"] = PrepareModuleInput(
        input_layouts=(Replicate(), None, None), desired_input_layouts=(Replicate(), None, None)
    )
    layers["mlp"] = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
    return _tensor_parallel(plan, layers)


def tensor_sequence(sizes: Sizes) -> Step:
    """The sequence split between sub-blocks."""
    rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    plan = {"embed_tokens": rows, "norm": SequenceParallel(), "lm_head": _head(Shard(1))}
    layers: dict[str, object] = {name: ColwiseParallel() for name in _PROJECTIONS_IN}
    layers |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in _PROJECTIONS_OUT}
    layers |= {name: SequenceParallel() for name in ("input_layernorm", "post_attention_layernorm")}
    layers["self_attn"] = PrepareModuleInput(
        input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
    )
    layers["mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    return _tensor_parallel(plan, layers)


def _head(layout: object = None) -> ColwiseParallel:
    return ColwiseParallel(input_layouts=layout or Replicate(), output_layouts=Shard(-1), use_local_output=False)  # type: ignore[arg-type]


class _Stage(nn.Module):
    """Half of the model."""

    def __init__(self, model: nn.Module, index: int, count: int) -> None:
        super().__init__()
        share = SHAPE.num_layers // count
        self.embed = model.embed_tokens if index == 0 else None
        self.layers = nn.ModuleList(list(model.layers)[index * share : (index + 1) * share])  # type: ignore[arg-type]
        self.tail = nn.Sequential(model.norm, model.lm_head) if index == count - 1 else None  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        hidden = x if self.embed is None else self.embed(x)  # type: ignore[operator]
        cos, sin = rotary_tables(torch.arange(hidden.shape[1]), SHAPE.head_size, 10000.0, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin)
        return hidden if self.tail is None else self.tail(hidden)


def pipeline(sizes: Sizes) -> Step:
    """torch's pipelining, 1F1B; over data-parallel ranks one all-reduce of all gradients after the schedule."""
    shape = (sizes.data, sizes.pipeline)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "pipeline"))
    group, index = mesh.get_group("pipeline"), mesh.get_local_rank("pipeline")
    module = _Stage(build(), index, sizes.pipeline)
    stage = PipelineStage(module, index, sizes.pipeline, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, sizes.num_microbatches, loss_fn=loss_of)
    parameters = list(module.parameters())
    optimizer = optimizer_of(parameters)
    data = mesh.get_group("data") if sizes.data > 1 else None

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        arguments = (ids,) if index == 0 else ()
        last = index == sizes.pipeline - 1
        schedule.step(*arguments, target=labels if last else None, losses=losses if last else None)
        if data is not None:
            gradients = [each.grad for each in parameters if each.grad is not None]
            flat = torch.cat([each.flatten() for each in gradients])
            dist.all_reduce(flat, group=data)
            flat /= sizes.data
            for gradient, piece in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
                gradient.copy_(piece.view_as(gradient))
        optimizer.step()
        return torch.stack(losses).mean().detach() if losses else torch.tensor(float("nan"))

    return step


LOOPS: dict[str, Callable[[Sizes], Step]] = {
    each.__name__: each for each in (single, ddp, zero1, zero2, zero3, tensor_obvious, tensor_one, tensor_sequence, pipeline)
}
