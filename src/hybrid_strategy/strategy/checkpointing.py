"""What the strategy saves and loads: this rank's pieces, Lightning's own state, random states, the data position."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from hybrid_strategy.checkpoint.certificate import Certificate
from hybrid_strategy.checkpoint.content import CheckpointContent, SmallState
from hybrid_strategy.checkpoint.folder import resolve
from hybrid_strategy.checkpoint.importing import ImportOptions, import_single_file, read_single_file
from hybrid_strategy.checkpoint.loading import LoadOptions, load_checkpoint, refuse_weights, saved_names
from hybrid_strategy.checkpoint.manifest import read_manifest
from hybrid_strategy.checkpoint.pieces import MODEL, TRAINED, Piece, model_key, section, trained_key
from hybrid_strategy.checkpoint.verify import read_meta
from hybrid_strategy.distributed.groups import Groups
from hybrid_strategy.errors import CheckpointError, message
from hybrid_strategy.parallel.parameters import Slot
from hybrid_strategy.parallelize import Parallelized
from hybrid_strategy.planning.layouts import find_schedule
from hybrid_strategy.strategy._lightning_loops import Standing, counters_for, logged_values, standing_of
from hybrid_strategy.strategy.account import SCHEDULES, WANDB_ID, account_of, overruled_callbacks, schedule_classes, wandb_id
from hybrid_strategy.strategy.averages import ShardedAverage
from hybrid_strategy.strategy.data_position import Position, positions_of
from hybrid_strategy.strategy.initial_weights import Receiver, describe_model, fill_weights
from hybrid_strategy.strategy.optimizer_states import (
    allocate,
    fit_to_groups,
    group_settings,
    new_parameters,
    of_another_class,
    overruled_schedules,
    overruled_settings,
    refuse_another_class,
    restore_empty_groups,
    restore_values,
    restored_settings,
    state_pieces,
)
from hybrid_strategy.strategy.own_loading import has_own_loading
from hybrid_strategy.strategy.own_states import (
    ADDED,
    Edits,
    further_names,
    given_state,
    metric_states,
    modules_with_extra_state,
    persistent_buffers,
    restore_metrics,
)
from hybrid_strategy.strategy.random_state import RandomState, TakenRandomState, coordinate_key
from hybrid_strategy.strategy.saved_weights import SavedWeights, fill, looks_at_weights

T = TypeVar("T")
EXTRA, ALIASES = "extra_state", "aliases"
"""Section of what modules keep beside their buffers; key of the further names of shared parameters in the meta data."""

RUN_STATE = "hybrid_strategy"
"""Key of our own part of the state beside Lightning's."""


@dataclass
class Loaded:
    """What a load brought.

    Attributes:
        state: Lightning's own, its loops' counters rewritten.
        standing: where training goes on; None for a checkpoint that was not made in training.
        positions: of the training loaders.
        random_state: by logical coordinate.
        logged: values that callbacks and schedulers watch.
        weights: by name, where the module looks at them before they are loaded; they are not loaded yet then.
    """

    state: dict[str, Any]
    certificate: Certificate
    standing: Standing | None = None
    positions: list[Position] = field(default_factory=list)
    random_state: dict[str, RandomState] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)
    weights: dict[str, Any] | None = None


@dataclass
class StateKeeper:
    """Gathers and fills the state of one rank. Where there is an average of the weights, it is saved as the model's weights."""

    module: pl.LightningModule
    made: Parallelized
    groups: Groups
    optimizers: list[Optimizer] = field(default_factory=list)
    average: ShardedAverage | None = None

    def weight_pieces(self) -> dict[str, Piece]:
        """Weights and persistent buffers of this rank, by key."""
        sharding = self.made.sharding
        pieces = {
            model_key(slot.name): Piece(slot.shard_spec, sharding.optimizer_parameter(slot).data) for slot in self.made.slots
        }
        return pieces | self._buffer_pieces()

    def _buffer_pieces(self) -> dict[str, Piece]:
        return {model_key(name): Piece.whole(name, buffer) for name, buffer in persistent_buffers(self.module)}

    def _all_weight_pieces(self) -> dict[str, Piece]:
        """Weights and buffers; with an average, those in training go to a section of their own."""
        pieces = self.weight_pieces()
        if self.average is None:
            return pieces
        beside = self.average.pieces()
        trained, averaged = (beside, pieces) if self.average.swapped else (pieces, beside)
        moved = {trained_key(key.partition(".")[2]): trained[key] for key in beside}
        return {**pieces, **moved, **{key: averaged[key] for key in beside}}

    def _extra_states(self) -> dict[str, Any]:
        """What modules of which this rank saves the buffers keep beside them (`get_extra_state`), by key."""
        modules = dict(modules_with_extra_state(self.module))
        return {f"{EXTRA}.{name}": modules[name].get_extra_state() for name in self._owned(modules)}

    def _restore_extra_states(self, saved: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Gives modules their extra state back; returns (what, why) of those without one."""
        gaps = []
        for name, module in modules_with_extra_state(self.module):
            if f"{EXTRA}.{name}" in saved:
                module.set_extra_state(saved[f"{EXTRA}.{name}"])
            else:
                gaps.append((f"extra state of {name}", "it is not in the checkpoint"))
        return gaps

    def named_parameters(self) -> dict[nn.Parameter, Slot]:
        """The slot of each parameter that an optimizer may hold."""
        sharding = self.made.sharding
        return {sharding.optimizer_parameter(slot): slot for slot in self.made.slots}

    def given_state(self) -> dict[str, Any]:
        """The state dict of a checkpoint as hooks see it: this rank's pieces by the un-split model's names."""
        return given_state(self.module, self._pieces_by_name(), self.made.shapes)

    def _pieces_by_name(self) -> dict[str, Tensor]:
        return {piece.spec.name: piece.tensor for piece in self.weight_pieces().values()}

    def _edits(self, given: Mapping[str, Any], final: Mapping[str, Any]) -> Edits:
        """Raises:
        CheckpointError: a hook has changed weights that are not what is saved, since the run averages them.
        """
        edits = Edits.between(self._pieces_by_name(), given, final)
        if self.average is not None and not edits.only_removed:
            rule = "a hook has renamed or exchanged weights, and those that are saved in their place are averages"
            raise CheckpointError(message("state_dict", "edited", rule, "", "Leave out the weight average, or the edits"))
        return edits

    @property
    def _sees_all_samples(self) -> bool:
        layout = self.groups.layout
        return layout.data_parallel_size * layout.context_parallel_size == 1

    def content(self, checkpoint: dict[str, Any], given: Mapping[str, Any], window: TakenRandomState | None) -> CheckpointContent:
        """All that this rank gives to a checkpoint.

        Args:
            checkpoint: what Lightning wants saved.
            given: its state dict before hooks saw it.
            window: the random state at the start of the accumulated batches at hand.
        """
        trainer = self.module.trainer
        state = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        standing = standing_of(trainer)
        positions = positions_of(trainer, standing)
        own: dict[str, Any] = {"standing": standing.to_dict(), "positions": positions, "logged": logged_values(trainer)}
        own["groups"] = group_settings(self.optimizers)
        tensors, replicated = self._all_weight_pieces(), dict[str, Any]()
        buffers = {name for name, _ in persistent_buffers(self.module)}
        others = {key(name) for name in buffers - self._owned(buffers) for key in (model_key, trained_key)}
        tensors = {key: piece for key, piece in tensors.items() if key not in others}
        edits = self._edits(given, checkpoint.get("state_dict", {}))
        tensors = edits.applied(tensors, self._pieces_by_name())
        if "optimizer_states" in checkpoint:
            pieces, replicated = state_pieces(self.optimizers, self.named_parameters())
            tensors.update(pieces)
        added = {**edits.added, **metric_states(self.module, self._owned, self._sees_all_samples)}
        replicated |= {f"{ADDED}.{name}": value for name, value in added.items()} | self._extra_states()
        random_state = window if standing.rewound and window is not None else TakenRandomState()
        return CheckpointContent(
            tensors=tensors,
            replicated=replicated,
            random_state={coordinate_key(self.groups.coordinate): random_state.plain()},
            state={**state, RUN_STATE: own if positions is not None else {}},
            plan={"layout": vars(self.groups.layout), "model": self._model()},
            meta={
                **_counts(checkpoint),
                "positions": positions,
                "score": _score(trainer),
                SCHEDULES: schedule_classes(trainer),
                WANDB_ID: wandb_id(trainer) if trainer.is_global_zero else None,
                ALIASES: further_names(self.module) if trainer.is_global_zero else {},
                "weights_only": "optimizer_states" not in checkpoint,
            },
        )

    def _model(self) -> dict[str, Any] | None:
        target = self.made.target
        return describe_model(self.module.get_submodule(target) if target else self.module, target)

    def _owned(self, names: Iterable[str]) -> set[str]:
        """Those of the buffers or modules that this rank saves: data-parallel ranks may have seen different samples, and what
        belongs to no unit is written to by the whole step on the last stage only.
        """
        if not self.groups.is_first_replica or self.groups.coordinate.tensor_parallel > 0:
            return set()
        layout, made = self.groups.layout, self.made
        owners = find_schedule(layout.schedule).stage_ranks(layout.pipeline_parallel_size, layout.stages_per_rank)
        prefix = f"{made.target}." if made.target else ""
        units = tuple(f"{prefix}{unit}." for unit in made.units)
        last = self.groups.coordinate.pipeline_parallel == owners[-1]
        return {name for name in names if last or f"{name}.".startswith(units)}

    def begin_with(self, path: str) -> Certificate:
        """Fills weights from files of another kind, or from the weights of a checkpoint.

        Raises:
            CheckpointError: on every rank: they cannot be read, or are of another model.
        """
        made = self.made
        receiver = Receiver(self.module, made.target, tuple(made.shapes), self.weight_pieces(), self.module.strict_loading)
        certificate = fill_weights(path, receiver)
        made.sharding.mark_changed()
        return certificate

    def load(self, path: Path, schedulers: Sequence[Any]) -> Loaded:
        """Fills weights and optimizer states from a checkpoint of any layout.

        Args:
            schedulers: the learning-rate schedulers of this rank.

        Raises:
            CheckpointError: on every rank: it is damaged, of another model, or holds too little for training to go on.
        """
        if path.is_file():
            return self._load_single_file(path)
        self._check_complete(path)
        named, saved = self.named_parameters(), saved_names(path)
        averaged = {key for key in saved if section(key) == TRAINED}
        deferred = looks_at_weights(self.module) and not averaged and self.average is None
        weights, instead = ({}, {}) if deferred else self._pieces_to_load(averaged)
        tensors = {**weights, **allocate(self.optimizers, named, saved)}
        loaded = load_checkpoint(path, tensors, LoadOptions(strict=self.module.strict_loading, instead=instead))
        self.made.sharding.mark_changed()
        if self.average is not None and not averaged:
            self.average.begin_with_weights()
        small = loaded.small
        changed = self._shared(of_another_class(self.optimizers, named, small.replicated))
        if self.module.strict_loading:
            refuse_another_class(str(path), changed)
        overruled = overruled_settings(self.optimizers, named, small.replicated)
        overruled += overruled_schedules(schedulers, small.state.get("lr_schedulers", ()))
        overruled = self._shared(overruled + overruled_callbacks(self.module.trainer, small.state.get("callbacks", {})))
        gaps = restore_values(self.optimizers, named, small.replicated)
        for name in new_parameters(self.optimizers, named, small.replicated):
            gaps.append((f"optimizer state of {name}", "no optimizer of the saved run had this parameter"))
        restore_empty_groups(self.optimizers, named, small.state.get(RUN_STATE, {}).get("groups", ()))
        added = {key.partition(".")[2]: value for key, value in small.replicated.items() if section(key) == ADDED}
        gaps += (
            self._averages(bool(averaged))
            + self._restore_extra_states(small.replicated)
            + restore_metrics(self.module, added, self._sees_all_samples)
        )
        if not deferred and has_own_loading(self.module):
            gaps.append(("what the module changes while it loads", "weights that are averaged are loaded as they are"))
        if not deferred:
            gaps += self._surplus(path, added)
        settings = len(set(self._shared(restored_settings(self.optimizers, named, small.replicated))))
        certificate = account_of(loaded.certificate, small, self.module.trainer, self.groups.layout, self._shared(gaps), settings)
        if overruled:
            certificate = certificate.with_restored("settings in place of this run's", "; ".join(overruled))
        found = _loaded(small, certificate, schedulers, len(self.optimizers))
        return _not_yet(found, SavedWeights(resolve(path), added)) if deferred else found

    def load_edited(self, loaded: Loaded, state: Mapping[str, Any]) -> Certificate:
        """Fills the weights from what the module's hooks have made of those of a checkpoint; collective.

        Args:
            loaded: what `load` brought.
            state: its state dict, as the hooks left it.

        Raises:
            CheckpointError: on every rank: a weight is missing or has no place, or has another shape.
        """
        certificate = fill(self.module, self.weight_pieces, state, loaded.certificate, self._shared)
        self.made.sharding.mark_changed()
        return certificate

    def _surplus(self, path: Path, added: Mapping[str, Any]) -> list[tuple[str, str]]:
        """What becomes of entries of the state dict that a hook had added and nobody takes back.

        Raises:
            CheckpointError: `strict_loading`, as for weights without a place.
        """
        if self.module.strict_loading:
            refuse_weights(path, [], sorted(added))
        return [(f"{name} of the state dict", "it has no place in the model") for name in added]

    def _pieces_to_load(self, averaged: Collection[str]) -> tuple[dict[str, Piece], dict[str, str]]:
        """The weights to fill, and the keys among them that stand for others: where the run averaged its weights and this one
        does not, training goes on with the weights that were trained, not with their average."""
        if not averaged:
            return self.weight_pieces(), {}
        pieces = self._all_weight_pieces()
        if self.average is not None or self.module.trainer.state.fn != TrainerFn.FITTING:
            return pieces, {}
        names = [key.partition(".")[2] for key in pieces if section(key) == MODEL]
        instead = {trained_key(name): model_key(name) for name in names if trained_key(name) in averaged}
        return {**{key: pieces.pop(other) for key, other in instead.items()}, **pieces}, instead

    def _averages(self, averaged: bool) -> list[tuple[str, str]]:
        """What becomes of a weight average that only one of the two runs has."""
        if averaged and self.average is None:
            return [("weight average", "this run has none; training goes on with the weights that were trained")]
        if not averaged and self.average is not None:
            return [("weight average", "the saved run had none; it begins with the weights as they are")]
        return []

    def _load_single_file(self, path: Path) -> Loaded:
        """The weights of a single-file Lightning checkpoint; what else it holds is not read into anything."""
        if self.module.trainer.state.fn == TrainerFn.FITTING:
            rule = "training cannot go on from a single file, whose optimizer states have numbers and no names"
            advice = "Set initial_weights to it to begin with its weights"
            raise CheckpointError(message("ckpt_path", str(path), rule, "", advice))
        if looks_at_weights(self.module):
            found = read_single_file(path)
            return Loaded({**found, "optimizer_states": []}, Certificate(str(path)), weights=found["state_dict"])
        options = ImportOptions(strict=self.module.strict_loading)
        rest, certificate = import_single_file(path, self.weight_pieces(), options)
        self.made.sharding.mark_changed()
        return Loaded({**rest, "state_dict": {}, "optimizer_states": []}, certificate)

    def _check_complete(self, path: Path) -> None:
        folder = resolve(path)
        read_manifest(folder)  # says what is wrong where there is no checkpoint at all
        if self.module.trainer.state.fn == TrainerFn.FITTING and read_meta(folder).get("weights_only"):
            rule, advice = "it holds weights only, so training cannot go on from it", "Set a checkpoint with optimizer states"
            raise CheckpointError(message("checkpoint", str(path), rule, "", advice))

    def _shared(self, found: list[T]) -> list[T]:
        """What all ranks together have found, on each of them."""
        if not dist.is_initialized():
            return found
        gathered: list[list[T] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, found)
        return sorted({one for each in gathered for one in each or []})  # type: ignore[type-var]


def _loaded(small: SmallState, certificate: Certificate, schedulers: Sequence[Any], num_optimizers: int) -> Loaded:
    state = dict(small.state)
    own: Mapping[str, Any] = state.pop(RUN_STATE, {})
    state |= {"state_dict": {}, "optimizer_states": [{} for _ in range(num_optimizers)]}
    if "lr_schedulers" in state:
        state["lr_schedulers"] = [fit_to_groups(*pair) for pair in zip(state["lr_schedulers"], schedulers, strict=False)]
    if not own:
        return Loaded(state, certificate, random_state=small.random_state)
    standing = Standing.of(own["standing"])
    loops = state["loops"]
    state["loops"] = {**loops, "fit_loop": counters_for(standing, loops["fit_loop"])}
    return Loaded(state, certificate, standing, own["positions"], small.random_state, own["logged"])


def _not_yet(loaded: Loaded, weights: SavedWeights) -> Loaded:
    """With the weights as they lie in the checkpoint, for the module to look at."""
    others = tuple(each for each in loaded.certificate.not_restored if each[0] != MODEL)
    certificate = replace(loaded.certificate, not_restored=others)
    return replace(loaded, state={**loaded.state, "state_dict": weights}, certificate=certificate, weights=weights)


def _counts(checkpoint: Mapping[str, Any]) -> dict[str, int]:
    return {"global_step": int(checkpoint.get("global_step", 0)), "epoch": int(checkpoint.get("epoch", 0))}


def _score(trainer: pl.Trainer) -> float | None:
    """What the first checkpoint callback watches."""
    score = getattr(trainer.checkpoint_callback, "current_score", None)
    return None if score is None else float(score)
