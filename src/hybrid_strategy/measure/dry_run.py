"""A rank of a run that is not there: the real model, cut, sliced and sharded by the real code, plays a step with fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from hybrid_strategy.distributed.groups import Groups, build_groups
from hybrid_strategy.measure.fake import FakeTransport, Meter, Sent, fake_world
from hybrid_strategy.parallel.ghosts import leave_out_ghosts
from hybrid_strategy.parallel.parameters import Slot
from hybrid_strategy.parallel.sharding._base import Sharding
from hybrid_strategy.parallel.stages import whole_model_shown
from hybrid_strategy.parallelize import parallelize
from hybrid_strategy.spec.layout import Layout
from hybrid_strategy.spec.model_shape import ModelShape
from hybrid_strategy.spec.shard import even_chunk
from hybrid_strategy.strategy.step import StepEngine
from hybrid_strategy.strategy.step_call import Play, StepCall
from hybrid_strategy.strategy.target import find_plan, find_target

CPU = torch.device("cpu")


@dataclass(frozen=True)
class DryRun:
    """What is to be played.

    Attributes:
        layout: of the whole run.
        make_module: a fresh module on the meta device.
        make_optimizer: its optimizer, once it is parallelised.
        batch: tensor name -> shape of what a data-parallel rank's loader yields; whole numbers below `vocab_size`.
        num_microbatches: pieces that it is cut into.
        context: around each forward pass (autocast).
        kind_of: kind of a tensor that is made in a step: `activations`, `logits`.
    """

    layout: Layout
    make_module: Callable[[], pl.LightningModule]
    make_optimizer: Callable[[pl.LightningModule], Optimizer]
    batch: Mapping[str, tuple[int, ...]]
    num_microbatches: int
    context: Callable[[], AbstractContextManager[Any]]
    kind_of: Callable[[Tensor], str]
    stage_cuts: tuple[int, ...] | None = None


@dataclass
class Counted:
    """What one rank held and sent in a step.

    Attributes:
        memory: bytes by kind: parameters and optimizer states; gradients, activations, logits, copies (16-bit weights), each
            at its own peak while the schedule was played.
        sent: collectives.
    """

    rank: int
    memory: dict[str, int] = field(default_factory=dict)
    sent: Sent = field(default_factory=Sent)


def dry_run(run: DryRun, rank: int) -> Counted:
    """Plays one step as `rank` and counts it; takes seconds and next to no memory, whatever the model."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    boundary = None
    if run.layout.coordinate(rank).pipeline_parallel > 0:
        columns = run.layout.world_size // run.layout.pipeline_parallel_size
        with _engine(run, rank % columns, mode, None) as made:
            boundary = _first_output(run, made)
    elif run.layout.pipeline_parallel_size > 1:
        with _engine(run, rank, mode, None) as made:
            boundary = _first_output(run, made)
    with _engine(run, rank, mode, boundary) as made:
        return _count(run, made, rank)


def kinds_of(shape: ModelShape, layout: Layout) -> Callable[[Tensor], str]:
    """Kind of a tensor that a step of a decoder makes: `logits` or `activations`."""
    words = even_chunk(shape.vocab_size, layout.tensor_parallel_size, 0)[1]

    def kind(tensor: Tensor) -> str:
        is_logits = tensor.dim() > 1 and tensor.shape[-1] == words and tensor.shape[-2] != shape.hidden_size
        return "logits" if is_logits else "activations"

    return kind


@dataclass
class _Made:
    module: pl.LightningModule
    engine: StepEngine
    mode: FakeTensorMode
    meter: Meter


@contextmanager
def _engine(run: DryRun, rank: int, mode: FakeTensorMode, boundary: Any) -> Iterator[_Made]:
    """The module as this rank has it, and the engine that plays it, in a world of its own."""
    with fake_world(rank, run.layout.world_size):
        groups = build_groups(run.layout, CPU)
        with mode:
            module = run.make_module()
            meter = Meter(_axis_names(groups), run.kind_of)
            target = find_target(module, None)
            plan = find_plan(module, target, None)
            made = parallelize(module, target, plan, groups, CPU, stage_cuts=run.stage_cuts)
            made.context.random.shared = False  # seeds and inputs are values, of which there are none
            made.context.check_inputs = lambda unit, inputs: None  # type: ignore[method-assign]
            engine = StepEngine(module, made, groups, lambda rows: min(run.num_microbatches, rows), plan.batch_dims, CPU)
            if engine.player._transport is not None:
                engine.player._transport = FakeTransport(meter.sent, boundary)  # type: ignore[assignment]
            yield _Made(module, engine, mode, meter)


def _axis_names(groups: Groups) -> Callable[[str], str]:
    names: dict[str, str] = {}  # where two axes have the same group, the later name is the bill's
    data = ["data_parallel_replicate", "data_parallel_shard"]
    both: dict[str, str] = {} if groups.data is None else {str(groups.data.group_name): "data_parallel"}
    if groups.layout.sharding != "ddp":
        names.update(both)
    for axis in (*data, "tensor_parallel", "pipeline_parallel"):
        if groups.mesh[axis].size() > 1:
            names[groups.mesh[axis].get_group().group_name] = axis
    if groups.layout.sharding == "ddp":
        names.update(both)
    for group in groups.among.values():
        if group is not None:
            names[group.group_name] = "pipeline_parallel"
    return lambda name: names.get(name, "pipeline_parallel")


def _begin(run: DryRun, made: _Made) -> Play:
    rows = next(iter(run.batch.values()))[0]
    batch = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in run.batch.items()}
    call = StepCall("train", made.module.training_step, run.context, batch, (0,), rows, rows * run.layout.data_parallel_size)
    return Play(call, made.engine._cut(call), float(rows * run.layout.data_parallel_size), 1.0)


def _first_output(run: DryRun, made: _Made) -> Any:
    """What the first stage hands on."""
    play = _begin(run, made)
    made.engine._play = play
    made.engine.made.sharding.begin()
    with torch.no_grad():
        return made.engine.forward(0, 0, None)


def _count(run: DryRun, made: _Made, rank: int) -> Counted:
    engine, sharding, meter = made.engine, made.engine.made.sharding, made.meter
    with whole_model_shown(made.module):
        optimizer = run.make_optimizer(made.module)
    leave_out_ghosts(optimizer)
    _steps_once(optimizer)
    whole, pieces = [s.parameter for s in sharding.slots], [sharding.optimizer_parameter(s) for s in sharding.slots]
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    found = Counted(rank, {"parameters": _bytes([*whole, *pieces]), "optimizer": _bytes(states)}, meter.sent)
    sharding.mark_changed()
    meter.sent.ignored = 4 * len(sharding.slots)
    with meter:
        for each in (*whole, *pieces):
            meter.note(each, "parameters")
        for each in whole:
            if each.requires_grad:
                each.register_post_accumulate_grad_hook(lambda p: meter.note(p.grad, "gradients"))
        _watch_backward(sharding, meter)
        for unit in getattr(sharding, "_units", ()):
            _watch_unit(unit, meter)
        engine._run(_begin(run, made), train=True)
        played = dict(meter.most)
        sharding.take()
        sharding.hand_over(1.0)
        sharding.reduce()
    return replace(found, memory={**played, **found.memory})


def _watch_backward(sharding: Sharding, meter: Meter) -> None:
    """Gradients that a split backward pass has put in place itself."""
    after = sharding.after_backward

    def noted(slots: Sequence[Slot]) -> None:
        for slot in slots:
            if slot.parameter.grad is not None:
                meter.note(slot.parameter.grad, "gradients")
        after(slots)

    sharding.after_backward = noted  # type: ignore[method-assign]


def _watch_unit(unit: Any, meter: Meter) -> None:
    """Whole parameters of a unit of `zero3` are alive between `gather` and `free`; rows of its gradients from then on."""
    gather, free, scatter = unit.gather, unit.free, unit.scatter_gradients
    size = sum(slot.parameter.numel() * slot.parameter.element_size() for slot in unit.slots)

    def gathered() -> None:
        if not unit.resident:
            meter.add("gathered", size)
        gather()

    def freed() -> None:
        if unit.resident:
            meter.add("gathered", -size)
        free()

    def scattered(dtype: torch.dtype | None) -> dict[str, Tensor]:
        pieces: dict[str, Tensor] = scatter(dtype)
        for piece in pieces.values():
            meter.note(piece, "gradients")
        return pieces

    unit.gather, unit.free, unit.scatter_gradients = gathered, freed, scattered


def _steps_once(optimizer: Optimizer) -> None:
    """Makes the optimizer's states."""
    for group in optimizer.param_groups:
        for each in group["params"]:
            each.grad = torch.zeros_like(each)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Memory of tensors, shared memory once."""
    sizes = {}
    for each in tensors:
        storage = each.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())
