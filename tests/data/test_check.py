from __future__ import annotations

import pytest
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from hybrid_strategy.data.check import check_samples, planned_indices
from hybrid_strategy.data.loader import mesh_dataloader
from hybrid_strategy.errors import DataError
from hybrid_strategy.spec.layout import Layout

LAYOUT = Layout(data_parallel_size=2, tensor_parallel_size=2)  # ranks 0, 1 and ranks 2, 3 are peers


def planned(layout, loader):
    ranks = range(layout.world_size)
    return [
        planned_indices(mesh_dataloader(loader, layout.data_parallel_size, layout.coordinate(rank).data_parallel, seed=0))
        for rank in ranks
    ]


@pytest.mark.parametrize("layout", [LAYOUT, Layout(3, 1, 2), Layout(2, 2, 2, sharding="zero1"), Layout()])
@pytest.mark.parametrize("size", [16, 17])
def test_converted_loaders_are_good_in_every_layout(layout, size):
    report = check_samples(planned(layout, DataLoader(range(size), batch_size=3, shuffle=True)), layout, size)
    assert report.good
    assert "every sample is read once" in report.describe()


def test_the_world_size_in_place_of_the_data_parallel_size_is_found():
    """The fault of field report B15: every rank of the world gets a slice of its own."""
    read = [list(DistributedSampler(range(16), num_replicas=4, rank=rank, shuffle=False)) for rank in range(4)]
    report = check_samples(read, LAYOUT, 16)
    assert not report.good
    assert [(each.rank, each.peer, each.place, each.read, each.peer_read) for each in report.disagreements] == [
        (1, 0, 0, 1, 0),
        (3, 2, 0, 3, 2),
    ]
    assert report.missing == (1, 3, 5, 7, 9, 11, 13, 15)
    assert "2 ranks read other samples than their peers: rank 1 reads 1 at place 0, its peer rank 0 reads 0" in report.describe()
    assert "8 samples are missing: 1, 3, 5" in report.describe()


def test_samples_read_twice_by_whom_and_samples_that_do_not_exist():
    report = check_samples([[0, 1, 2], [0, 1, 2], [2, 2, 9], [2, 2, 9]], LAYOUT, range(4))
    assert report.duplicated == {2: (0, 1, 1)}
    assert (report.missing, report.unknown, report.disagreements) == ((3,), (9,), ())
    assert report.describe().splitlines() == [
        "1 samples are read more than once: 2 (by data-parallel ranks [0, 1, 1])",
        "1 samples are missing: 3",
        "1 samples should not be there: 9",
    ]


def test_a_peer_that_stops_early_disagrees():
    (found,) = check_samples([[0, 1], [0], [2, 3], [2, 3]], LAYOUT, 4).disagreements
    assert (found.rank, found.place, found.read, found.peer_read) == (1, 1, None, 1)


def test_plan_of_a_resumed_loader_and_of_items():
    loader = mesh_dataloader(DataLoader(range(10), batch_size=2), 2, 1, seed=0)
    loader.mesh.resume(0, 4)
    assert planned_indices(loader) == [6, 7, 9]
    assert planned_indices(mesh_dataloader(DataLoader(range(3), batch_size=None), 2, 1, seed=0)) == [1]


def test_refusals():
    with pytest.raises(DataError, match="one list of samples for each rank"):
        check_samples([[0]], LAYOUT, 1)

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(3))

    with pytest.raises(DataError, match="only data with indices"):
        planned_indices(mesh_dataloader(DataLoader(Stream()), 1, 0, seed=0))
