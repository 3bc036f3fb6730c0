from __future__ import annotations

import copy
import random
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterDataPipe,
    MapDataPipe,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from hybrid_strategy.data.loader import mesh_dataloader
from hybrid_strategy.data.mesh_loader import MeshLoader
from hybrid_strategy.errors import DataError

WORKERS = pytest.mark.parametrize("workers", [0, 2])


class Squares(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index


class Noisy(Squares):
    """Draws from every random state, as augmentation does."""

    def __getitem__(self, index):
        return index, random.random(), float(np.random.rand()), torch.rand(()).item()


def shares(loader, ranks, seed=0, **options):
    return [mesh_dataloader(loader, ranks, rank, seed=seed, **options) for rank in range(ranks)]


def batches(loader):
    return [torch.as_tensor(batch).tolist() for batch in loader]


def real(loader):
    first = loader.mesh.first_batch
    return [batch[: loader.mesh.rows_of(first + index)] for index, batch in enumerate(batches(loader))]


def joined_steps(loaders):
    return [list(chain(*step)) for step in zip(*map(real, loaders), strict=True)]


def make(shuffle=False, batch_size=3, size=14, **options):
    return DataLoader(Squares(size), batch_size=batch_size, shuffle=shuffle, **options)


@WORKERS
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_together_read_what_one_process_reads(workers, shuffle, drop_last):
    loader = make(shuffle, drop_last=drop_last, num_workers=workers)
    mesh = shares(loader, 2)
    single = mesh_dataloader(loader, 1, 0, seed=0, batch_multiplier=2)
    for epoch in range(2):
        for each in (*mesh, single):
            each.batch_sampler.sampler.set_epoch(epoch)
        steps = joined_steps(mesh)
        assert steps == batches(single)
        assert len(mesh[0]) == len(single) == len(steps)
        read = list(chain(*steps))
        assert len(set(read)) == len(read) == (12 if drop_last else 14)
        assert (read == sorted(read)) is not shuffle


def test_epochs_differ_under_shuffle_and_the_global_random_state_does_not_matter():
    first, second = (mesh_dataloader(make(True), 2, 1, seed=4) for _ in range(2))
    torch.manual_seed(1)
    zero = batches(first)
    torch.manual_seed(2)
    assert zero == batches(second)
    second.mesh.set_epoch(1)
    assert zero != batches(second)
    assert zero != batches(mesh_dataloader(make(True), 2, 1, seed=5))


def test_the_users_loader_stays_as_it_is():
    loader = make(True)
    before = dict(vars(loader))
    sampler, batch_sampler = loader.sampler, loader.batch_sampler
    mesh = mesh_dataloader(loader, 2, 0, seed=0)
    batches(mesh)
    mesh.mesh.set_epoch(3)
    assert type(loader) is DataLoader
    assert vars(loader) == before
    assert (loader.sampler, loader.batch_sampler) == (sampler, batch_sampler)
    assert sorted(chain(*batches(loader))) == list(range(14))


class Counting(DataLoader):
    """A loader of a user: extra attributes, own iteration."""

    def __init__(self, *arguments, label, **options):
        super().__init__(*arguments, **options)
        self.label = label

    def __iter__(self):
        for batch in super().__iter__():
            yield batch + 100


def test_subclasses_and_attributes_survive():
    loader = Counting(Squares(6), batch_size=2, label="mine", collate_fn=torch.tensor, pin_memory=False)
    mesh = mesh_dataloader(loader, 2, 1, seed=0)
    assert isinstance(mesh, Counting)
    assert isinstance(mesh, MeshLoader)
    assert (mesh.label, mesh.collate_fn, mesh.batch_size, mesh.dataset) == ("mine", torch.tensor, 2, loader.dataset)
    assert batches(mesh) == [[102, 103], [105]]


def test_converting_twice_changes_nothing_and_other_settings_start_from_the_users_loader():
    loader = make()
    once = mesh_dataloader(loader, 2, 1, seed=0)
    assert mesh_dataloader(once, 2, 1, seed=0) is once
    other = mesh_dataloader(once, 3, 1, seed=0)
    assert other.mesh_source is loader
    assert batches(other) == batches(mesh_dataloader(loader, 3, 1, seed=0))


def test_persistent_workers_are_not_shared():
    loader = make(num_workers=1, persistent_workers=True)
    everything = batches(loader)
    mesh = mesh_dataloader(loader, 2, 0, seed=0)
    assert loader._iterator is not None
    assert mesh._iterator is None
    assert batches(mesh) == batches(mesh) == [[0, 1, 2], [6, 7, 8], [12]]
    assert mesh._iterator is not loader._iterator
    assert batches(loader) == everything


def test_draws_with_replacement_and_their_number_are_kept():
    sampler = RandomSampler(range(10), replacement=True, num_samples=25)
    mesh = shares(DataLoader(Squares(10), batch_size=2, sampler=sampler), 3)
    assert sum(len(batch) for batch in chain(*map(real, mesh))) == 25
    assert batches(mesh[0]) == batches(mesh[0])
    few = RandomSampler(range(10), num_samples=4)
    drawn = list(chain(*joined_steps(shares(DataLoader(Squares(10), batch_size=1, sampler=few), 2))))
    assert len(set(drawn)) == len(drawn) == 4


def test_the_seed_of_a_users_generator_counts_and_its_state_does_not():
    def drawn(number, advance=False):
        generator = torch.Generator().manual_seed(number)
        if advance:
            torch.rand(1, generator=generator)
        return batches(mesh_dataloader(make(True, generator=generator), 2, 0, seed=0))

    assert drawn(1) == drawn(1, advance=True)
    assert drawn(1) != drawn(2)


def test_other_samplers_are_wrapped():
    mesh = shares(DataLoader(Squares(20), batch_size=2, sampler=SubsetRandomSampler(range(5, 16))), 2)
    drawn = list(chain(*joined_steps(mesh)))
    assert sorted(drawn) == list(range(5, 16)) != drawn


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_distributed_sampler_is_replaced_by_the_whole_order(shuffle):
    sampler = DistributedSampler(range(11), num_replicas=4, rank=2, shuffle=shuffle)
    steps = joined_steps(shares(DataLoader(Squares(11), batch_size=2, sampler=sampler), 2))
    assert sorted(chain(*steps)) == list(range(11))
    assert (list(chain(*steps)) == list(range(11))) is not shuffle


class Buckets:
    def __init__(self, *lists):
        self.lists = lists

    def __iter__(self):
        return iter(self.lists)

    def __len__(self):
        return len(self.lists)


@WORKERS
def test_a_batch_sampler_of_the_users_own_is_dealt(workers):
    buckets = Buckets([0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10])
    loader = DataLoader(Squares(11), batch_sampler=buckets, num_workers=workers)
    first, second = shares(loader, 2)
    assert (real(first), real(second)) == ([[0, 1, 2], [4, 5], [10]], [[3], [6, 7, 8, 9], []])
    assert batches(second)[-1] == [10]
    joined = mesh_dataloader(loader, 1, 0, seed=0, batch_multiplier=2)
    assert batches(joined) == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9], [10]]
    first.mesh.resume(0, 4, batches_done=1)
    assert real(first) == [[4, 5], [10]]


def test_a_batch_sampler_of_torch_is_understood():
    loader = DataLoader(Squares(9), batch_sampler=BatchSampler(SequentialSampler(range(9)), 2, True))
    assert [batches(each) for each in shares(loader, 2)] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


@WORKERS
def test_a_loader_without_automatic_batching_deals_items(workers):
    loader = DataLoader(Squares(5), batch_size=None, num_workers=workers)
    first, second = shares(loader, 2)
    assert ([int(item) for item in first], [int(item) for item in second]) == ([0, 2, 4], [1, 3, 4])
    assert [second.mesh.rows_of(step) for step in range(3)] == [1, 1, 0]
    shuffled = shares(DataLoader(Squares(5), batch_size=None, shuffle=True), 1)[0]
    assert sorted(int(item) for item in shuffled) == list(range(5))
    with pytest.raises(DataError, match="cannot be joined"):
        mesh_dataloader(loader, 1, 0, seed=0, batch_multiplier=2)


def test_a_dataset_that_makes_batches_from_lists_of_indices():
    data = torch.arange(7)

    class Gather(Squares):
        def __getitem__(self, indices):
            return data[indices]

    loader = DataLoader(Gather(7), batch_size=None, sampler=BatchSampler(SequentialSampler(range(7)), 2, False))
    first, second = shares(loader, 2)
    assert (batches(first), batches(second)) == ([[0, 1], [4, 5]], [[2, 3], [6]])
    assert batches(mesh_dataloader(loader, 1, 0, seed=0, batch_multiplier=2)) == [[0, 1, 2, 3], [4, 5, 6]]


class Predicting:
    """As Lightning's wrapper, which keeps the indices of what it predicts."""

    def __init__(self, batch_sampler):
        self._batch_sampler, self.seen_batch_indices = batch_sampler, []

    def __iter__(self):
        for batch in self._batch_sampler:
            self.seen_batch_indices.append(batch)
            yield batch

    def __len__(self):
        return len(self._batch_sampler)


Predicting.__name__ = "_IndexBatchSamplerWrapper"


def test_lightnings_wrapper_for_prediction_stays_around_the_sampler():
    loader = make(size=7, batch_size=2)
    object.__setattr__(loader, "batch_sampler", Predicting(loader.batch_sampler))
    mesh = mesh_dataloader(loader, 2, 1, seed=0)
    assert batches(mesh) == mesh.batch_sampler.seen_batch_indices == [[2, 3], [6]]
    assert mesh.mesh.global_rows_of(1) == 3
    assert loader.batch_sampler.seen_batch_indices == []


@WORKERS
def test_random_numbers_drawn_while_loading_are_those_of_the_peers(workers):
    def read(rank, epoch=0):
        torch.manual_seed(random.randrange(1000))
        loader = mesh_dataloader(DataLoader(Noisy(8), batch_size=2, shuffle=True, num_workers=workers), 2, rank, seed=0)
        loader.mesh.set_epoch(epoch)
        return [[part.tolist() for part in batch] for batch in loader]

    one = read(0)
    assert one == read(0)
    assert one != read(0, epoch=1)
    assert not {number for batch in one for number in batch[3]} & {number for batch in read(1) for number in batch[3]}


def test_loading_in_this_process_leaves_its_random_states_alone():
    loader = mesh_dataloader(DataLoader(Noisy(4)), 1, 0, seed=0)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    list(loader)
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


@WORKERS
@pytest.mark.parametrize("shuffle", [False, True])
def test_state_of_the_loader_brings_another_layout_to_the_same_place(workers, shuffle):
    loader = make(shuffle, num_workers=workers, size=23)
    whole = mesh_dataloader(loader, 1, 0, seed=7)
    whole.mesh.set_epoch(2)
    uninterrupted = list(chain(*batches(whole)))
    before = mesh_dataloader(loader, 2, 0, seed=7)
    before.mesh.set_epoch(2)
    iterator = iter(before)
    next(iterator), next(iterator), next(iterator)  # the loader is ahead of the trainer
    before.mesh.batches_done = 2
    state = before.state_dict()
    assert state == {"epoch": 2, "consumed_samples": 12, "batches_done": 2, "block_size": 6}
    after = shares(loader, 3, seed=7)
    for each in after:
        each.load_state_dict(state)
        each.batch_sampler.sampler.set_epoch(2)
    assert list(chain(*joined_steps(after))) == uninterrupted[12:]
    assert (after[0].mesh.first_batch, len(after[0])) == (1, 3)


def test_lightning_sets_the_epoch_of_a_converted_loader():
    from lightning.fabric.utilities.data import _set_sampler_epoch

    for loader in (make(True), DataLoader(Squares(9), batch_size=None, shuffle=True)):
        mesh = mesh_dataloader(loader, 2, 0, seed=0)
        _set_sampler_epoch(mesh, 6)
        assert mesh.mesh.epoch == 6


def test_a_converted_loader_is_stateful_for_lightning():
    from lightning.fabric.utilities.types import _Stateful

    assert isinstance(mesh_dataloader(make(), 2, 0, seed=0), _Stateful)


class Endless:
    def __iter__(self):
        while True:
            yield 0


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (lambda: DataLoader(Squares(0)), "at least one sample"),
        (lambda: DataLoader(Squares(5), batch_size=3, drop_last=True), "3 x data_parallel_size 2 = 6 rows"),
        (lambda: DataLoader(Squares(5), sampler=Endless()), "must have a length"),
        (lambda: DataLoader(Squares(5), batch_sampler=Endless()), "must have a length"),
        (lambda: [1, 2], "only a torch DataLoader"),
    ],
)
def test_data_that_cannot_feed_the_ranks_is_refused(loader, words):
    with pytest.raises(DataError, match=words):
        mesh_dataloader(loader(), 2, 0, seed=0)


def test_a_sampler_that_divides_by_itself_is_refused():
    class Own(DistributedSampler):
        pass

    sampler = Own(range(8), num_replicas=2, rank=0)
    for loader in (
        DataLoader(Squares(8), sampler=sampler),
        DataLoader(Squares(8), batch_sampler=BatchSampler(sampler, 2, False)),
    ):
        with pytest.raises(DataError, match="divides the samples by its own number of replicas"):
            mesh_dataloader(loader, 2, 0, seed=0)


class ReadInOrder(IterDataPipe):
    def __iter__(self):
        return iter(range(4))


class ReadByIndex(MapDataPipe):
    def __getitem__(self, index):
        return index

    def __len__(self):
        return 4


@pytest.mark.parametrize("pipe", [ReadInOrder, ReadByIndex])
def test_data_pipes_are_refused_where_torch_divides_them_by_the_world_size(pipe, monkeypatch):
    loader = DataLoader(pipe())
    assert batches(mesh_dataloader(loader, 1, 0, seed=0)) == [[0], [1], [2], [3]]
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    with pytest.raises(DataError, match="divides a data pipe by the world size"):
        mesh_dataloader(loader, 1, 0, seed=0)


def test_other_iterables_pass_where_there_is_one_rank():
    data = [1, 2]
    assert mesh_dataloader(data, 1, 0, seed=0) is data


def test_a_copy_of_a_converted_loader_works():
    mesh = mesh_dataloader(make(), 2, 0, seed=0)
    assert batches(copy.copy(mesh)) == batches(mesh)
