"""The local epochs that a plan chose, as an app gets them, and whether the app asked for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Context, Error, Message
from torch.utils.data import TensorDataset

from tests.fakes.agent_socket import answered, assigned, context
from tests.fakes.recording_agent import RecordingAgent, recording_agent
from wattfleet.errors import InvalidInputError
from wattfleet_flower import planned_loader, planned_work, power_mode_mod, profiled, until_deadline
from wattfleet_flower.client.loaders import PlannedWork
from wattfleet_proto.assignment import RECORD_KEY, TOOK_EPOCHS_KEY, WORK_KEY, AssignedWork, RoundAssignment
from wattfleet_proto.v1 import local_pb2

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
