"""Which piece of a parameter a rank holds. The one description that clipping, checkpoints, parity and reports share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ShardSpec:
    """A rank's piece of a parameter: the block `offsets .. offsets + sizes` of a tensor of `full_shape`.

    Attributes:
        name: the parameter's name in the un-split model.
        full_shape: shape of the whole parameter.
        offsets: where this rank's block begins, per dimension.
        sizes: the block's shape, per dimension (a size may be 0: a rank may hold nothing of a small parameter).
        owner: exactly one rank of the world is the owner of each piece: it writes it and counts it in the gradient norm.
        partial_gradient: the gradient of one backward pass is a partial sum over the tensor-parallel ranks
            (a norm under sequence parallelism) and is summed over them before use.
    """

    name: str
    full_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    owner: bool = True
    partial_gradient: bool = False

    @staticmethod
    def whole(name: str, shape: tuple[int, ...], owner: bool = True) -> ShardSpec:
        """The piece that is the whole parameter."""
        return ShardSpec(name, tuple(shape), (0,) * len(shape), tuple(shape), owner)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index this piece out of the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))


def even_chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """Start and size of part `index` when `length` is split into `parts` blocks of equal size, the last ones shorter.

    The rule of `torch.chunk`, but with exactly `parts` parts, the last of which may be empty.

    >>> [even_chunk(7, 4, i) for i in range(4)], [even_chunk(5, 4, i) for i in range(4)]
    ([(0, 2), (2, 2), (4, 2), (6, 1)], [(0, 2), (2, 2), (4, 1), (5, 0)])
    """
    block = -(-length // parts)
    start = min(index * block, length)
    return start, min(block, length - start)
