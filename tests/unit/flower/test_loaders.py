"""Training on a node: loaders with planned batch sizes, planned epochs, facts of loaders and steps, and deadlines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Error, Message
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset

from edge_agent.profiling.known_workload import KnownWorkload
from tests.fakes.agent_socket import RecordingAgent, answered, assigned, context, recording_agent
from tests.fakes.short_forms import examples
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import LARGEST_COUNT, Workload, WorkloadFacts
from wattfleet.flower import (
    StepCount,
    count_step,
    planned_loader,
    planned_work,
    power_mode_mod,
    profiled,
    until_deadline,
)
from wattfleet.flower.client.agent_training import CURRENT_TRAINING, TrainingDeadline, facts_of
from wattfleet.flower.client.loaders import PlannedWork
from wattfleet_proto.assignment import RECORD_KEY, TOOK_EPOCHS_KEY, WORK_KEY, AssignedWork, RoundAssignment
from wattfleet_proto.v1 import local_pb2

# --- Planned loader ---------------------------------------------------------------------------------------------------
# A loader with the planned batch size: its number of minibatches, and the samples in them.


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


@examples(60)
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


# --- Planned epochs ---------------------------------------------------------------------------------------------------
# The local epochs that a plan chose, as an app gets them, and whether the app asked for them.

BOTH = AssignedWork(32, lr_scale=2.0, passes=1.25, epochs=8)
EPOCHS = AssignedWork(epochs=8)
BATCH = AssignedWork(32, lr_scale=2.0, passes=1.25)
App = Callable[[Message, Context], Message]


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[RecordingAgent]:
    with recording_agent(tmp_path / "agent.sock") as running:
        yield running


def train(agent: RecordingAgent, work: AssignedWork | None, app: App) -> Message:
    request = assigned()
    if work is not None:
        request.content[WORK_KEY] = ConfigRecord(work.to_record())
        of_round = RoundAssignment("7/1", "orin-nano-0", epochs=work.epochs or 1.0)
        request.content[RECORD_KEY] = ConfigRecord(of_round.to_record())
    return power_mode_mod(request, context(**{"agent-socket": str(agent.socket)}), app)


def asking(seen: list[PlannedWork], *arguments: Any, **named: Any) -> App:
    """An app that asks for its planned work."""

    def app(message: Message, where: Context) -> Message:
        seen.append(planned_work(*arguments, **named))
        return answered(message, where)

    return app


def took(reply: Message) -> bool | None:
    """Whether the reply states that the app took its epochs; None if it states nothing."""
    said = reply.content.get(RECORD_KEY, {}).get(TOOK_EPOCHS_KEY)
    assert said is None or isinstance(said, bool)
    return said


# --- the epochs that an app gets ------------------------------------------------------------------------------------


def test_outside_of_a_training_the_epochs_are_the_apps_own() -> None:
    assert planned_work(16, epochs=3) == planned_work(16, 3) == PlannedWork(16, 1.0, 1.0, epochs=3)
    assert planned_work(16).epochs == 1


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (BOTH, PlannedWork(32, 2.0, 1.25, epochs=8)),
        (EPOCHS, PlannedWork(16, 1.0, 1.0, epochs=8)),
        (BATCH, PlannedWork(32, 2.0, 1.25, epochs=3)),
        (None, PlannedWork(16, 1.0, 1.0, epochs=3)),
    ],
    ids=["batch and epochs", "epochs", "batch", "nothing"],
)
def test_an_app_gets_what_the_plan_has_chosen_and_else_its_own(
    agent: RecordingAgent, work: AssignedWork | None, expected: PlannedWork
) -> None:
    seen: list[PlannedWork] = []
    assert not train(agent, work, asking(seen, 16, epochs=3)).has_error()
    assert seen == [expected]


@pytest.mark.parametrize("epochs", [0, -1, 2**63])
def test_epochs_of_the_app_that_cannot_be_are_refused_planned_or_not(agent: RecordingAgent, epochs: int) -> None:
    with pytest.raises(InvalidInputError, match="a device trains 1 to .* local epochs"):
        planned_work(16, epochs=epochs)
    with pytest.raises(InvalidInputError, match="a device trains 1 to .* local epochs"):
        train(agent, EPOCHS, asking([], 16, epochs=epochs))


def test_the_agent_is_told_the_planned_epochs(agent: RecordingAgent) -> None:
    train(agent, EPOCHS, asking([], 16, epochs=3))
    [[start, *_]] = agent.requests
    assert start.start.epochs == 8


# --- whether the app has asked --------------------------------------------------------------------------------------


def test_the_reply_says_that_the_app_asked_for_the_epochs(agent: RecordingAgent) -> None:
    for work in (EPOCHS, BOTH):
        assert took(train(agent, work, asking([], 16, epochs=3))) is True


def test_an_app_that_asks_once_for_all_and_then_for_the_batch_has_asked(agent: RecordingAgent) -> None:
    def app(message: Message, where: Context) -> Message:
        for _ in range(planned_work(16, epochs=3).epochs):
            planned_work(16)
        return answered(message, where)

    assert took(train(agent, EPOCHS, app)) is True


def reads_its_loader(message: Message, where: Context) -> Message:
    loader = profiled(planned_loader(TensorDataset(torch.arange(100)), 16))
    assert {len(samples) for (samples,) in loader} <= {32, 29}, "125 samples in the planned batches"
    return answered(message, where)


@pytest.mark.parametrize("app", [answered, asking([], 16), reads_its_loader], ids=["nothing", "the batch", "a loader"])
def test_the_reply_says_that_the_app_did_not_ask_for_the_epochs(agent: RecordingAgent, app: App) -> None:
    assert took(train(agent, BOTH, app)) is False


@pytest.mark.parametrize("work", [None, BATCH])
@pytest.mark.parametrize("app", [answered, asking([], 16, epochs=3)], ids=["does not ask", "asks"])
def test_without_planned_epochs_the_reply_says_nothing_of_them(
    agent: RecordingAgent, work: AssignedWork | None, app: App
) -> None:
    reply = train(agent, work, app)
    assert TOOK_EPOCHS_KEY not in reply.content.get(RECORD_KEY, {})


def test_the_reply_says_it_besides_what_was_observed(agent: RecordingAgent) -> None:
    agent.observed = local_pb2.TrainingFinished(epoch_s=12.5, power_w=9.5)

    def app(message: Message, where: Context) -> Message:
        epochs = planned_work(16, epochs=3).epochs
        for _ in range(epochs):
            list(until_deadline(range(2)))
        return answered(message, where)

    record = train(agent, EPOCHS, app).content[RECORD_KEY]
    assert {key: record[key] for key in (TOOK_EPOCHS_KEY, "observed-epoch-s", "observed-power-w", "cut")} == {
        TOOK_EPOCHS_KEY: True,
        "observed-epoch-s": 12.5,
        "observed-power-w": 9.5,
        "cut": False,
    }


def test_an_app_that_fails_says_nothing_of_its_epochs(agent: RecordingAgent) -> None:
    def app(message: Message, where: Context) -> Message:
        return Message(Error(2, "no data"), reply_to=message)

    assert train(agent, EPOCHS, app).has_error()


def test_one_training_says_nothing_of_the_next(agent: RecordingAgent) -> None:
    assert took(train(agent, EPOCHS, asking([], 16, epochs=3))) is True
    assert took(train(agent, EPOCHS, answered)) is False


@pytest.mark.parametrize("epochs", [0, -1, 2.5, "many", 10**17])
def test_a_message_that_states_impossible_epochs_is_refused(agent: RecordingAgent, epochs: Any) -> None:
    request = assigned()
    request.content[WORK_KEY] = ConfigRecord({"epochs": epochs})
    with pytest.raises(InvalidInputError):
        power_mode_mod(request, context(**{"agent-socket": str(agent.socket)}), answered)
    assert agent.requests == [], "no training has begun"


# --- Loader facts -----------------------------------------------------------------------------------------------------
# The facts about an app's loader that the agent gets.

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


# --- Step count -------------------------------------------------------------------------------------------------------
# The counted parameters and operations of a step, compared with counts by hand.

# A matrix product of [m, k] and [k, n] needs 2 m k n operations.
FIRST, SECOND = 2 * 8 * 10 * 20, 2 * 8 * 20 * 5


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))


def total(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.sum()


def test_inference_of_a_perceptron() -> None:
    found = count_step(perceptron(), (torch.ones(8, 10),))
    assert found == StepCount(10 * 20 + 20 + 20 * 5 + 5, FIRST + SECOND)


def test_training_of_a_perceptron() -> None:
    # Backward pass: one product for the gradient of each weight matrix, and one for that of the hidden layer.
    found = count_step(perceptron(), (torch.ones(8, 10),), total)
    assert found.step_flops == 2 * (FIRST + SECOND) + SECOND


def test_a_convolution() -> None:
    layer = nn.Conv2d(3, 4, kernel_size=3, padding=1)
    forward = 2 * (2 * 4 * 8 * 8) * (3 * 3 * 3)  # each output sums 27 products
    images = torch.ones(2, 3, 8, 8)
    assert count_step(layer, (images,)) == StepCount(4 * 27 + 4, forward)
    # Backward pass: only the gradient of the weights, since the images need none.
    assert count_step(layer, (images,), total).step_flops == 2 * forward


def test_counting_changes_neither_the_network_nor_random_numbers() -> None:
    network = nn.Sequential(nn.Linear(10, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in network.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    count_step(network, (torch.rand(8, 10, generator=torch.Generator().manual_seed(0)),), total)
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters())


def test_a_network_that_cannot_be_trained_is_refused() -> None:
    frozen = perceptron().requires_grad_(False)
    with pytest.raises(InvalidInputError, match="set requires_grad, or leave the loss out to count inference"):
        count_step(frozen, (torch.ones(8, 10),), total)
    assert count_step(frozen, (torch.ones(8, 10),)).step_flops == FIRST + SECOND


def test_the_counts_are_facts_of_a_workload() -> None:
    found = count_step(perceptron(), (torch.ones(8, 10),), total)
    facts = WorkloadFacts(batch=8, parameters=found.parameters, step_flops=found.step_flops)
    assert facts.step_flops == 2 * (FIRST + SECOND) + SECOND


# --- Deadline ---------------------------------------------------------------------------------------------------------
# Training until a deadline, with a clock that the batches advance.


class TimedApp:
    """An app whose batches take time."""

    def __init__(self, deadline_s: float | None, epochs: float = 1.0) -> None:
        self.at_s = 100.0
        self.deadline = TrainingDeadline(epochs, deadline_s, lambda: self.at_s)
        self.seen: list[int] = []

    def trains(self, loader: Iterable[int], took_s: Callable[[int], float] = lambda batch: 1.0) -> None:
        for batch in self.deadline.bounded(loader):
            self.seen.append(batch)
            self.at_s += took_s(batch)


def without_length(loader: Iterable[int]) -> Iterator[int]:
    yield from loader


def test_no_batch_is_begun_that_would_end_too_late() -> None:
    app = TimedApp(deadline_s=10.5)
    app.trains(range(100))
    assert app.seen == list(range(10))
    assert app.at_s - 100 <= 10.5
    assert (app.deadline.cut, app.deadline.share, app.deadline.epochs_done) == (True, 0.1, 0.1)


def test_what_ends_in_time_is_whole() -> None:
    app = TimedApp(deadline_s=5.0)
    app.trains(range(5))
    assert app.seen == list(range(5))
    assert (app.deadline.cut, app.deadline.share, app.deadline.epochs_done) == (False, 1.0, None)


def test_after_the_deadline_later_epochs_give_nothing() -> None:
    app = TimedApp(deadline_s=12.0, epochs=3.0)
    for _ in range(3):
        app.trains(range(8))
    assert app.seen == [*range(8), *range(4)]
    assert (app.deadline.share, app.deadline.epochs_done) == (0.5, 1.5)


def test_a_deadline_between_two_epochs_cuts_the_second() -> None:
    app = TimedApp(deadline_s=8.0, epochs=2.0)
    app.trains(range(8))
    assert not app.deadline.cut
    app.trains(range(8))
    assert (app.deadline.cut, app.deadline.share, app.deadline.epochs_done) == (True, 0.5, 1.0)


@pytest.mark.parametrize("deadline_s", [1e-9, 0.5])
def test_at_least_one_batch_is_trained(deadline_s: float) -> None:
    app = TimedApp(deadline_s=deadline_s)
    app.trains(range(4))
    assert (app.seen, app.deadline.share) == ([0], 0.25)


def test_one_batch_that_stalls_does_not_end_the_training() -> None:
    app = TimedApp(deadline_s=40.0)
    app.trains(range(100), lambda batch: 15.0 if batch == 5 else 1.0)
    assert len(app.seen) == 26


def test_fetching_counts_too() -> None:
    app = TimedApp(deadline_s=10.0)

    def slow() -> Iterator[int]:
        for batch in range(100):
            app.at_s += 1.0
            yield batch

    app.trains(slow())
    assert len(app.seen) == 5 and app.at_s - 100 <= 10.0


def test_a_loader_without_a_length_has_one_once_an_epoch_has_ended() -> None:
    app = TimedApp(deadline_s=12.0, epochs=2.0)
    app.trains(without_length(range(8)))
    app.trains(without_length(range(8)))
    assert (app.deadline.share, app.deadline.epochs_done) == (0.75, 1.5)


def test_the_share_of_a_first_epoch_of_unknown_length_is_unknown() -> None:
    app = TimedApp(deadline_s=5.0)
    app.trains(without_length(range(8)))
    assert (app.deadline.cut, app.deadline.share, app.deadline.epochs_done) == (True, None, 0.0)


def test_without_a_deadline_every_batch_is_given() -> None:
    app = TimedApp(deadline_s=None)
    app.trains(range(1000))
    assert len(app.seen) == 1000 and app.deadline.share == 1.0


def test_a_loader_that_is_left_early_is_closed() -> None:
    closed = []

    def measures() -> Iterator[int]:
        try:
            yield from range(100)
        finally:
            closed.append(True)

    app = TimedApp(deadline_s=3.0)
    app.trains(measures())
    assert closed == [True]


def test_outside_of_a_training_the_batches_are_the_loaders() -> None:
    batches = until_deadline(profiled([3, 1, 2]))
    assert [list(batches), list(batches)] == [[3, 1, 2], [3, 1, 2]]
    assert len(batches) == 3  # type: ignore[arg-type]
    assert list(until_deadline(iter([1, 2]))) == [1, 2]
    with pytest.raises(TypeError, match="has no length"):
        len(until_deadline(iter([1, 2])))  # type: ignore[arg-type]
