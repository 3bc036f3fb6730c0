"""Says which samples are read twice, by whom, which are missing, and whether tensor and pipeline peers read the same ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import IterableDataset

from hybrid_strategy.data.mesh_loader import MeshLoader
from hybrid_strategy.errors import DataError, message
from hybrid_strategy.spec.layout import Layout

_SHOWN = 8


@dataclass(frozen=True)
class Disagreement:
    """Rank `rank` should read what rank `peer` reads, but at `place` it reads `read` and the peer `peer_read` (None: nothing)."""

    rank: int
    peer: int
    place: int
    read: int | None
    peer_read: int | None


@dataclass(frozen=True)
class SampleReport:
    """What `check_samples` found.

    Attributes:
        duplicated: sample -> the data-parallel ranks that read it, one entry a reading.
        missing: samples that nobody read.
        unknown: samples that were read and should not exist.
        disagreements: the first difference between each rank and the first rank of its data-parallel coordinate.
    """

    duplicated: dict[int, tuple[int, ...]] = field(default_factory=dict)
    missing: tuple[int, ...] = ()
    unknown: tuple[int, ...] = ()
    disagreements: tuple[Disagreement, ...] = ()

    @property
    def good(self) -> bool:
        """Every sample once, and peers agree."""
        return not (self.duplicated or self.missing or self.unknown or self.disagreements)

    def describe(self) -> str:
        """The findings in words, one a line."""
        if self.good:
            return "every sample is read once, and tensor and pipeline peers read the same samples"
        lines = []
        if self.disagreements:
            first = self.disagreements[0]
            lines.append(
                f"{len(self.disagreements)} ranks read other samples than their peers: rank {first.rank} reads {first.read} at "
                f"place {first.place}, its peer rank {first.peer} reads {first.peer_read}"
            )
        if self.duplicated:
            shown = [f"{sample} (by data-parallel ranks {list(by)})" for sample, by in sorted(self.duplicated.items())]
            lines.append(f"{len(self.duplicated)} samples are read more than once: {_some(shown)}")
        if self.missing:
            lines.append(f"{len(self.missing)} samples are missing: {_some(map(str, self.missing))}")
        if self.unknown:
            lines.append(f"{len(self.unknown)} samples should not be there: {_some(map(str, self.unknown))}")
        return "\n".join(lines)


def _some(words: Iterable[str]) -> str:
    listed = list(words)
    return ", ".join(listed[:_SHOWN]) + (", ..." if len(listed) > _SHOWN else "")


def check_samples(indices_by_rank: Sequence[Sequence[int]], layout: Layout, expected: int | Iterable[int]) -> SampleReport:
    """Compares what the ranks of one epoch read (padding left out) with what they should read.

    Args:
        indices_by_rank: for each global rank, the samples it read, in order.
        layout: says which ranks are peers.
        expected: how many samples there are, or the samples.

    Raises:
        DataError: the layout has another number of ranks.
    """
    if len(indices_by_rank) != layout.world_size:
        numbers = f"Layout {layout.name} has {layout.world_size} ranks"
        rule = "there must be one list of samples for each rank"
        raise DataError(message("indices_by_rank", len(indices_by_rank), rule, numbers, "Give the lists of all ranks"))
    first_peers: dict[int, int] = {}
    disagreements = []
    for rank, indices in enumerate(indices_by_rank):
        peer = first_peers.setdefault(layout.coordinate(rank).data_parallel, rank)
        place = _first_difference(indices, indices_by_rank[peer])
        if place is not None:
            disagreements.append(Disagreement(rank, peer, place, _at(indices, place), _at(indices_by_rank[peer], place)))
    readings = [(int(sample), replica) for replica, rank in sorted(first_peers.items()) for sample in indices_by_rank[rank]]
    return _counted(readings, expected, tuple(disagreements))


def _counted(
    readings: list[tuple[int, int]], expected: int | Iterable[int], disagreements: tuple[Disagreement, ...]
) -> SampleReport:
    wanted = set(range(expected)) if isinstance(expected, int) else set(expected)
    counts = Counter(sample for sample, _ in readings)
    twice = {sample for sample, count in counts.items() if count > 1}
    duplicated: dict[int, tuple[int, ...]] = {}
    for sample, replica in readings:
        if sample in twice:
            duplicated[sample] = (*duplicated.get(sample, ()), replica)
    missing, unknown = sorted(wanted - counts.keys()), sorted(counts.keys() - wanted)
    return SampleReport(duplicated, tuple(missing), tuple(unknown), disagreements)


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    for place in range(max(len(one), len(other))):
        if _at(one, place) != _at(other, place):
            return place
    return None


def _at(indices: Sequence[int], place: int) -> int | None:
    return int(indices[place]) if place < len(indices) else None


def planned_indices(loader: MeshLoader) -> list[Any]:
    """The indices that a converted loader will read in its epoch, padding left out; no sample is read.

    Raises:
        DataError: the loader reads an `IterableDataset`, which has no indices.
    """
    mesh = loader.mesh
    if isinstance(loader.dataset, IterableDataset):
        rule = "only data with indices can be checked without reading it"
        raise DataError(message("dataset", type(loader.dataset).__name__, rule, "", "Record what the ranks read instead"))
    planned: list[Any] = []
    for number, batch in enumerate(iter(mesh), mesh.first_batch):  # type: ignore[call-overload]
        rows = mesh.rows_of(number)
        planned += batch[:rows] if isinstance(batch, list) else [batch] * rows
    return planned
