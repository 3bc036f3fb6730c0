"""A layout: all parallel sizes together, and where each rank stands in it."""

from __future__ import annotations

from dataclasses import dataclass

SHARDINGS = ("ddp", "zero1", "zero2", "zero3")
ACTIVATION_CHECKPOINTS = ("none", "selective", "full")

# Mesh axes, outer to inner: the most talkative axis is innermost, so that tensor parallelism stays inside a node.
MESH_AXES = (
    "pipeline_parallel",
    "data_parallel_replicate",
    "data_parallel_shard",
    "context_parallel",
    "tensor_parallel",
)


@dataclass(frozen=True)
class Coordinate:
    """Where one rank stands: an index along each mesh axis; `data_parallel` is the flattened pair."""

    pipeline_parallel: int
    data_parallel_replicate: int
    data_parallel_shard: int
    context_parallel: int
    tensor_parallel: int
    data_parallel: int


@dataclass(frozen=True)
class Layout:
    """All sizes of a run. `world_size` ranks in row-major order over `MESH_AXES`.

    >>> layout = Layout(data_parallel_size=2, tensor_parallel_size=2, pipeline_parallel_size=2)
    >>> layout.world_size, layout.coordinate(5).pipeline_parallel, layout.coordinate(5).tensor_parallel
    (8, 1, 1)
    >>> layout.name
    'dp2_tp2_pp2'
    """

    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    data_parallel_replicate_size: int = 1
    sharding: str = "ddp"
    sequence_parallel: bool = False
    schedule: str = "1F1B"
    stages_per_rank: int = 1
    activation_checkpoint: str = "none"
    compile: bool = False

    @property
    def replicate_size(self) -> int:
        """Size of the axis `data_parallel_replicate`: everything under `ddp`, else the number of replicas of a shard group."""
        return self.data_parallel_size if self.sharding == "ddp" else self.data_parallel_replicate_size

    @property
    def shard_size(self) -> int:
        """Size of the axis `data_parallel_shard`: 1 under `ddp`."""
        return self.data_parallel_size // self.replicate_size

    @property
    def state_shards(self) -> int:
        """Ranks over which `sharding` splits states: data-parallel shards, and the context-parallel ranks of each."""
        return 1 if self.sharding == "ddp" else self.shard_size * self.context_parallel_size

    @property
    def num_stages(self) -> int:
        return self.pipeline_parallel_size * self.stages_per_rank

    @property
    def axis_sizes(self) -> tuple[int, ...]:
        """Sizes in the order of `MESH_AXES`."""
        return (
            self.pipeline_parallel_size,
            self.replicate_size,
            self.shard_size,
            self.context_parallel_size,
            self.tensor_parallel_size,
        )

    @property
    def world_size(self) -> int:
        replicas = self.replicate_size
        shards = self.data_parallel_size // replicas
        return self.pipeline_parallel_size * replicas * shards * self.context_parallel_size * self.tensor_parallel_size

    def coordinate(self, rank: int) -> Coordinate:
        """The coordinate of a global rank (row-major over `MESH_AXES`)."""
        rest, indices = rank, []
        for size in reversed(self.axis_sizes):
            indices.append(rest % size)
            rest //= size
        pipeline, replicate, shard, context, tensor = reversed(indices)
        return Coordinate(pipeline, replicate, shard, context, tensor, replicate * self.shard_size + shard)

    @property
    def name(self) -> str:
        """A short name such as `dp2_tp2_pp2_zero1`; `single` for one process."""
        sizes = (
            ("dp", self.data_parallel_size),
            ("tp", self.tensor_parallel_size),
            ("pp", self.pipeline_parallel_size),
            ("cp", self.context_parallel_size),
        )
        words = [f"{axis}{size}" for axis, size in sizes if size > 1]
        if self.sharding != "ddp":
            words.append(self.sharding)
        if self.sequence_parallel:
            words.append("sp")
        return "_".join(words) or "single"
