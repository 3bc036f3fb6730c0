"""How a software stack executes a layer: what it fuses, what it keeps, what it overlaps. One fitted efficiency each.

Passes are reads and writes of one activation-sized tensor, counted by walking through a layer's kernels; they turn into
seconds by the GPU's memory rate. Only `efficiency` is fitted (`benchmarks/plan_accuracy.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hybrid_strategy.errors import ConfigError, did_you_mean, message

SCORE_LAUNCHES = 10
"""Kernels (and autograd nodes) by which a layer's forward pass is longer where scores are written: two batched products and what
puts their operands in order, mask and soft-max, dropout three times."""


@dataclass(frozen=True)
class Stack:
    """A software stack.

    Attributes:
        name: how it is asked for.
        efficiency: share of the kernels' own rates that a training step reaches; fitted, one number a stack.
        flash_attention: scores are never written to memory.
        dropout: dropout after attention and MLP (and on the scores, where they are written).
        fused_norms: a norm is one kernel that reads and writes once; else a composite that computes in fp32.
        fused_activations: bias, activation, product, residual are one kernel.
        recomputes_cheap: the product of a gated MLP is computed again in the backward pass rather than kept.
        selective: what `selective` recomputes: `attention` (the scores, arXiv:2205.05198), `operators` (every second product and
            what lies between) or `products` (only what lies between products).
        launches: kernels (and autograd nodes) of one layer's forward pass.
        loss_bytes: bytes moved per element of the logits, forward and backward.
        logits_bytes: bytes held per element of the logits at the peak.
        split_logits_bytes: bytes held on top of that where the vocabulary is split over tensor-parallel ranks.
        optimizer_passes: times that clipping and update go over states and gradients (1: one fused kernel).
        fp8_cast_bytes: bytes moved to find the range of an operand's element and cast it to 8 bit.
        fused_casts: weights are cast to 8 bit once a step, not once a micro-batch.
        tensor_overlap_fraction: share of the tensor-parallel messages' time that runs beside the products.
        copies_gathered: a gathered sequence is put in order by a copy (dimension 1 of (batch, sequence, hidden)).
        overlap_gather: ZeRO-3 gathers and scatters run beside the computation.
        overlap_reduce: the gradient reduction of ddp, zero1 and zero2 runs beside the last backward pass.
        overlap_send: pipeline messages run beside the computation.
        plain_sharding: ZeRO as simple as it can be: gradients stay whole until the end of the step except under `zero3`, one
            unit is gathered at a time, and what is packed for messages comes after the activations.
        scatter_sends: a pipeline message is cut over the tensor-parallel ranks even without sequence parallelism.
        pads_vocabulary: the vocabulary is filled up to where products are fast.
    """

    name: str
    efficiency: float = 1.0
    flash_attention: bool = True
    dropout: bool = False
    fused_norms: bool = False
    fused_activations: bool = False
    recomputes_cheap: bool = False
    selective: str = "operators"
    launches: int = 60
    loss_bytes: float = 30.0
    logits_bytes: float = 14.0
    split_logits_bytes: float = 6.0
    optimizer_passes: float = 2.0
    fp8_cast_bytes: float = 5.0
    fused_casts: bool = False
    tensor_overlap_fraction: float = 0.0
    copies_gathered: bool = True
    overlap_gather: bool = True
    overlap_reduce: bool = False
    overlap_send: bool = False
    scatter_sends: bool = False
    plain_sharding: bool = False
    pads_vocabulary: bool = False

    def classic(self) -> Stack:
        """The same stack as it was before 2023: scores written to memory, dropout, nothing overlapped."""
        return replace(
            self,
            flash_attention=False,
            dropout=True,
            launches=self.launches + SCORE_LAUNCHES,
            tensor_overlap_fraction=0.0,
            overlap_reduce=False,
            overlap_send=False,
        )


FUSED = Stack(
    "fused",
    efficiency=1.06,
    fused_norms=True,
    fused_activations=True,
    selective="attention",
    launches=40,
    loss_bytes=40.0,
    logits_bytes=10.0,
    split_logits_bytes=0.0,
    optimizer_passes=1.0,
    fp8_cast_bytes=2.0,
    fused_casts=True,
    tensor_overlap_fraction=0.5,
    copies_gathered=False,
    overlap_reduce=True,
    overlap_send=True,
    scatter_sends=True,
    pads_vocabulary=True,
)
"""Megatron-LM and its kin: hand-fused kernels."""

EAGER = Stack("eager")
"""PyTorch as it stands, FSDP or DTensor."""

COMPILED = Stack(
    "compiled",
    efficiency=1.12,
    fused_norms=True,
    fused_activations=True,
    recomputes_cheap=True,
    launches=25,
    loss_bytes=16.0,
    logits_bytes=12.0,
)
"""PyTorch with layers under `torch.compile`."""

ENGINE = replace(
    EAGER,
    name="engine",
    selective="products",
    overlap_gather=False,
    overlap_send=True,
    plain_sharding=True,
)
"""This package's own engine: eager kernels, messages of a micro-batch beside the next, the reduction after the last backward."""

COMPILED_ENGINE = replace(
    ENGINE,
    name="compiled engine",
    efficiency=COMPILED.efficiency,
    fused_norms=True,
    fused_activations=True,
    recomputes_cheap=True,
    launches=COMPILED.launches,
)
"""The same with `compile=True`: layers are as fast as `compiled` was fitted to be, the loss and all the rest stay as they are."""

STACKS = {stack.name: stack for stack in (ENGINE, COMPILED_ENGINE, EAGER, COMPILED, FUSED)}


def stack_for(compiled: bool, stack: Stack) -> Stack:
    """What runs a layout whose layers are compiled, or not, where `stack` is what runs the others."""
    return COMPILED_ENGINE if compiled and stack is ENGINE else stack


def find_stack(name: str) -> Stack:
    """The stack called `name`.

    Raises:
        ConfigError: there is none.
    """
    if name not in STACKS:
        raise ConfigError(message("stack", name, "it is not known", "", did_you_mean(name, STACKS)))
    return STACKS[name]
