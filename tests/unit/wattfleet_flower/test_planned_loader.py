"""A loader with the planned batch size: its number of minibatches, and the samples in them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.fakes.agent_socket import answered, assigned, context
from tests.fakes.recording_agent import recording_agent
from wattfleet.errors import InvalidInputError
from wattfleet_flower import planned_loader, planned_work, power_mode_mod, profiled
from wattfleet_flower.client.agent_training import CURRENT_TRAINING
from wattfleet_flower.client.loaders import PlannedWork
from wattfleet_proto.assignment import WORK_KEY, AssignedWork


class Planned:
    """The part of a training that a loader uses."""

    def __init__(self, work: AssignedWork | None) -> None:
        self.work = work
        self.has_taken_epochs = False


@contextmanager
def planned(batch: int, passes: float = 1.0, lr_scale: float = 1.0) -> Iterator[None]:
    token = CURRENT_TRAINING.set(Planned(AssignedWork(batch, lr_scale, passes)))  # type: ignore[arg-type]
    try:
        yield
    finally:
        CURRENT_TRAINING.reset(token)


def numbered(count: int) -> Dataset[Any]:
    return TensorDataset(torch.arange(count))


def minibatches(loader: DataLoader[Any]) -> list[list[int]]:
    return [samples.tolist() for (samples,) in loader]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(1, 80), st.floats(0.01, 4.0), st.booleans())
def test_an_epoch_has_the_planned_samples_in_batches_of_the_planned_size(
    count: int, batch: int, passes: float, drop_last: bool
) -> None:
    samples = max(1, round(passes * count))
    with planned(batch, passes):
        loader = planned_loader(numbered(count), 7, drop_last=drop_last)
        epoch = minibatches(loader)
    assert len(loader) == len(epoch) == (samples // batch if drop_last else math.ceil(samples / batch))
    assert all(len(each) == batch for each in epoch[:-1])
    if not drop_last:
        seen = Counter(number for each in epoch for number in each)
        assert seen.total() == samples
        assert set(seen) <= set(range(count))
        rarest = min(seen[number] for number in range(count))
        assert max(seen.values()) - rarest <= 1, "all samples come equally often, but for the last part of a pass"


def test_samples_come_twice_or_not_at_all_where_a_batch_needs_more_or_fewer() -> None:
    for passes, expected in ((2.0, {2}), (1.5, {1, 2}), (1.0, {1}), (0.25, {0, 1})):
        with planned(8, passes):
            seen = Counter(number for each in minibatches(planned_loader(numbered(100), 16)) for number in each)
        assert {seen[number] for number in range(100)} == expected, passes
        assert seen.total() == 100 * passes


def test_each_epoch_and_each_pass_has_an_order_of_its_own() -> None:
    with planned(50, passes=2.0):
        loader = planned_loader(numbered(50), 16)
        orders = [tuple(each) for _ in range(2) for each in minibatches(loader)]
    assert len(set(orders)) == 4, "the probability of equal orders is 1 in 50 factorial"
    assert all(sorted(order) == list(range(50)) for order in orders)


def test_the_same_generator_gives_the_same_samples() -> None:
    def epoch() -> list[list[int]]:
        with planned(8, passes=1.5):
            return minibatches(planned_loader(numbered(40), 16, generator=torch.Generator().manual_seed(5)))

    assert epoch() == epoch()


def test_options_reach_the_loader_of_torch() -> None:
    with planned(4):
        loader = planned_loader(numbered(8), 2, collate_fn=len, pin_memory=False)
        assert list(loader) == [4, 4]
        with pytest.raises(ValueError, match="mutually exclusive"):
            planned_loader(numbered(8), 2, shuffle=True)


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match="a device without samples cannot train"):
        planned_loader(numbered(0), 16)


# --- without a plan -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 15, 16, 100])
def test_without_a_planned_training_it_is_an_ordinary_loader(count: int) -> None:
    loader = planned_loader(numbered(count), 16)
    assert [len(each) for each in loader] == [len(each) for each in DataLoader(numbered(count), 16)]
    assert (loader.batch_size, len(loader)) == (16, len(DataLoader(numbered(count), 16)))
    assert sorted(number for each in minibatches(loader) for number in each) == list(range(count))


def of_generator(loader: Callable[..., Any]) -> list[list[int]]:
    made = loader(numbered(40), 16, generator=torch.Generator().manual_seed(7))
    return minibatches(made) + minibatches(made)


def of_global_seed(loader: Callable[..., Any]) -> list[list[int]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return minibatches(loader(numbered(40), 16))


def shuffled(dataset: Dataset[Any], batch_size: int, generator: Any = None) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size, shuffle=True, generator=generator)


@pytest.mark.parametrize("seeded", [of_generator, of_global_seed])
def test_without_a_planned_training_a_seed_gives_the_order_of_an_ordinary_loader(
    seeded: Callable[[Callable[..., Any]], list[list[int]]],
) -> None:
    assert seeded(planned_loader) == seeded(shuffled)


def test_without_a_planned_training_the_work_is_the_apps_own() -> None:
    assert planned_work(16) == PlannedWork(16, lr_scale=1.0, passes=1.0, epochs=1)
    token = CURRENT_TRAINING.set(Planned(None))  # type: ignore[arg-type]
    try:
        assert planned_work(16) == PlannedWork(16, lr_scale=1.0, passes=1.0, epochs=1), "the plan has chosen no batch"
    finally:
        CURRENT_TRAINING.reset(token)


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_batch_size_of_the_app_that_cannot_be_is_refused_planned_or_not(batch_size: int) -> None:
    with pytest.raises(InvalidInputError, match="a batch must have 1 to"):
        planned_loader(numbered(8), batch_size)
    with planned(4), pytest.raises(InvalidInputError, match="a batch must have 1 to"):
        planned_work(batch_size)


# --- planned by a message -----------------------------------------------------------------------------------------


def test_an_app_trains_as_its_message_says_and_the_agent_is_told_so(tmp_path: Path) -> None:
    seen: list[Any] = []

    def app(message: Message, _: Context) -> Message:
        loader = planned_loader(numbered(100), 16)
        seen.append((planned_work(16).lr_scale, [len(each) for (each,) in profiled(loader)]))
        return answered(message, _)

    request = assigned()
    request.content[WORK_KEY] = ConfigRecord(AssignedWork(32, lr_scale=2.0, passes=1.28).to_record())
    with recording_agent(tmp_path / "agent.sock") as agent:
        where = context(**{"agent-socket": str(agent.socket)})
        assert not power_mode_mod(request, where, app).has_error()
        assert not power_mode_mod(assigned(), where, app).has_error()
    assert seen == [(2.0, [32] * 4), (1.0, [16] * 6 + [4])]
    assert [(loader.batch, loader.minibatches_per_epoch) for loader in agent.loaders] == [(32, 4), (16, 7)]


def test_a_message_that_states_impossible_work_is_refused(tmp_path: Path) -> None:
    request = assigned()
    request.content[WORK_KEY] = ConfigRecord({"batch": 0, "lr-scale": 1.0, "passes": 1.0})
    with recording_agent(tmp_path / "agent.sock") as agent:
        with pytest.raises(InvalidInputError, match="a batch must have 1 to"):
            power_mode_mod(request, context(**{"agent-socket": str(agent.socket)}), answered)
    assert agent.requests == [], "no training has begun"
