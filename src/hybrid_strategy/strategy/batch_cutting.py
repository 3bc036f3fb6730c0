"""How many micro-batches a batch is cut into, and along which tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from hybrid_strategy.errors import DataError, message
from hybrid_strategy.parallel.trees import Cut, batch_dim, can_be_cut, count_rows, cut_batch, map_tensors, tensors_of


class BatchCutter:
    """Cuts batches along their batch dimension.

    A tensor that once did not have the batch's size is one that the samples share (a mask, positions), and stays whole even
    where a later batch happens to have as many rows as it has.

    Args:
        microbatches_of: rows of a batch -> number of micro-batches.
        batch_dims: batch key -> batch dimension (`None`: passes whole), where it is not 0.

    Attributes:
        found: dotted path -> batch dimension, as the loader of the batches at hand has found out; `batch_dims` has precedence.
    """

    def __init__(self, microbatches_of: Callable[[int], int], batch_dims: Mapping[str, int | None]) -> None:
        self._microbatches_of, self._given = microbatches_of, dict(batch_dims)
        self.found: Mapping[str, int | None] = {}
        self._shared: dict[str, int | None] = {}
        self._cut_before: set[str] = set()

    def cut(self, batch: Any, real_rows: int | None, most_rows: int | None = None) -> Cut:
        """The micro-batches of `batch`.

        Args:
            real_rows: samples that the loader put into it; 0 where it is one row of padding; `None` where that is not known.
            most_rows: samples of the data-parallel rank that has most of this step, where all must play equally many
                micro-batches: missing ones are made of the first row and count nothing.

        Raises:
            DataError: a tensor was cut in an earlier batch and does not have the batch's size now.
        """
        rows = self._rows(batch, real_rows)
        parts = min(self._microbatches_of(rows), rows) if can_be_cut(batch, rows, self._dims) else 1
        if parts > 1:
            self._learn(batch, rows)
        cut = cut_batch(batch, parts, self._dims, rows)
        sizes = [0] * parts if real_rows == 0 else cut.rows
        wanted = parts if most_rows is None else min(self._microbatches_of(most_rows), most_rows)
        missing = max(wanted - parts, 0)
        first = cut.micro_batches[0]
        spare = [map_tensors(lambda _, tensor: tensor.clone(), first) for _ in range(missing)]  # a step may take its batch apart
        return Cut([*cut.micro_batches, *spare], [*sizes, *[0] * missing])

    def rows_of(self, batch: Any) -> int:
        """Rows of a batch of which nothing is known."""
        return self._rows(batch, None)

    def _rows(self, batch: Any, real_rows: int | None) -> int:
        rows = count_rows(batch, self._dims)
        wanted = None if real_rows is None else max(real_rows, 1)
        if wanted is None or rows == wanted:
            return rows
        cuttable = self._cuttable(batch)
        if not cuttable:
            return wanted  # an object of the user's own: it cannot be cut, but the loader has counted its samples
        if wanted in {tensor.shape[dim] for _, tensor, dim in cuttable}:
            return wanted
        self._refuse_other_dim(cuttable, rows, wanted)
        return rows

    def _refuse_other_dim(self, cuttable: list[tuple[str, Tensor, int]], rows: int, wanted: int) -> None:
        """A first dimension that is not the samples, where another one may be: `(sequence, batch)` order, not declared."""
        for name, tensor, dim in cuttable:
            if tensor.shape[dim] == rows and wanted in tensor.shape and batch_dim(tuple(name.split(".")), self._given, -1) == -1:
                rule = f"the loader put {wanted} samples into the batch, and its first dimension has another size"
                advice = f"Set batch_dims={{{name!r}: {list(tensor.shape).index(wanted)}}}, or 0 where its rows are right to cut"
                raise DataError(message(f"batch[{name!r}]", tuple(tensor.shape), rule, "", advice))

    @property
    def _dims(self) -> dict[str, int | None]:
        found = {key: dim for key, dim in self.found.items() if not {key, key.rpartition(".")[2]} & self._given.keys()}
        return {**self._shared, **found, **self._given}

    def _cuttable(self, batch: Any) -> list[tuple[str, Tensor, int]]:
        found, dims = [], self._dims
        for path, tensor in tensors_of(batch):
            dim = batch_dim(path, dims)
            if dim is not None and tensor.dim() > dim:
                found.append((".".join(path), tensor, dim))
        return found

    def _learn(self, batch: Any, rows: int) -> None:
        for name, tensor, dim in self._cuttable(batch):
            if tensor.shape[dim] == rows:
                self._cut_before.add(name)
            elif name in self._cut_before:
                rule = "its size along the batch dimension was that of an earlier batch, so it was cut there"
                advice = f"Say what it is: batch_dims={{{name!r}: None}} where all samples share it, else its batch dimension"
                raise DataError(message(f"batch[{name!r}]", tuple(tensor.shape), rule, f"This batch has {rows} rows", advice))
            else:
                self._shared[name] = None
