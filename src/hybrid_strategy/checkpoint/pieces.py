"""What a rank gives to a checkpoint or fills from one: a block of a tensor and where it lies in the whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from hybrid_strategy.errors import CheckpointError, message
from hybrid_strategy.spec.shard import ShardSpec

MODEL, OPTIMIZER, TRAINED = "model", "optimizer", "trained"
"""Sections of a checkpoint. Where the run averaged its weights, `model` holds the average and `trained` what is trained."""


@dataclass(frozen=True)
class Piece:
    """This rank's block of one saved tensor.

    Attributes:
        spec: which block of which whole tensor.
        tensor: the values, of shape `spec.sizes`; filled in place by a load. On any device.

    Raises:
        CheckpointError: the tensor's shape is not the block's.
    """

    spec: ShardSpec
    tensor: Tensor

    def __post_init__(self) -> None:
        if tuple(self.tensor.shape) != self.spec.sizes:
            raise CheckpointError(
                message(self.spec.name, tuple(self.tensor.shape), f"the block is declared as {self.spec.sizes}", "", "")
            )

    @staticmethod
    def whole(name: str, tensor: Tensor, owner: bool = True) -> Piece:
        """A tensor that is not split."""
        return Piece(ShardSpec.whole(name, tuple(tensor.shape), owner), tensor)

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def empty_share(self) -> bool:
        """This rank holds nothing of a tensor that has something in it."""
        return self.tensor.numel() == 0 and 0 not in self.spec.full_shape


def model_key(name: str) -> str:
    """The key of a weight or buffer: `model.<name in the un-split model>`."""
    return f"{MODEL}.{name}"


def trained_key(name: str) -> str:
    """The key of a weight or buffer in training beside its average."""
    return f"{TRAINED}.{name}"


def optimizer_key(name: str, state: str) -> str:
    """The key of a parameter's optimizer state such as `exp_avg`: `optimizer.<name>.<state>`."""
    return f"{OPTIMIZER}.{name}.{state}"


def section(key: str) -> str:
    """The part of a checkpoint a key belongs to: what stands before its first dot."""
    return key.partition(".")[0]


def key_path(key: str) -> tuple[str, ...]:
    """Where a key stands in the nested state that other tools make of the folder; joined by dots it must be the key again.

    >>> key_path("model.net.0.weight"), key_path("optimizer.net.0.weight.exp_avg"), key_path("ema.net.0.weight")
    (('model', 'net.0.weight'), ('optimizer', 'net.0.weight', 'exp_avg'), ('ema', 'net.0.weight'))
    """
    head, _, rest = key.partition(".")
    if head == OPTIMIZER:
        name, _, state = rest.rpartition(".")
        return head, name, state
    return (head, rest) if rest else (head,)


def count_sections(keys: Iterable[str]) -> dict[str, int]:
    """Number of keys by section."""
    counts: dict[str, int] = {}
    for key in keys:
        counts[section(key)] = counts.get(section(key), 0) + 1
    return counts


def total_bytes(pieces: Mapping[str, Piece]) -> int:
    """Bytes of this rank's blocks."""
    return sum(piece.num_bytes for piece in pieces.values())
