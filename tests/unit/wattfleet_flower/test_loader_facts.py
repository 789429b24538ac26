"""The facts about an app's loader that the agent gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from edge_agent.profiling.known_workload import KnownWorkload
from wattfleet.modes import LARGEST_COUNT, Workload, WorkloadFacts
from wattfleet_flower.client.agent_training import facts_of
from wattfleet_proto.v1 import local_pb2

DATA = TensorDataset(torch.zeros(100, 1))


class Batches(list[int]):
    """A user-defined loader."""

    def __init__(self, length: int, **attributes: Any) -> None:
        super().__init__(range(length))
        vars(self).update(attributes)


class Endless:
    """A loader with a length but no samples."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("loader", "told"),
    [
        (
            DataLoader(DATA, batch_size=16, num_workers=2),
            {"batch": 16, "loader_workers": 2, "minibatches_per_epoch": 7},
        ),
        (
            DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 8, drop_last=True)),
            {"batch": 8, "loader_workers": 0, "minibatches_per_epoch": 12},
        ),
        (range(521), {"minibatches_per_epoch": 521}),
        (Batches(3, batch_size=np.int64(32)), {"batch": 32, "minibatches_per_epoch": 3}),
        (Batches(0, batch_size=0, num_workers=-1), {}),
        (Batches(2, batch_size=LARGEST_COUNT + 1, num_workers=True), {"minibatches_per_epoch": 2}),
        (Batches(2, batch_size="16", num_workers=1.5), {"minibatches_per_epoch": 2}),
        (iter(range(3)), {}),
        (Endless(2**31 - 1), {"minibatches_per_epoch": 2**31 - 1}),
        (Endless(2**31), {}),
        (SimpleNamespace(batch_size=4), {"batch": 4}),
    ],
)
def test_a_loader_tells_what_it_knows_and_nothing_else(loader: Any, told: dict[str, int]) -> None:
    assert facts_of(loader) == local_pb2.LoaderSeen(**told)


def test_a_length_that_is_not_implemented_is_unknown() -> None:
    class Unknown(Endless):
        def __len__(self) -> int:
            raise NotImplementedError

    assert facts_of(Unknown(0)) == local_pb2.LoaderSeen()


@pytest.mark.parametrize(
    "loader",
    [
        Batches(2, batch_size=LARGEST_COUNT, num_workers=LARGEST_COUNT),
        Batches(2, batch_size=LARGEST_COUNT + 1, num_workers=LARGEST_COUNT + 1),
        Batches(2, batch_size=1, num_workers=1025),
        Endless(2**31 - 1),
        Endless(2**31),
    ],
)
def test_the_agent_accepts_whatever_it_is_told(loader: Any) -> None:
    told = facts_of(loader)
    batch = told.batch if told.HasField("batch") else None
    workers = told.loader_workers if told.HasField("loader_workers") else None
    length = told.minibatches_per_epoch if told.HasField("minibatches_per_epoch") else None
    known = KnownWorkload(Workload("digits")).completed(WorkloadFacts(batch=batch, loader_workers=workers), length)
    assert known.workload.facts.batch == batch
