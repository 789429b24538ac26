"""Stands in for the partitioners of `flwr_datasets`."""

from __future__ import annotations

from typing import Any

import numpy as np


class IidPartitioner:
    """Every n-th row."""

    def __init__(self, num_partitions: int = 1, *_: Any, **__: Any) -> None:
        self.dataset: Any = None
        self._parts = num_partitions

    def load_partition(self, partition_id: int) -> Any:
        return self.dataset.select(np.arange(partition_id, len(self.dataset), self._parts))


class NaturalIdPartitioner:
    """Rows by the values of a column."""

    def __init__(self, partition_by: str) -> None:
        self.dataset: Any = None
        self._column = partition_by

    def load_partition(self, partition_id: int) -> Any:
        values = self.dataset.columns[self._column]
        groups = sorted(set(values))
        return self.dataset.select(np.flatnonzero(values == groups[partition_id % len(groups)]))


DirichletPartitioner = IidPartitioner
ExponentialPartitioner = LinearPartitioner = SquarePartitioner = IidPartitioner
