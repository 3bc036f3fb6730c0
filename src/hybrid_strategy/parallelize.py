"""The only place where transforms meet, in their one order:

cut into stages -> tensor (and sequence) parallel -> context parallel -> activation checkpoint -> compile -> data
parallel / ZeRO -> first values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybrid_strategy.distributed.groups import Groups
from hybrid_strategy.distributed.random_state import has_peers
from hybrid_strategy.errors import ModelError, message
from hybrid_strategy.parallel.activation_checkpoint import checkpoint_units
from hybrid_strategy.parallel.agreement import agree_on_values, agreement
from hybrid_strategy.parallel.compiled import compile_units, refuse_compiled
from hybrid_strategy.parallel.context.gate import check_units, close_for_sending, open_received, put_context_gates
from hybrid_strategy.parallel.context.region import ContextRegion
from hybrid_strategy.parallel.inner_values import InnerValues
from hybrid_strategy.parallel.materialise import Initialiser, check_buffers
from hybrid_strategy.parallel.names import Describe, Names, StageCut
from hybrid_strategy.parallel.parameters import Slot, collect_slots
from hybrid_strategy.parallel.sharding._base import Sharding
from hybrid_strategy.parallel.side_values import kept_values, lost_in_buffers, taken_from_the_side, unset_buffers
from hybrid_strategy.parallel.stage_context import StageContext
from hybrid_strategy.parallel.stages import cut_model, put_gates, tied_places
from hybrid_strategy.parallel.step_random import StepRandom, put_dropouts_apart
from hybrid_strategy.parallel.tensor.apply import TensorShard, apply_tensor_parallel
from hybrid_strategy.parallel.tensor.check import assign_styles
from hybrid_strategy.parallel.units import find_carried, find_units
from hybrid_strategy.planning.balance import cut_units, layer_like, parameter_costs
from hybrid_strategy.planning.layouts import check_layout, find_schedule
from hybrid_strategy.registry import find
from hybrid_strategy.spec.parallel_plan import ParallelPlan, matches


@dataclass
class Parallelized:
    """A module after `parallelize`.

    Attributes:
        slots: this rank's parameters.
        sharding: holds their gradients and optimizer pieces.
        context: tells the model's gates which stage is played.
        units: all units of the whole model, in order.
        bounds: units `bounds[s] .. bounds[s + 1] - 1` are stage `s`.
        unit_parameters: parameters of each unit of the whole model.
        shapes: whole shape of every parameter of the whole module, by name.
        target: name of the submodule that was parallelised; empty: the module itself.
    """

    slots: list[Slot]
    sharding: Sharding
    context: StageContext
    units: list[str]
    bounds: tuple[int, ...]
    unit_parameters: list[int]
    shapes: dict[str, tuple[int, ...]]
    stage_slots: dict[int, list[Slot]] = field(default_factory=dict)
    target: str = ""

    @property
    def num_parameters(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    def slots_in_one_stage(self) -> list[Slot]:
        """Parameters whose gradient is whole after the last backward of one stage of this rank, without the help of others."""
        stages = Counter(id(slot) for slots in self.stage_slots.values() for slot in slots)
        whole = [slot for slot in self.slots if not slot.holders and not slot.spec.partial_gradient]
        return [slot for slot in whole if stages[id(slot)] == 1]

    def note_buffers(self, module: nn.Module) -> None:
        """In a step that is looked at, before it is played: which buffers hold NaN already."""
        if self.context.look is not None and len(self.bounds) > 2:
            self.context.look.unset = self._unset_buffers(module)

    def _unset_buffers(self, module: nn.Module) -> set[str]:
        return unset_buffers(module, tuple(f"{self.target}.{unit}." if self.target else f"{unit}." for unit in self.units))

    def note_side_values(self, module: nn.Module, stage: int, loss: Tensor | None) -> None:
        """In a step that is looked at: what layers of `stage` keep of their own; on the last one, what of it `loss` has taken."""
        look = self.context.look
        if look is None or len(self.bounds) == 2:
            return
        if stage > 0:
            look.refused.extend(lost_in_buffers(sorted(self._unset_buffers(module) - look.unset)))
        root = module.get_submodule(self.target) if self.target else module
        names = self.units[self.bounds[stage] : self.bounds[stage + 1]]
        kept = kept_values([root.get_submodule(name) for name in names], module)
        if loss is None:
            look.kept.update(kept)
        else:
            look.taken.update(taken_from_the_side(loss, look.output, kept))
            look.output = None


def parallelize(
    module: nn.Module,
    target: str,
    plan: ParallelPlan,
    groups: Groups,
    device: torch.device,
    *,
    seed: int = 0,
    stage_cuts: Sequence[int] | None = None,
) -> Parallelized:
    """Makes `module` this rank's part of itself, in place.

    Args:
        module: the LightningModule; its names are the names of everything that is saved, grouped or reported.
        target: name of the submodule that is cut and sliced; the rest of `module` is replicated.
        plan: what the submodule tells about itself.
        groups: this rank's place in the layout.
        device: where parameters live.
        seed: of first values.
        stage_cuts: index of the first unit of every stage but the first; default: balanced.
    """
    root = module.get_submodule(target) if target else module
    shapes = {name: tuple(each.shape) for name, each in module.named_parameters()}
    refuse_own_parallelism(module)
    refuse_compiled(module, groups.layout)
    prefix = f"{target}." if target else ""
    agree_on_values(module)
    initialiser = Initialiser(root, seed)
    outer = Initialiser(module, seed)
    units, bounds, counts = _stages(root, plan, groups, stage_cuts)
    if groups.tensor is not None:
        assign_styles(root, plan, groups.layout.tensor_parallel_size)  # on the whole model, so that no typo hides behind the cut
    context = _context(groups, device)
    context.carried = find_carried(root, units, plan.carried)
    cut = StageCut(units, bounds, _owners(groups))
    names = Names.of(module, root, cut)
    absent = _cut(root, cut, groups, context)
    check_buffers(module)
    shards = _slice(root, plan, groups, absent, context)
    recomputed = _recomputed(root, plan, absent, groups.layout.activation_checkpoint)
    _split_sequences(root, plan, groups, absent, recomputed, context)
    _put_gates(root, units, absent, groups, context)
    _rewrap(root, recomputed, _compiled(root, plan, absent) if groups.layout.compile else [], groups.layout.activation_checkpoint)
    for holders in sorted(set(names.holders.values())):
        groups.make_group_among(holders)
    describe = Describe(groups, {f"{prefix}{name}": shard for name, shard in shards.items()}, names)
    slots = collect_slots(module, describe, names.first, names.holders)
    _show_tied_in_ghosts(root, slots)
    _to_device(module, device)
    sharding = _shard(root, plan, units, absent, slots, groups, device)
    for slot in slots:
        if slot.parameter.is_meta:
            own = slot.name not in names.outside
            source, name = (initialiser, slot.name[len(prefix) :]) if own else (outer, slot.name)
            sharding.materialise(slot, source.whole(name))
    sharding.attach()
    sharding.cover(root, context.outside)
    made = Parallelized(slots, sharding, context, units, bounds, counts, shapes, target=target)
    made.stage_slots = _stage_slots(root, made)
    _watch_weights(root, units, absent, slots, groups, context)
    return made


def _show_tied_in_ghosts(root: nn.Module, slots: Sequence[Slot]) -> None:
    by_parameter = {id(slot.parameter): slot for slot in slots}
    for ghost, attribute, parameter in tied_places(root):
        by_parameter[id(parameter)].places.append((ghost, attribute))


def refuse_own_parallelism(module: nn.Module) -> None:
    """Refuses a module that has parallelised itself: its gradients are reduced by hooks that a schedule cannot steer.

    Raises:
        ModelError: a parameter is a DTensor, or has a hook that runs once its gradient is added.
    """
    for name, parameter in module.named_parameters():
        if parameter._post_accumulate_grad_hooks:
            rule = "such a hook runs after each micro-batch, when gradients are neither complete nor summed over the ranks"
            advice = "Use on_after_backward or on_before_optimizer_step of the LightningModule"
            raise ModelError(message("register_post_accumulate_grad_hook", name, rule, "", advice))
        if isinstance(parameter, DTensor):
            rule = "a module that parallelises itself with DTensor or fully_shard cannot be parallelised again"
            advice = (
                "Leave that out of configure_model and give the module parallel_plan(), or use Lightning's ModelParallelStrategy"
            )
            raise ModelError(message("module", name, rule, f"its placements are {parameter.placements}", advice))


def _stages(
    root: nn.Module, plan: ParallelPlan, groups: Groups, stage_cuts: Sequence[int] | None
) -> tuple[list[str], tuple[int, ...], list[int]]:
    """Unit names, stage bounds and parameter counts of the whole model."""
    layout = groups.layout
    if not plan.units:
        if layout.num_stages > 1:
            raise ModelError(_no_units(root, layout.pipeline_parallel_size))
        return [], (0, 0), []
    units = find_units(root, plan.units)
    modules = [root.get_submodule(name) for name in units]
    counts = [sum(each.numel() for each in module.parameters()) for module in modules]
    costs = parameter_costs(counts, [isinstance(module, nn.Embedding) for module in modules])
    if stage_cuts is None:
        check_layout(layout, num_units=sum(layer_like(units)))
    stages = cut_units(units, layout.num_stages, costs, stage_cuts)
    bounds = [0]
    for stage in stages:
        bounds.append(bounds[-1] + len(stage))
    return units, tuple(bounds), counts


def _no_units(root: nn.Module, size: int) -> str:
    names = ", ".join(name for name, _ in root.named_children())
    return message(
        "pipeline_parallel_size",
        size,
        f"{type(root).__name__} does not say what a pipeline may cut",
        f"its children are {names}",
        "Give the module parallel_plan() returning ParallelPlan(units=(...)) in the order of forward, or set 1",
    )


def _put_gates(root: nn.Module, units: Sequence[str], absent: set[str], groups: Groups, context: StageContext) -> None:
    if has_peers(groups.layout):
        put_gates(root, units, absent, context)
    if groups.layout.sequence_parallel:
        put_dropouts_apart(root, lambda name: not any(name.startswith(f"{unit}.") for unit in units), context.random)


def _watch_weights(
    root: nn.Module, units: Sequence[str], absent: set[str], slots: Sequence[Slot], groups: Groups, context: StageContext
) -> None:
    """Notices weights of split layers that a step uses past these; `zero3` notices by itself."""
    if groups.tensor is not None and groups.layout.sharding != "zero3":
        context.layers.cover(slots, {i: root.get_submodule(name) for i, name in enumerate(units) if name not in absent})


def _context(groups: Groups, device: torch.device) -> StageContext:
    context = StageContext(_step_random(groups, device))
    context.compiles, context.agree = groups.layout.compile, agreement(groups, device)
    return context


def _step_random(groups: Groups, device: torch.device) -> StepRandom:
    """Under sequence parallelism tensor-parallel ranks hold other tokens than each other between the tensor-parallel regions."""
    place = groups.coordinate.tensor_parallel if groups.layout.sequence_parallel else 0
    return StepRandom(device, has_peers(groups.layout), place)


def _owners(groups: Groups) -> tuple[int, ...]:
    """The pipeline rank of every stage."""
    layout = groups.layout
    return find_schedule(layout.schedule).stage_ranks(layout.pipeline_parallel_size, layout.stages_per_rank)


def _cut(root: nn.Module, cut: StageCut, groups: Groups, context: StageContext) -> set[str]:
    if groups.layout.num_stages == 1:
        return set()
    if not groups.layout.compile:  # hooks would make layers compile anew
        context.inner = InnerValues(root, cut.units, context.refuse)
    mine = groups.coordinate.pipeline_parallel
    kept = {unit for unit in range(len(cut.units)) if cut.rank_of(unit) == mine}
    return cut_model(root, cut.units, kept, context)


def _slice(
    root: nn.Module, plan: ParallelPlan, groups: Groups, absent: set[str], context: StageContext
) -> Mapping[str, TensorShard]:
    layout = groups.layout
    if groups.tensor is None:
        return {}
    return apply_tensor_parallel(
        root,
        plan,
        group=groups.tensor,
        rank=groups.coordinate.tensor_parallel,
        size=layout.tensor_parallel_size,
        sequence_parallel=layout.sequence_parallel,
        absent=absent,
        refused=None if layout.compile else lambda: None if context.look is None else context.look.refused,
    )


def _split_sequences(
    root: nn.Module, plan: ParallelPlan, groups: Groups, absent: set[str], recomputed: Sequence[str], context: StageContext
) -> None:
    """Context parallelism: cuts sequences at the model's units, where the layout says so."""
    layout = groups.layout
    if groups.context is None:
        return
    tensor_group = groups.tensor if layout.sequence_parallel else None
    region = ContextRegion(groups.context, groups.coordinate.context_parallel, layout.context_parallel_size, tensor_group)
    region.in_forward = lambda: context.now is not None
    found = find_units_present(root, plan.units or plan.shard_units, set())
    outermost = [name for name in found if not any(name.startswith(f"{other}.") for other in found)]
    styled = [name for name, _ in root.named_modules() if any(matches(pattern, name) for pattern in plan.tensor)]
    check_units(root, outermost, styled if groups.tensor is not None else [], region)
    put_context_gates(root, [name for name in outermost if name not in absent], recomputed, region, plan.sequence_dims)
    context.leaving, context.arriving = close_for_sending, partial(open_received, region)


def _recomputed(root: nn.Module, plan: ParallelPlan, absent: set[str], kind: str) -> list[str]:
    """Names of the units that are recomputed in backward."""
    if kind == "none":
        return []
    patterns = _layers(plan)
    if not patterns:
        raise ModelError(
            message(
                "activation_checkpoint",
                kind,
                f"{type(root).__name__} does not say what to recompute",
                "",
                "Give it parallel_plan() with units or checkpoint_units, or set none",
            )
        )
    return find_units_present(root, patterns, absent)


def _rewrap(root: nn.Module, recomputed: Sequence[str], compiled: Sequence[str], kind: str) -> None:
    """Recomputation and compilation of units; `selective` looks at operations, so it must be inside of what is compiled."""
    inner = [root.get_submodule(name) for name in compiled]
    outer = [root.get_submodule(name) for name in recomputed]
    if kind == "selective":
        checkpoint_units(outer, kind)
        compile_units(inner, whole=True)
    else:
        compile_units(inner, whole=False)
        checkpoint_units(outer, kind)


def _compiled(root: nn.Module, plan: ParallelPlan, absent: set[str]) -> list[str]:
    """Names of the units that are compiled: those that would be recomputed, else all."""
    patterns = _layers(plan) or plan.units
    if not patterns:
        rule = f"{type(root).__name__} does not say what its layers are"
        numbers = f"its children are {', '.join(name for name, _ in root.named_children())}"
        advice = "Give it parallel_plan() with units or checkpoint_units, or set false"
        raise ModelError(message("compile", True, rule, numbers, advice))
    return find_units_present(root, patterns, absent)


def _layers(plan: ParallelPlan) -> tuple[str, ...]:
    """Patterns of what the model repeats."""
    return plan.checkpoint_units or tuple(unit for unit in plan.units if "*" in unit)


def _to_device(module: nn.Module, device: torch.device) -> None:
    """Moves what is real to `device` and leaves the rest on meta."""
    for each in module.modules():
        for store in (each._parameters, each._buffers):
            for value in store.values():
                if value is not None and not value.is_meta and value.device != device:
                    value.data = value.data.to(device)


def _shard(
    root: nn.Module,
    plan: ParallelPlan,
    units: list[str],
    absent: set[str],
    slots: list[Slot],
    groups: Groups,
    device: torch.device,
) -> Sharding:
    part = find("parallel.sharding", groups.layout.sharding, "sharding")
    names = find_units_present(root, plan.shard_units, absent) if plan.shard_units else [u for u in units if u not in absent]
    sharding: Sharding = part.create(slots, groups, device, [root.get_submodule(name) for name in names])
    return sharding


def find_units_present(root: nn.Module, patterns: Sequence[str], absent: set[str]) -> list[str]:
    """Names that match one of the patterns, on this rank; never the root, which `*` does not mean."""
    names = [name for name, _ in root.named_modules() if name and any(matches(pattern, name) for pattern in patterns)]
    return [name for name in names if name not in absent]


def _stage_slots(root: nn.Module, made: Parallelized) -> dict[int, list[Slot]]:
    """The slots of each stage of this rank; what belongs to no unit counts to every stage."""
    where: dict[int, int] = {}
    for stage, (start, stop) in enumerate(zip(made.bounds, made.bounds[1:], strict=False)):
        for name in made.units[start:stop]:
            where.update({id(each): stage for each in root.get_submodule(name).modules()})
    homes = [(slot, {where.get(id(module)) for module, _ in slot.places}) for slot in made.slots]
    stages = range(max(len(made.bounds) - 1, 1))
    return {stage: [slot for slot, home in homes if home & {None, stage}] for stage in stages}
