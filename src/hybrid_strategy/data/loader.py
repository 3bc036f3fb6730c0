"""Any DataLoader, made to know the mesh: the same class and attributes, reading this data-parallel rank's share."""

from __future__ import annotations

import copy
from collections.abc import Sized
from typing import Any, cast, overload

import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    RandomSampler,
    SequentialSampler,
)

from hybrid_strategy.data.common_end import with_common_end
from hybrid_strategy.data.list_sampler import MeshListBatchSampler
from hybrid_strategy.data.mesh_loader import MeshLoader, mesh_class
from hybrid_strategy.data.order import (
    USER_SAMPLER,
    KeyedOrder,
    Order,
    SampledOrder,
    generators_of,
    random_key,
)
from hybrid_strategy.data.position import MeshPosition
from hybrid_strategy.data.sampler import MeshBatchSampler, MeshItemSampler
from hybrid_strategy.data.stream import MeshStream, StreamSpec
from hybrid_strategy.errors import DataError, message


@overload
def mesh_dataloader(
    loader: DataLoader[Any], data_parallel_size: int, data_parallel_rank: int, *, seed: int, batch_multiplier: int = 1
) -> MeshLoader: ...


@overload
def mesh_dataloader(
    loader: object, data_parallel_size: int, data_parallel_rank: int, *, seed: int, batch_multiplier: int = 1
) -> Any: ...


def mesh_dataloader(
    loader: object, data_parallel_size: int, data_parallel_rank: int, *, seed: int, batch_multiplier: int = 1
) -> Any:
    """A copy of `loader` that reads this data-parallel rank's share; the user's object stays as it is.

    Its order is a function of (`seed`, epoch): `RandomSampler` (`shuffle=True`, `num_samples`, `replacement`) and
    `DistributedSampler` become an order of our own; a `SequentialSampler` keeps its order; any other sampler, or batch sampler,
    is read alike on every rank. A generator that the user gave to a sampler or loader adds its seed to the key, so it
    must have the same seed on all ranks.

    The copy is an instance of the user's class. It has an attribute `mesh` (a `MeshPosition`): `resume`, `rows_of`,
    `global_rows_of`, `batches_done`. A loader that is already converted for the same settings is returned as it is. An
    iterable that is no DataLoader passes unchanged where there is one data-parallel rank.

    Args:
        loader: the user's loader.
        data_parallel_size: how many ranks share the samples.
        data_parallel_rank: which of them this is; tensor and pipeline peers give the same.
        seed: the run's seed.
        batch_multiplier: the batch size is multiplied by it: one process that stands for so many ranks.

    Raises:
        DataError: data that cannot feed the ranks: empty, without a length, already divided by somebody else.
    """
    settings = (data_parallel_size, data_parallel_rank, seed, batch_multiplier)
    if not isinstance(loader, DataLoader):
        return _unsplit(loader, data_parallel_size)
    if isinstance(loader, MeshLoader):
        if loader.mesh_settings == settings:
            return loader
        loader = loader.mesh_source
    loader_class = mesh_class(cast(Any, type(loader)))
    clone = cast(MeshLoader, object.__new__(loader_class))
    vars(clone).update(vars(copy.copy(loader)))
    if isinstance(loader.dataset, IterableDataset):
        changed = _stream_attributes(loader, settings)
    else:
        changed = _map_attributes(loader, settings)
    changed |= {"mesh_source": loader, "mesh_settings": settings, "_iterator": None}
    vars(clone).update(changed)  # DataLoader's own __setattr__ forbids it
    return clone


def _unsplit(loader: object, data_parallel_size: int) -> object:
    if data_parallel_size > 1 and not getattr(loader, "data_parallel_sharded", False):
        rule = "only a torch DataLoader can be shared out over data-parallel ranks"
        advice = "Give a DataLoader, or set data_parallel_sharded = True on an iterable that yields this rank's share only"
        numbers = f"data_parallel_size is {data_parallel_size}"
        raise DataError(message("dataloader", type(loader).__name__, rule, numbers, advice))
    return with_common_end(cast(Any, loader)) if data_parallel_size > 1 else loader


def _with_worker_seeds(mesh: MeshPosition, loader: DataLoader[Any], changed: dict[str, Any]) -> dict[str, Any]:
    if loader.generator is not None:
        mesh.mix_seed(loader.generator.initial_seed())
    return {**changed, "mesh": mesh, "generator": mesh.worker_generator}


def _stream_attributes(loader: DataLoader[Any], settings: tuple[int, int, int, int]) -> dict[str, Any]:
    """The changed attributes of a loader over an `IterableDataset`."""
    size, rank, seed, multiplier = settings
    _refuse_data_pipes(loader)
    whole_items = loader.batch_size is None
    if whole_items and multiplier > 1:
        raise _cannot_join()
    batch_size = (loader.batch_size or 1) * multiplier
    spec = StreamSpec(loader.dataset, batch_size, loader.num_workers, loader.drop_last, multiplier)
    mesh = MeshStream(spec, size, rank, seed=seed)
    collate = mesh.share_collate(loader.collate_fn, whole_items)
    return _with_worker_seeds(mesh, loader, {"batch_sampler": mesh, "sampler": mesh, "collate_fn": collate})


def _map_attributes(loader: DataLoader[Any], settings: tuple[int, int, int, int]) -> dict[str, Any]:
    """The changed attributes of a loader over a dataset with indices."""
    size, rank, seed, multiplier = settings
    _refuse_data_pipes(loader)
    if loader.batch_sampler is None:
        mesh = _item_position(loader.sampler, settings)
        return _with_worker_seeds(mesh, loader, {"sampler": mesh})
    wrapper: Any = None
    batch_sampler: Any = loader.batch_sampler
    if type(batch_sampler).__name__ == "_IndexBatchSamplerWrapper":  # Lightning's, around what it predicts with
        wrapper, batch_sampler = type(batch_sampler), batch_sampler._batch_sampler
    if type(batch_sampler) is BatchSampler:
        order = _order_of(batch_sampler.sampler, seed)
        batch_size, drop_last = batch_sampler.batch_size * multiplier, batch_sampler.drop_last
        mesh = MeshBatchSampler(order, batch_size, size, rank, shuffle=False, seed=seed, drop_last=drop_last)
    else:
        _refuse_divided(batch_sampler)
        mesh = MeshListBatchSampler(batch_sampler, size, rank, seed=seed, batch_multiplier=multiplier)
    return _with_worker_seeds(mesh, loader, {"batch_sampler": wrapper(mesh) if wrapper else mesh})


def _item_position(sampler: Any, settings: tuple[int, int, int, int]) -> MeshPosition:
    """For `batch_size=None`: what the sampler yields goes to the dataset as it is."""
    size, rank, seed, multiplier = settings
    if type(sampler) in (RandomSampler, SequentialSampler):
        if multiplier > 1:
            raise _cannot_join()
        return MeshItemSampler(_order_of(sampler, seed), 1, size, rank, shuffle=False, seed=seed)
    _refuse_divided(sampler)
    return MeshListBatchSampler(sampler, size, rank, seed=seed, batch_multiplier=multiplier, whole_entries=True)


def _order_of(sampler: Any, seed: int) -> Order:
    """The order that stands for `sampler`."""
    if type(sampler) is SequentialSampler:
        return KeyedOrder(len(sampler.data_source))
    if type(sampler) is RandomSampler:
        for generator in generators_of(sampler):
            seed = random_key(USER_SAMPLER, seed, generator.initial_seed())
        return KeyedOrder(len(sampler.data_source), True, seed, sampler.num_samples, sampler.replacement)
    if type(sampler) is DistributedSampler:
        return KeyedOrder(len(cast(Sized, sampler.dataset)), sampler.shuffle, random_key(USER_SAMPLER, seed, sampler.seed))
    _refuse_divided(sampler)
    return SampledOrder(sampler, seed)


def _refuse_divided(sampler: Any) -> None:
    """Raises where `sampler` yields one rank's share already, or has no end that is known."""
    for owner in (sampler, getattr(sampler, "sampler", None)):
        replicas = getattr(owner, "num_replicas", 1)
        if isinstance(owner, DistributedSampler) and replicas > 1:
            rule = "it divides the samples by its own number of replicas, which knows nothing of tensor and pipeline peers"
            advice = "Give the loader a sampler over all samples; they are shared out over the data-parallel ranks for you"
            raise DataError(message("sampler", type(owner).__name__, rule, f"num_replicas is {replicas}", advice))
    try:
        len(sampler)
    except (TypeError, NotImplementedError):
        rule = "its order is read once an epoch, so it must have a length"
        advice = "Give it __len__, or make the data an IterableDataset"
        raise DataError(message("sampler", type(sampler).__name__, rule, "", advice)) from None


def _refuse_data_pipes(loader: DataLoader[Any]) -> None:
    if not isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        return
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if world_size > 1:
        rule = "torch's DataLoader divides a data pipe by the world size, so tensor and pipeline peers read other samples"
        advice = "Give a Dataset or an IterableDataset"
        raise DataError(message("dataset", type(loader.dataset).__name__, rule, f"The world has {world_size} ranks", advice))


def _cannot_join() -> DataError:
    rule = "batches that the dataset makes itself cannot be joined to a larger one"
    return DataError(message("batch_size", None, rule, "", "Give the loader a batch_size"))
