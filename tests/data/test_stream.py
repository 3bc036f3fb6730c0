from __future__ import annotations

import pickle
import random
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hybrid_strategy.data.loader import mesh_dataloader
from hybrid_strategy.data.stream import Share
from hybrid_strategy.errors import DataError

WORKERS = pytest.mark.parametrize("workers", [0, 2])


class Stream(IterableDataset):
    """Numbers below `size`, divided over the workers; `epoch` is added to each."""

    def __init__(self, size, shuffle=False):
        self.size, self.shuffle, self.epoch = size, shuffle, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        worker = get_worker_info()
        numbers = list(range(self.size))[worker.id :: worker.num_workers] if worker else list(range(self.size))
        if self.shuffle:
            random.shuffle(numbers)
        return (number + 1000 * self.epoch for number in numbers)


class Sized(Stream):
    def __len__(self):
        return self.size


def shares(loader, ranks, **options):
    return [mesh_dataloader(loader, ranks, rank, seed=0, **options) for rank in range(ranks)]


def batches(loader):
    return [torch.as_tensor(batch).tolist() for batch in loader]


def real(loader):
    read = batches(loader)
    return [batch[: loader.mesh.rows_of(loader.mesh.first_batch + index)] for index, batch in enumerate(read)]


def joined_steps(loaders):
    return [list(chain(*step)) for step in zip(*map(real, loaders), strict=True)]


@WORKERS
@pytest.mark.parametrize("size", [1, 11, 12, 13, 20])
@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_together_read_what_one_process_reads(workers, size, drop_last):
    loader = DataLoader(Stream(size), batch_size=2, num_workers=workers, drop_last=drop_last)
    mesh = shares(loader, 3)
    single = mesh_dataloader(loader, 1, 0, seed=0, batch_multiplier=3)
    steps = joined_steps(mesh)
    assert steps == batches(single)
    assert [mesh[1].mesh.global_rows_of(index) for index in range(len(steps))] == [len(step) for step in steps]
    if not drop_last:
        assert sorted(chain(*steps)) == list(range(size))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 50), st.integers(1, 5), st.integers(1, 5))
def test_union_is_complete_and_nothing_comes_twice(size, batch_size, ranks):
    mesh = shares(DataLoader(Stream(size), batch_size=batch_size), ranks)
    assert list(chain(*joined_steps(mesh))) == list(range(size))
    assert len({len(batches(each)) for each in mesh}) == 1


def test_a_rank_without_a_row_gets_padding_that_counts_nothing():
    mesh = shares(DataLoader(Stream(5), batch_size=2), 2)
    assert [batches(each) for each in mesh] == [[[0, 1], [4]], [[2, 3], [4]]]
    assert [each.mesh.rows_of(1) for each in mesh] == [1, 0]
    assert [each.mesh.global_rows_of(1) for each in mesh] == [1, 1]
    assert mesh[1].mesh.consumed_after(2) == 5


@WORKERS
def test_a_stream_that_shuffles_by_random_state_is_the_same_on_all_ranks(workers):
    read = []
    for mesh in shares(DataLoader(Stream(16, shuffle=True), batch_size=2, num_workers=workers), 2):
        random.seed()
        read += chain(*real(mesh))
    assert sorted(read) == list(range(16)) != read


@WORKERS
def test_items_that_are_whole_batches_are_dealt(workers):
    loader = DataLoader(Stream(5), batch_size=None, num_workers=workers)
    first, second = shares(loader, 2)
    items = list(zip((int(item) for item in first), (int(item) for item in second), strict=True))
    dealt = [(0, 1), (2, 3), (4, 4)] if workers == 0 else [(0, 2), (1, 3), (4, 4)]
    assert items == dealt
    assert [second.mesh.rows_of(step) for step in range(3)] == [1, 1, 0]
    with pytest.raises(DataError, match="cannot be joined"):
        mesh_dataloader(loader, 1, 0, seed=0, batch_multiplier=2)


@pytest.mark.parametrize("drop_last", [False, True])
def test_length_is_that_of_the_steps(drop_last):
    mesh = shares(DataLoader(Sized(11), batch_size=2, drop_last=drop_last), 2)
    assert [len(each) for each in mesh] == [len(batches(each)) for each in mesh]
    assert mesh[0].batch_size == 2


def test_no_length_where_it_cannot_be_known():
    assert len(shares(DataLoader(Sized(12), batch_size=2, num_workers=2), 1)[0]) == 6
    for loader, ranks in ((DataLoader(Sized(12), num_workers=2), 2), (DataLoader(Stream(12)), 1)):
        with pytest.raises(TypeError):
            len(shares(loader, ranks)[0])


@WORKERS
def test_epoch_reaches_the_dataset_and_lightning_reaches_the_epoch(workers):
    from lightning.fabric.utilities.data import _set_sampler_epoch

    mesh = mesh_dataloader(DataLoader(Stream(4), batch_size=2, num_workers=workers), 2, 0, seed=0)
    _set_sampler_epoch(mesh, 3)
    assert mesh.mesh.epoch == 3
    assert batches(mesh)[0][0] == 3000


@WORKERS
@pytest.mark.parametrize("done", [0, 1, 2, 3])
@pytest.mark.parametrize("layout", [(2, 2), (2, 1), (1, 3)])
def test_resumption_yields_the_rest(workers, done, layout):
    loader = DataLoader(Stream(23), batch_size=2, num_workers=workers)
    before, after = (shares(loader, ranks) for ranks in layout)
    steps = joined_steps(before)
    done = min(done, len(steps) - 3)
    state = before[0].mesh.state_dict(done)
    for each in after:
        each.load_state_dict(state)
    rest = joined_steps(after)
    assert sorted(chain(*steps[:done], *rest)) == list(range(23))
    if layout[0] == layout[1]:
        assert rest == steps[done:]
        assert after[1].mesh.first_batch == done
    if workers == 0:
        assert list(chain(*rest)) == list(range(23))[state["consumed_samples"] :]


def test_an_epoch_read_to_its_end_is_followed_by_the_next():
    mesh = shares(DataLoader(Stream(8), batch_size=2), 2)[0]
    assert len(batches(mesh)) == 2
    mesh.mesh.batches_done = 2
    state = mesh.state_dict()
    assert (state["epoch"], state["consumed_samples"], state["batches_done"]) == (1, 0, 0)
    sized = shares(DataLoader(Sized(8), batch_size=2), 2)[0]
    sized.mesh.resume(4, 8, batches_done=2)
    assert (sized.mesh.epoch, len(sized)) == (5, 2)


def test_persistent_workers_read_every_epoch_anew():
    loader = DataLoader(Stream(8), batch_size=2, num_workers=1, persistent_workers=True)
    mesh = mesh_dataloader(loader, 2, 1, seed=0)
    mesh.mesh.resume(0, 4)
    assert batches(mesh) == [[6, 7]]
    mesh.mesh.set_epoch(1)
    assert batches(mesh) == [[2, 3], [6, 7]]


def test_a_dataset_that_divides_itself_is_left_alone():
    class Own(Stream):
        data_parallel_sharded = True

    mesh = shares(DataLoader(Own(5), batch_size=2), 2)[1]
    assert batches(mesh) == [[0, 1], [2, 3], [4]]
    assert [mesh.mesh.rows_of(step) for step in range(3)] == [2, 2, 1]
    assert mesh.mesh.global_rows_of(2) is None


def test_the_users_dataset_and_collation_are_kept():
    class Marked(DataLoader):
        def __iter__(self):
            return (("marked", batch) for batch in super().__iter__())

    loader = Marked(Stream(4), batch_size=1, collate_fn=lambda rows: {"rows": rows})
    mesh = mesh_dataloader(loader, 2, 1, seed=0)
    assert mesh.dataset is loader.dataset
    assert list(mesh) == [("marked", {"rows": [1]}), ("marked", {"rows": [3]})]
    assert next(iter(loader)) == ("marked", {"rows": [0]})


def test_what_goes_to_the_workers_can_be_pickled():
    collate = mesh_dataloader(DataLoader(Stream(4), batch_size=1), 2, 1, seed=0).collate_fn
    assert pickle.loads(pickle.dumps(collate))([7, 8]) == Share(1, 2, torch.tensor([8]))
