"""`HybridParallelStrategy`: what the user gives to the Trainer."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from hybrid_strategy.data.loader import mesh_dataloader
from hybrid_strategy.data.mesh_loader import MeshLoader
from hybrid_strategy.distributed.gradient_norm import total_norm
from hybrid_strategy.distributed.groups import build_groups
from hybrid_strategy.distributed.random_state import seed_rank
from hybrid_strategy.parallel.ghosts import leave_out_ghosts
from hybrid_strategy.parallel.stages import whole_model_shown
from hybrid_strategy.parallel.trees import sample_dims
from hybrid_strategy.parallelize import Parallelized, parallelize
from hybrid_strategy.planning.compiler import check_compiler
from hybrid_strategy.spec.layout import Layout
from hybrid_strategy.spec.parallel_plan import ParallelPlan
from hybrid_strategy.strategy import _lightning
from hybrid_strategy.strategy.automatic import decided
from hybrid_strategy.strategy.averages import ShardedAverage
from hybrid_strategy.strategy.checkpointing import StateKeeper
from hybrid_strategy.strategy.known_callbacks import adapt_callbacks, prepare_callbacks
from hybrid_strategy.strategy.made_before import MadeBefore, recall, remember
from hybrid_strategy.strategy.manual import ManualStep, check_manual_optimization
from hybrid_strategy.strategy.optimizer_check import check_optimizers
from hybrid_strategy.strategy.options import check_before_start, make_options, refuse_plugins
from hybrid_strategy.strategy.precision import adapt_precision
from hybrid_strategy.strategy.predictions import gather_predictions
from hybrid_strategy.strategy.run_seed import agree_on_seed, run_seed
from hybrid_strategy.strategy.step import StepEngine
from hybrid_strategy.strategy.steps import Steps, refuse_own_fetching
from hybrid_strategy.strategy.stopping import StopHooks
from hybrid_strategy.strategy.target import find_plan, find_target
from hybrid_strategy.strategy.whole_files import refuse_partial_files
from hybrid_strategy.strategy.workers import PatientWorker


class HybridParallelStrategy(StopHooks):
    """Trains any LightningModule, unmodified, under data, tensor, sequence, context and pipeline parallelism.

    The loader's batch is what one data-parallel rank consumes in one training step; it is cut into micro-batches along its
    first dimension, and the module's own step runs once a micro-batch.

    Args:
        data_parallel_size: copies of the model that see different samples; `"auto"` is what the other sizes leave.
        tensor_parallel_size: ranks that share every layer.
        pipeline_parallel_size: ranks among which the layers are divided.
        context_parallel_size: ranks that share every sequence, with attention over the whole of it.
        data_parallel_replicate_size: replicas of each shard group (hybrid sharding), with `sharding` other than `ddp`.
        sharding: `ddp`, `zero1`, `zero2` or `zero3` over the data-parallel ranks.
        sequence_parallel: split activations between tensor-parallel regions along the sequence.
        schedule: name of the pipeline schedule, as torch names them: `GPipe`, `1F1B`, `Interleaved1F1B`, ...
        stages_per_rank: stages that one pipeline rank holds; default: what the schedule needs.
        num_microbatches: micro-batches that a batch is cut into; default 1, or enough to fill the pipeline.
        micro_batch_size: rows of a micro-batch, instead of their number.
        stage_cuts: index of the first unit of every stage but the first; default: balanced by parameters.
        activation_checkpoint: `none`, `selective` or `full` recomputation in backward.
        compile: give each layer (what `activation_checkpoint` would recompute) to `torch.compile`.
        module: name of the submodule to parallelise; default: `model`, else the child with the most parameters.
        parallel_plan: what the submodule tells of itself, where it has no `parallel_plan()` of its own.
        process_group_backend: default: `nccl` on GPUs, `gloo` on CPUs.
        timeout: seconds (or a timedelta) after which a collective that does not end is an error.
        seed: of first values and of the order of samples; default: that of `seed_everything`, else 0.
        reduce_dtype: `float32` or `bfloat16`, in which gradients are summed over data-parallel ranks; default: their own type.
        initial_weights: what the weights are when training begins: a Hugging Face folder or file of safetensors, a single-file
            Lightning checkpoint, or a checkpoint folder of any layout; default: values drawn by `seed`.
        asynchronous_checkpoint: write checkpoints while training goes on, from a copy of the state in host memory.
        checkpoint_when_busy: `wait` or `skip`: what a checkpoint does that comes while the last one is still being written.
        checkpoint_error: `raise` or `warn`: whether a checkpoint that cannot be written ends the run.

    Raises:
        ConfigError: the settings exclude each other, or a name is not known.
    """

    materialises_meta = True
    """A module may build its parameters on the meta device in `configure_model`."""

    def __init__(
        self,
        data_parallel_size: int | str = "auto",
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        context_parallel_size: int = 1,
        data_parallel_replicate_size: int = 1,
        sharding: str = "ddp",
        sequence_parallel: bool = False,
        schedule: str = "1F1B",
        stages_per_rank: int | None = None,
        num_microbatches: int | None = None,
        micro_batch_size: int | None = None,
        stage_cuts: Sequence[int] | None = None,
        activation_checkpoint: str = "none",
        compile: bool = False,
        module: str | None = None,
        parallel_plan: ParallelPlan | Mapping[str, Any] | None = None,
        process_group_backend: str | None = None,
        timeout: float | timedelta = 1800.0,
        seed: int | None = None,
        reduce_dtype: str | None = None,
        initial_weights: str | None = None,
        asynchronous_checkpoint: bool = False,
        checkpoint_when_busy: str = "wait",
        checkpoint_error: str = "raise",
        *,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        self.options = make_options(
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            context_parallel_size=context_parallel_size,
            data_parallel_replicate_size=data_parallel_replicate_size,
            sharding=sharding,
            sequence_parallel=sequence_parallel,
            schedule=schedule,
            stages_per_rank=stages_per_rank,
            num_microbatches=num_microbatches,
            micro_batch_size=micro_batch_size,
            stage_cuts=stage_cuts,
            activation_checkpoint=activation_checkpoint,
            compile=compile,
            module=module,
            parallel_plan=parallel_plan,
            process_group_backend=process_group_backend,
            timeout=timeout,
            seed=seed,
            reduce_dtype=reduce_dtype,
            initial_weights=initial_weights,
            asynchronous_checkpoint=asynchronous_checkpoint,
            checkpoint_when_busy=checkpoint_when_busy,
            checkpoint_error=checkpoint_error,
        )
        self.automatic = False
        self._layout: Layout | None = None
        self._made: Parallelized | None = None
        self._engine: StepEngine | None = None
        self._made_of: pl.LightningModule | None = None
        self._average: ShardedAverage | None = None

    # ------------------------------------------------------------------------------------------- ranks and devices

    @property
    def layout(self) -> Layout:
        """The layout of this run, known once the number of processes is."""
        if self._layout is None:
            self._layout = self.options.layout(self.num_nodes * self.num_processes)
        return self._layout

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh, with the axes `pipeline_parallel`, `data_parallel` and `tensor_parallel` among others."""
        return self.groups.mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Samples are divided over data-parallel ranks only: peers along the other axes read the same ones."""
        coordinate = self.layout.coordinate(self.global_rank)
        return {"num_replicas": self.layout.data_parallel_size, "rank": coordinate.data_parallel}

    def _configure_launcher(self) -> None:
        """Checks the layout before any process starts."""
        environment = self.cluster_environment
        assert environment is not None  # set by the Trainer before
        self._layout = None
        check_before_start(self.options, self.root_device.type)
        refuse_plugins(self.layout, self._layer_sync, self._checkpoint_io)
        if self.layout.compile:
            check_compiler(self.root_device.type)
        if not environment.creates_processes_externally and self.num_processes * self.num_nodes > 1:
            self._launcher = _lightning.make_script_launcher(environment, self.num_processes, self.num_nodes)

    # ---------------------------------------------------------------------------------------------------- set-up

    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        assert self.cluster_environment is not None  # set by the Trainer before
        backend = self.options.process_group_backend or _lightning.backend_for(self.root_device)
        _lightning.init_process_group(self.cluster_environment, backend, self.options.timeout, self.root_device)
        seed = agree_on_seed(self.options.seed, self.global_rank, self.broadcast)
        self.options = replace(self.options, seed=seed)
        _lightning.reset_seed()
        if self.automatic and self._groups is None and self.lightning_module is not None:
            self.options, self._layout = decided(self, self.options, self.lightning_module), None
        if self.lightning_module is not None:
            prepare_callbacks(self.lightning_module.trainer, self.layout)
        if self._groups is None:
            self._groups = build_groups(self.layout, self.root_device)
        if self.lightning_module is not None:
            _lightning.attach_mesh(self.lightning_module, self.device_mesh)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None  # set by the Trainer before
        self.accelerator.setup(trainer)
        _lightning.leave_samplers_alone(trainer)
        module = self._user_module()
        refuse_own_fetching(module)
        if self._made_of is not module:
            before = recall(module, self.layout, self.options)
            self._parallelize(module) if before is None else self._go_on_with(module, before)
        dtype = self.options.reduce_dtype
        self.made.sharding.reduce_dtype = None if dtype is None else getattr(torch, dtype)
        self.engine.attach(trainer, self.options.timeout, self.meet_to_go_on)
        self.take_signals(trainer)
        self._average = adapt_callbacks(trainer, module, self.made)
        self.model = module
        if trainer.state.fn == TrainerFn.FITTING:
            check_manual_optimization(module, self.layout, self.options)
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        adapt_precision(trainer, self.owned_gradients, self.root_device)
        self.barrier()

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Calls `configure_optimizers` before the eyes of the whole model, so that all ranks make the same groups."""
        with whole_model_shown(self._user_module()):
            super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            leave_out_ghosts(optimizer)
        check_optimizers(self.optimizers, self.layout, self.made.shapes)

    def _parallelize(self, module: pl.LightningModule) -> None:
        self.precision_plugin.convert_module(module)  # in place; what `configure_model` built is of this type already
        target = find_target(module, self.options.module)
        plan = find_plan(module, target, self.options.parallel_plan)
        self._made = parallelize(
            module,
            target,
            plan,
            self.groups,
            self.root_device,
            seed=run_seed(self.options.seed),
            stage_cuts=self.options.stage_cuts,
        )
        refuse_partial_files(module, self.layout)
        if self.options.initial_weights is not None:
            certificate = StateKeeper(module, self._made, self.groups).begin_with(self.options.initial_weights)
            _lightning.rank_zero_info("\n".join(certificate.lines()))
        seed_rank(self.layout, self.groups.coordinate, run_seed(self.options.seed), self.root_device)
        remember(module, self._made, self.groups, self.options.stage_cuts)
        self._make_engine(module, plan)

    def _go_on_with(self, module: pl.LightningModule, before: MadeBefore) -> None:
        """The module was parallelised by an earlier Trainer of this process."""
        self._made, self._groups = before.made, before.groups
        self._make_engine(module, find_plan(module, before.made.target, self.options.parallel_plan))

    def _make_engine(self, module: pl.LightningModule, plan: ParallelPlan) -> None:
        size = self.layout.pipeline_parallel_size
        self._engine = StepEngine(
            module,
            self.made,
            self.groups,
            lambda rows: self.options.microbatches_of(rows, size),
            {**plan.batch_dims, **getattr(module, "batch_dims", {})},
            self.root_device,
        )
        self._manual_step = ManualStep(self._engine, self.made)
        self._made_of = module

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        with torch.device("meta") if empty_init else torch.device("cpu"), self.precision_plugin.tensor_init_context():
            yield

    def model_to_device(self) -> None:
        """Parameters are put on their device when they are parallelised."""

    def process_dataloader(self, dataloader: object) -> object:
        """Gives each data-parallel rank its own samples, and peers along the other axes the same ones."""
        place = self.distributed_sampler_kwargs
        mine = mesh_dataloader(dataloader, place["num_replicas"], place["rank"], seed=run_seed(self.options.seed))
        if not isinstance(mine, MeshLoader):  # an iterable of the user's own: one data-parallel rank may read it
            return mine
        self.place_data(mine.mesh)
        if mine.num_workers > 0 and not isinstance(mine.worker_init_fn, PatientWorker):
            mine.worker_init_fn = PatientWorker(mine.worker_init_fn)
        mine.learn_dims(sample_dims)
        return mine

    # ------------------------------------------------------------------------------------------------------ steps

    @property
    def engine(self) -> StepEngine:
        """Plays the steps; known after `setup`."""
        if self._engine is None:
            raise RuntimeError("the step engine is made in setup, which has not run yet")
        return self._engine

    @property
    def steps(self) -> Steps:
        """Lightning's calls of the user's steps."""
        return Steps(self._user_module(), self.engine, self.precision_plugin)

    @property
    def made(self) -> Parallelized:
        """What `parallelize` made of the module; known after `setup`."""
        if self._made is None:
            raise RuntimeError("the module is parallelised in setup, which has not run yet")
        return self._made

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        self.engine.peers.share_numbers()
        self.engine.peers.check_samples(_lightning.stage_of(self._user_module().trainer), batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        module = self._user_module()
        if module.automatic_optimization:
            result: STEP_OUTPUT = self.steps.train(args, kwargs)
        else:
            result = self.steps.train_by_hand(self._manual_step, args, kwargs)
        return result

    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        result: STEP_OUTPUT = self.steps.evaluate("validate", args, kwargs)
        return result

    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        result: STEP_OUTPUT = self.steps.evaluate("test", args, kwargs)
        return result

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.steps.evaluate("predict", args, kwargs)

    def on_predict_end(self) -> None:
        gather_predictions(self._user_module().trainer, self.groups)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        def run() -> Tensor:
            return super(HybridParallelStrategy, self).backward(closure_loss, optimizer, *args, **kwargs)

        return run() if self._user_module().automatic_optimization else self._manual_step.backward(closure_loss, run)

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._user_module().automatic_optimization:
            self.made.sharding.mark_changed()
            self.engine.router.before_step_ends()
        else:
            self._manual_step.stepped()
        return result

    def owned_gradients(self, optimizer: Optimizer | None = None) -> list[Tensor]:
        """Gradients of the pieces that this rank counts in a norm: of all, or of those that `optimizer` updates."""
        held = [self.made.sharding.optimizer_parameter(slot) for slot in self.made.slots if slot.shard_spec.owner]
        if optimizer is not None:
            own = {id(each) for group in optimizer.param_groups for each in group["params"]}
            held = [each for each in held if id(each) in own]
        return [each.grad for each in held if each.grad is not None and each.grad.numel()]

    def gradient_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of the whole model's gradients, for a hook that wants to see it; a collective of all ranks."""
        return total_norm(self.owned_gradients(), norm_type, self.root_device)

    # -------------------------------------------------------------------------------------------------- the end

    def on_exception(self, exception: BaseException) -> None:
        if self._engine is not None:
            self._engine.whereabouts.add_to(exception, self.options.timeout)

    def teardown(self) -> None:
        assert self.cluster_environment is not None  # set by the Trainer before
        assert self.accelerator is not None
        if self._engine is not None:
            self._engine.release()
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.finish_checkpoints()
