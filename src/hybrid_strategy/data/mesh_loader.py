"""What a DataLoader becomes when it knows the mesh: its own class, with the position of the run and random numbers apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import chain, count, repeat
from typing import Any

from torch.utils.data import DataLoader

from hybrid_strategy.data.order import RandomStreams
from hybrid_strategy.data.position import MeshPosition
from hybrid_strategy.data.sample_dims import DimsCollate, Look, SampleDims, TellingIterator
from hybrid_strategy.data.stream import MeshStream, ShareCollate, StreamIterator


class MeshLoader(DataLoader[Any]):
    """What a converted loader is beside its own class.

    Attributes:
        mesh: the position and the rows of each batch. Reach it here: `batch_sampler` may be wrapped by others.
        mesh_source: the user's loader.
        mesh_settings: data-parallel size and rank, seed, batch multiplier.
    """

    mesh: MeshPosition
    mesh_source: DataLoader[Any]
    mesh_settings: tuple[int, int, int, int]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self.num_workers > 0:
            return self._unpacked(super().__iter__())
        # Datasets that draw random numbers in this process must not depend on what the model drew on this rank.
        streams = self._streams()
        with next(streams):
            inner = super().__iter__()
        return self._unpacked(_ApartIterator(inner, streams))

    def _streams(self) -> Iterator[RandomStreams]:
        """One for each batch, which depends on its number; a stream is read from its start anyway, with one for all of it."""
        keys = self.mesh.keys()
        if isinstance(self.mesh, MeshStream):
            return repeat(RandomStreams(keys(0)))
        first = self.mesh.next_start[1]
        return (RandomStreams(keys(number)) for number in chain([first], count(first)))

    def _unpacked(self, inner: Iterator[Any]) -> Iterator[Any]:
        inner = StreamIterator(inner, self.mesh) if isinstance(self.mesh, MeshStream) else inner
        inner = _NotedIterator(inner, self.mesh)
        return TellingIterator(inner, self._tell) if hasattr(self, "_dims") else inner

    def learn_dims(self, look: Look) -> None:
        """From now on `sample_dims` tells which dimension of a batch's tensors counts its samples, once a batch has been made."""
        collate: Any = self.collate_fn
        is_stream = isinstance(collate, ShareCollate)
        if hasattr(self, "_dims") or self.batch_sampler is None or (is_stream and collate.whole_items):
            return
        self._dims: DimsCollate = DimsCollate(collate.collate if is_stream else collate, look)
        vars(self)["collate_fn"] = replace(collate, collate=self._dims) if is_stream else self._dims

    @property
    def sample_dims(self) -> SampleDims:
        """Dotted path of a tensor in the batch -> its batch dimension, as far as it is known."""
        return (self._dims.dims if hasattr(self, "_dims") else None) or {}

    def _tell(self, dims: SampleDims) -> None:
        self._dims.dims = dims

    def __len__(self) -> int:
        return len(self.mesh)


class _ApartIterator:
    """An iterator whose random numbers come from `streams`, a new one each time."""

    def __init__(self, inner: Iterator[Any], streams: Iterator[RandomStreams]) -> None:
        self._inner, self._streams = inner, streams

    def __iter__(self) -> _ApartIterator:
        return self

    def __next__(self) -> Any:
        with next(self._streams):
            return next(self._inner)


class _NotedIterator:
    """An iterator that tells the position when it has come to its end."""

    def __init__(self, inner: Iterator[Any], mesh: MeshPosition) -> None:
        self._inner, self._mesh, self._epoch = inner, mesh, mesh.epoch

    def __iter__(self) -> _NotedIterator:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._inner)
        except StopIteration:
            self._mesh.note_end(self._epoch)
            raise


class _StatefulLoader:
    """The outermost part of a converted loader: Lightning saves and restores the position through these two methods.

    They stand before methods of the same name in the user's class, whose position would be a second one.
    """

    mesh: MeshPosition

    def state_dict(self) -> dict[str, int]:
        """The position after the batches that the trainer has finished (`mesh.batches_done`); the same on all ranks."""
        return self.mesh.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """The next iteration begins there."""
        self.mesh.load_state_dict(state)


@cache
def mesh_class(loader_class: type[Any]) -> type[Any]:
    """`loader_class` with `MeshLoader` right above `DataLoader`, so that its own overrides see the batches they know."""
    if issubclass(MeshLoader, loader_class):
        bases: tuple[type, ...] = (_StatefulLoader, MeshLoader)
    else:
        bases = (_StatefulLoader, loader_class, MeshLoader)
    return type(f"Mesh{loader_class.__name__}", bases, {"__module__": loader_class.__module__, "__doc__": loader_class.__doc__})
