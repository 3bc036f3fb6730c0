from __future__ import annotations

from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, SubsetRandomSampler, WeightedRandomSampler

from hybrid_strategy.data.list_sampler import MeshListBatchSampler
from hybrid_strategy.data.order import KeyedOrder, SampledOrder
from hybrid_strategy.data.sampler import MeshBatchSampler, share_of
from hybrid_strategy.errors import DataError

SIZES = st.integers(1, 50)
RANKS = st.integers(1, 5)
BATCHES = st.integers(1, 5)
QUICK = settings(max_examples=200, deadline=None)


def samplers(source, batch_size, ranks, **options):
    options = {"shuffle": True, "seed": 3, **options}
    return [MeshBatchSampler(source, batch_size, ranks, rank, **options) for rank in range(ranks)]


def real_rows(sampler):
    """Batches without their padding."""
    first = sampler.first_batch
    return [batch[: sampler.rows_of(first + index)] for index, batch in enumerate(sampler)]


def union(ranks):
    return [index for step in zip(*map(real_rows, ranks), strict=True) for batch in step for index in batch]


@QUICK
@given(SIZES, BATCHES, RANKS, st.booleans(), st.integers(0, 3))
def test_union_of_the_ranks_is_the_dataset_once_in_the_order_of_one_process(size, batch_size, ranks, shuffle, epoch):
    mesh = samplers(size, batch_size, ranks, shuffle=shuffle)
    single = MeshBatchSampler(size, batch_size * ranks, 1, 0, shuffle=shuffle, seed=3)
    for sampler in (*mesh, single):
        sampler.set_epoch(epoch)
    assert sorted(union(mesh)) == list(range(size))
    per_step = [list(chain(*step)) for step in zip(*map(real_rows, mesh), strict=True)]
    assert per_step == list(single)
    for index, batch in enumerate(single):
        shares = [sampler.rows_of(index) for sampler in mesh]
        assert sum(shares) == len(batch) == mesh[0].global_rows_of(index)
        assert max(shares) - min(shares) <= 1


@QUICK
@given(SIZES, BATCHES, RANKS, st.booleans())
def test_all_ranks_take_the_same_number_of_steps_and_a_padding_row_repeats_the_first_of_its_block(
    size, batch_size, ranks, drop_last
):
    if drop_last and size < batch_size * ranks:
        with pytest.raises(DataError, match="drop_last"):
            samplers(size, batch_size, ranks, drop_last=drop_last)
        return
    mesh = samplers(size, batch_size, ranks, drop_last=drop_last)
    batches = [list(sampler) for sampler in mesh]
    assert {len(each) for each in batches} == {len(sampler) for sampler in mesh} == {len(batches[0])}
    for step in range(len(batches[0])):
        for sampler, each in zip(mesh, batches, strict=True):
            if sampler.rows_of(step) == 0:
                assert each[step] == batches[0][step][:1]
            else:
                assert len(each[step]) == sampler.rows_of(step)
    if drop_last:
        assert all(len(batch) == batch_size for each in batches for batch in each)


@QUICK
@given(SIZES, BATCHES, RANKS, st.booleans())
def test_peers_of_the_same_data_parallel_rank_read_the_same(size, batch_size, ranks, shuffle):
    for rank in range(ranks):
        one, other = (MeshBatchSampler(size, batch_size, ranks, rank, shuffle=shuffle, seed=11) for _ in range(2))
        torch.rand(3)  # the process's own random state must not matter
        assert list(one) == list(other)


@QUICK
@given(SIZES, BATCHES, RANKS, BATCHES, RANKS, st.integers(0, 60), st.booleans())
def test_resumption_in_another_layout_yields_exactly_the_rest(size, batch_size, ranks, new_batch_size, new_ranks, steps, shuffle):
    before = samplers(size, batch_size, ranks, shuffle=shuffle)
    after = samplers(size, new_batch_size, new_ranks, shuffle=shuffle)
    whole = samplers(size, 1, 1, shuffle=shuffle)[0]
    for sampler in (*before, whole):
        sampler.set_epoch(2)
    uninterrupted = union([whole])
    steps = min(steps, len(before[0]))
    state = before[0].state_dict(steps)
    assert all(sampler.state_dict(steps) == state for sampler in before)
    assert state["consumed_samples"] == sum(before[0].global_rows_of(step) for step in range(steps))
    for sampler in after:
        sampler.load_state_dict(state)
    if state["consumed_samples"] == size:
        assert all((sampler.epoch, sampler.first_sample, sampler.batches_done) == (3, 0, 0) for sampler in after)
        return
    assert union(after) == uninterrupted[state["consumed_samples"] :]
    fresh = len(samplers(size, new_batch_size, new_ranks)[0])
    assert all(len(sampler) == fresh == sampler.first_batch + len(list(sampler)) for sampler in after)
    assert after[0].consumed_after(len(after[0])) == size


def test_batches_of_a_resumed_epoch_are_numbered_on_and_the_next_epoch_begins_anew():
    sampler = MeshBatchSampler(10, 2, 2, 1, shuffle=False, seed=0)
    sampler.resume(4, 6, batches_done=3)
    assert list(sampler) == [[8, 9]]
    assert len(sampler) == 4
    assert (sampler.rows_of(3), sampler.global_rows_of(3), sampler.consumed_after(4)) == (2, 4, 10)
    sampler.set_epoch(4)
    assert list(sampler) == [[8, 9]]
    sampler.set_epoch(5)
    assert list(sampler) == [[2, 3], [6, 7], [9]]
    assert sampler.state_dict() == {"epoch": 5, "consumed_samples": 0, "batches_done": 0, "block_size": 4}


def test_handing_out_batches_does_not_move_the_position():
    sampler = MeshBatchSampler(8, 2, 1, 0, shuffle=True, seed=0)
    first = iter(sampler)
    next(first)
    assert sampler.state_dict()["consumed_samples"] == 0
    sampler.batches_done = 1
    assert sampler.state_dict() == {"epoch": 0, "consumed_samples": 2, "batches_done": 1, "block_size": 2}
    assert list(sampler)[1:] == list(first)


def test_an_iterator_belongs_to_the_epoch_it_was_made_in():
    sampler = MeshBatchSampler(20, 4, 1, 0, shuffle=True, seed=0)
    expected, iterator = list(sampler), iter(sampler)
    sampler.set_epoch(1)
    assert list(iterator) == expected != list(sampler)


def test_the_order_depends_on_seed_and_epoch():
    orders = {
        tuple(map(tuple, MeshBatchSampler(50, 5, 1, 0, shuffle=True, seed=seed)._batches(order, 0, 10)))
        for seed in (0, 1, -1)
        for epoch in range(3)
        for order in [KeyedOrder(50, True, seed).indices(epoch)]
    }
    assert len(orders) == 9


def test_the_order_is_pinned():
    """A checkpoint of today must find its samples tomorrow."""
    assert list(KeyedOrder(8, True, 1234).indices(5)) == PINNED


PINNED = [1, 6, 0, 2, 3, 7, 4, 5]


def test_a_permutation_of_many_samples_costs_four_bytes_each():
    order = KeyedOrder(1_000_000, True, 0).indices(0)
    assert order.nbytes == 4_000_000
    assert isinstance(KeyedOrder(10**12).indices(0), range)


@pytest.mark.parametrize("num_samples", [5, 10, 25])
@pytest.mark.parametrize("replacement", [False, True])
def test_number_of_draws_and_replacement(num_samples, replacement):
    order = KeyedOrder(10, True, 0, num_samples, replacement)
    drawn = order.indices(0).tolist()
    assert len(drawn) == order.size(0) == num_samples
    assert set(drawn) <= set(range(10))
    if not replacement:
        assert max(drawn.count(index) for index in drawn) == -(-num_samples // 10)
    assert drawn == order.indices(0).tolist() != order.indices(1).tolist()


@pytest.mark.parametrize("generator", [None, torch.Generator().manual_seed(5)])
@pytest.mark.parametrize(
    "make", [lambda g: SubsetRandomSampler(range(3, 20), g), lambda g: WeightedRandomSampler([1.0] * 30, 17, generator=g)]
)
def test_a_users_sampler_is_read_alike_whatever_the_random_state_is(make, generator):
    expected = SampledOrder(make(generator), seed=1).indices(4).tolist()
    torch.manual_seed(99)
    before = torch.get_rng_state()
    order = SampledOrder(make(generator), seed=1)
    assert order.indices(4).tolist() == expected
    assert torch.equal(torch.get_rng_state(), before)
    assert order.indices(5).tolist() != expected
    mesh = samplers(make(generator), 2, 3, shuffle=False)
    assert sorted(union(mesh)) == sorted(SampledOrder(make(generator), seed=3).indices(0).tolist())


def test_the_generator_of_a_sampler_keeps_its_state_and_its_seed_counts():
    generator = torch.Generator().manual_seed(5)
    state = generator.get_state()
    five = SampledOrder(SubsetRandomSampler(range(20), generator), seed=1).indices(0).tolist()
    assert torch.equal(generator.get_state(), state)
    six = SampledOrder(SubsetRandomSampler(range(20), torch.Generator().manual_seed(6)), seed=1).indices(0).tolist()
    assert five != six


def test_a_sampler_may_yield_keys_that_are_no_integers():
    keys = [("a", 1), ("b", 2), ("c", 3)]
    first, second = samplers(keys, 1, 2, shuffle=False)
    assert list(first) == [[("a", 1)], [("c", 3)]]
    assert list(second) == [[("b", 2)], [("c", 3)]]
    assert [second.rows_of(step) for step in range(2)] == [1, 0]
    assert sorted(union(samplers(keys, 1, 2, shuffle=True))) == keys


def test_shuffle_permutes_a_sampler_of_the_users_own():
    batches = next(iter(MeshBatchSampler(range(100, 150), 50, 1, 0, shuffle=True, seed=0)))
    assert sorted(batches) == list(range(100, 150)) != batches


def test_set_epoch_reaches_the_users_sampler():
    class Rotating:
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([(self.epoch + index) % 4 for index in range(4)])

        def __len__(self):
            return 4

    sampler = MeshBatchSampler(Rotating(), 2, 1, 0, shuffle=False, seed=0)
    assert list(sampler) == [[0, 1], [2, 3]]
    sampler.sampler.set_epoch(1)
    assert list(sampler) == [[1, 2], [3, 0]]


@pytest.mark.parametrize("workers", [0, 2])
def test_works_as_batch_sampler_of_a_loader(workers):
    sampler = MeshBatchSampler(7, 2, 2, 1, shuffle=False, seed=0)
    batches = [batch.tolist() for batch in DataLoader(range(7), batch_sampler=sampler, num_workers=workers)]
    assert batches == [[2, 3], [6]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 1, 1, 0), "at least one sample"),
        ((5, 0, 1, 0), "batch_size is 0"),
        ((5, 1, 2, 2), "data_parallel_rank is 2"),
        (([], 1, 1, 0), "at least one sample"),
    ],
)
def test_refusals(arguments, words):
    with pytest.raises(DataError, match=words):
        MeshBatchSampler(*arguments, shuffle=False, seed=0)


@pytest.mark.parametrize("consumed", [-1, 11])
def test_a_position_outside_the_epoch_is_refused(consumed):
    sampler = MeshBatchSampler(10, 2, 1, 0, shuffle=False, seed=0)
    with pytest.raises(DataError, match=f"consumed_samples is {consumed}"):
        sampler.resume(0, consumed)


def test_shares_are_contiguous():
    assert [share_of(7, 3, index) for index in range(3)] == [(0, 3), (3, 2), (5, 2)]


@QUICK
@given(st.lists(st.integers(1, 4), min_size=1, max_size=20), RANKS, RANKS, st.integers(0, 20), st.integers(1, 3))
def test_a_users_batches_are_dealt_in_turn_and_resumed_in_another_layout(sizes, ranks, new_ranks, steps, multiplier):
    entries, start = [], 0
    for size in sizes:
        entries.append(list(range(start, start + size)))
        start += size
    joined = [list(chain(*entries[at : at + multiplier])) for at in range(0, len(entries), multiplier)]

    def mesh(ranks):
        return [MeshListBatchSampler(entries, ranks, rank, seed=0, batch_multiplier=multiplier) for rank in range(ranks)]

    before, after = mesh(ranks), mesh(new_ranks)
    for rank, sampler in enumerate(before):
        assert [batch for batch in real_rows(sampler) if batch] == joined[rank::ranks]
        assert len(list(sampler)) == len(sampler) == -(-len(joined) // ranks)
    assert [before[0].global_rows_of(step) for step in range(len(before[0]))] == [
        len(list(chain(*joined[at : at + ranks]))) for at in range(0, len(joined), ranks)
    ]
    state = before[0].state_dict(min(steps, len(before[0])))
    for sampler in after:
        sampler.load_state_dict(state)
    if state["consumed_samples"] == start:
        assert after[0].epoch == 1
    else:
        assert union(after) == list(range(state["consumed_samples"], start))


def test_refusals_of_dealt_batches():
    with pytest.raises(DataError, match="at least one batch"):
        MeshListBatchSampler([], 1, 0, seed=0)
    with pytest.raises(DataError, match="cannot be joined"):
        MeshListBatchSampler([1, 2], 1, 0, seed=0, batch_multiplier=2, whole_entries=True)
    with pytest.raises(DataError, match="end of a batch"):
        MeshListBatchSampler([[0, 1], [2, 3]], 1, 0, seed=0).resume(0, 3)


@pytest.mark.parametrize("kind", ["indices", "lists"])
def test_what_is_read_again_in_a_resumed_epoch_begins_at_its_start(kind):
    """A loader that is shorter than its neighbours; its batches go on being counted."""
    lists = [list(range(start, min(start + 2, 7))) for start in range(0, 7, 2)]
    sampler = (
        MeshBatchSampler(7, 2, 1, 0, shuffle=False, seed=0) if kind == "indices" else MeshListBatchSampler(lists, 1, 0, seed=0)
    )
    sampler.resume(0, 4)
    first = list(sampler)
    sampler.note_end(0)
    again = list(sampler)
    assert (first, again) == (lists[2:], lists)
    assert [sampler.rows_of(2 + index) for index in range(10)] == [len(each) for each in first + again + again]
    assert [sampler.state_dict(done)["consumed_samples"] for done in (1, 3)] == [2, 6]
    sampler.set_epoch(1)
    assert len(list(sampler)) == 4
