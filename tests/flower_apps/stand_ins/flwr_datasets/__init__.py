"""Stands in for Flower's `flwr_datasets`: the made-up sets, in parts of equal size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import datasets


class FederatedDataset:
    """A set in parts."""

    def __init__(self, dataset: str, partitioners: Mapping[str, Any], **_: Any) -> None:
        self._splits = datasets.load_dataset(dataset)
        self._partitioners = partitioners

    def load_partition(self, partition_id: int, split: str = "train") -> Any:
        partitioner = self._partitioners[split]
        partitioner.dataset = self._splits[split]
        return partitioner.load_partition(partition_id)

    def load_split(self, split: str) -> Any:
        return self._splits[split]
