"""Bytes a parameter costs, by how it is trained: which copies are held, in which type, and what travels."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_strategy.errors import ConfigError, did_you_mean, message


@dataclass(frozen=True)
class Numerics:
    """Bytes of one parameter, by use.

    Attributes:
        name: how it is called in tables.
        parameter_bytes: the weight that the optimizer updates, or its 16-bit image where there is a master.
        gradient_bytes: the gradient as it is accumulated.
        master_bytes: an fp32 copy that the optimizer updates instead; 0: none.
        moment_bytes: the optimizer's states (Adam: two).
        cast_bytes: a 16-bit copy made for the products and kept through the step; 0: none.
        compute_bytes: one element of an activation inside a block.
        residual_bytes: one element of what goes from block to block, and of what norms take and give; 0: the same. Under autocast
            norms and sums stay in fp32, and each product casts its input itself.
        gather_bytes: a weight when it travels (ZeRO).
        reduce_bytes: a gradient when it travels.
        fp8: the products of the blocks are computed in 8 bit.
    """

    name: str
    parameter_bytes: float
    gradient_bytes: float
    master_bytes: float
    moment_bytes: float
    cast_bytes: float = 0.0
    compute_bytes: float = 2.0
    residual_bytes: float = 0.0
    gather_bytes: float = 2.0
    reduce_bytes: float = 2.0
    fp8: bool = False

    @property
    def stream_bytes(self) -> float:
        """One element between blocks."""
        return self.residual_bytes or self.compute_bytes

    @property
    def state_bytes(self) -> float:
        """Weight, gradient, master and moments of one parameter, without sharding.

        7B under the three usual ways: 112 GB mixed, 126 GB with gradients in fp32, 56 GB with all states in 16 bit.

        >>> [7 * NUMERICS[name].state_bytes for name in ("mixed", "mixed_fp32_gradients", "pure_16")]
        [112, 126, 56]
        """
        return self.parameter_bytes + self.gradient_bytes + self.master_bytes + self.moment_bytes


NUMERICS = {
    each.name: each
    for each in (
        # 2 + 2 + 12: arXiv:1910.02054 section 3.1
        Numerics("mixed", 2, 2, 4, 8),
        # 2 + 4 + 12: Megatron-LM d98e8a64 megatron/training/theoretical_memory_usage.py
        Numerics("mixed_fp32_gradients", 2, 4, 4, 8, reduce_bytes=4),
        # 2 + 2 + 4: weights, gradients and Adam states in 16 bit
        Numerics("pure_16", 2, 2, 0, 4),
        # 4 + 4 + 8, products in fp32
        Numerics("fp32", 4, 4, 0, 8, compute_bytes=4, gather_bytes=4, reduce_bytes=4),
        # 4 + 4 + 8 with 16-bit casts for the products (torch.autocast keeps them until the step ends)
        Numerics("autocast", 4, 4, 0, 8, cast_bytes=2, residual_bytes=4, gather_bytes=4, reduce_bytes=4),
        # FSDP2's mixed precision: fp32 shards, gathered in 16 bit, gradients reduced in fp32
        Numerics("sharded_mixed", 4, 4, 0, 8, gather_bytes=2, reduce_bytes=4),
    )
}

_LIGHTNING = {"32-true": "fp32", "bf16-true": "pure_16", "16-true": "pure_16", "bf16-mixed": "autocast", "16-mixed": "autocast"}


def numerics_of(precision: str, optimizer: str = "adamw", momentum: float = 0.0) -> Numerics:
    """The numerics of Lightning's `precision` and an optimizer's name.

    >>> numerics_of("bf16-true").state_bytes, numerics_of("bf16-mixed").state_bytes, numerics_of("32-true", "sgd").state_bytes
    (8, 16, 8)

    Raises:
        ConfigError: the precision is not one of Lightning's.
    """
    if precision not in _LIGHTNING:
        raise ConfigError(message("precision", precision, "it is not known", "", did_you_mean(precision, _LIGHTNING)))
    found = NUMERICS[_LIGHTNING[precision]]
    if optimizer.lower() != "sgd":
        return found
    moments = found.parameter_bytes if momentum else 0
    return Numerics(**{**vars(found), "moment_bytes": moments})
