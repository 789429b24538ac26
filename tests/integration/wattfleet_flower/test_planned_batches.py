"""Trainings with the batch size that a plan has chosen, from the mod to the agent's next front."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Error, Message
from torch.utils.data import DataLoader, TensorDataset

from edge_agent.devices.selection import open_virtual_board
from edge_agent.runtime.readiness import parked_mode
from tests.fakes.agent_socket import APP, MODE, Agent, agent_at, answered, assigned, context, granted
from tests.fakes.fitting_of_batches import Table
from wattfleet.choosing import Front
from wattfleet.modes import BatchOptions, PowerMode, Workload, WorkloadFacts, array_to_modes
from wattfleet_flower import planned_loader, power_mode_mod, profiled
from wattfleet_proto.assignment import WORK_KEY, AssignedWork
from wattfleet_proto.convert import front_from_message
from wattfleet_proto.v1 import session_pb2

MODES = array_to_modes(open_virtual_board("simulated:orin-nano", 1).modes)
# A batch of 64 needs twice the samples of a batch of 16 to reach the same accuracy.
OPTIONS = BatchOptions((16, 32, 64), (0.5, 0.75, 1.0))
WORKLOAD = Workload(APP, WorkloadFacts(batch=16), OPTIONS)
SAMPLES = 96  # six minibatches of 16, or three of 64 that are trained twice


def watts(mode: PowerMode, batch: int) -> float:
    return 4.0 + 2.0 * (1 + batch / 64) * mode.gpu_hz / MODE.gpu_hz


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    """An agent with a workload whose batch size a plan may choose."""
    batches = (*OPTIONS.batches, 48)
    table = Table(
        {batch: np.array([1e10 * batch**0.3 / mode.gpu_hz for mode in MODES]) for batch in batches},
        {batch: np.array([1e3 * watts(mode, batch) for mode in MODES]) for batch in batches},
    )
    with agent_at(tmp_path / "agent.sock", open_fitting=table.opener()) as running:
        running.learner.announced(WORKLOAD)
        running.learner.refit()
        yield running


def grant_of(agent: Agent, batch: int, plan_id: str = "7/1", grant_id: int = 2) -> None:
    """Grant a round in which a plan has chosen a batch size."""
    message: session_pb2.Grant = granted(MODE, 1.05 * watts(MODE, batch), plan_id, grant_id)
    message.batch = batch
    agent.grant(message)


def train(agent: Agent, batch: int, app: Callable[[Message, Context], Message], plan_id: str = "7/1") -> Message:
    request = assigned(plan_id=plan_id)
    work = AssignedWork(batch, lr_scale=batch / 16, passes=OPTIONS.relative_to(16, batch))
    request.content[WORK_KEY] = ConfigRecord(work.to_record())
    return power_mode_mod(request, context(**{"agent-socket": str(agent.socket)}), app)


def loader() -> Any:
    return profiled(planned_loader(TensorDataset(torch.arange(SAMPLES)), 16))


def offered(agent: Agent) -> set[int]:
    """The batch sizes of the newest front that the agent has reported."""
    return batches_of(front_from_message(agent.reports.fronts[-1].front))


def batches_of(front: Front) -> set[int]:
    return set() if front.batch is None else set(front.batch.tolist())


def test_a_training_in_the_planned_batch_and_mode_is_observed(agent: Agent) -> None:
    during: list[PowerMode] = []
    sizes: list[int] = []

    def app(request: Message, where: Context) -> Message:
        for (samples,) in loader():
            sizes.append(len(samples))
            during.append(agent.board.current_mode())
        return answered(request, where)

    grant_of(agent, 64)
    assert not train(agent, 64, app).has_error()
    assert sizes == [64, 64, 64], "two passes"
    assert set(during) == {MODE}
    assert (agent.learner.known.workload.facts.batch, agent.learner.minibatches_per_epoch) == (64, 3)
    assert agent.learner.known.reported_minibatches == 3
    [observed] = agent.reports.observations
    assert observed.plan_id == "7/1"
    assert offered(agent) == set(OPTIONS.batches)


def test_rounds_with_different_batches_follow_each_other(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    def app(request: Message, where: Context) -> Message:
        list(loader())
        return answered(request, where)

    for number, batch in enumerate((64, 16, 32, 16), 1):
        grant_of(agent, batch, f"7/{number}", grant_id=1 + number)
        assert not train(agent, batch, app, f"7/{number}").has_error()
        assert agent.learner.known.workload.facts.batch == batch
        assert offered(agent) == set(OPTIONS.batches)
    assert len(agent.reports.observations) == 4
    assert "will not choose a batch size" not in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("NvMapMemAllocInternalTagged: 1075072515 error 12: Out of Memory"),
        MemoryError(),
    ],
    ids=["torch", "board", "host"],
)
def test_a_batch_that_does_not_fit_is_not_offered_again(agent: Agent, error: Exception) -> None:
    def app(request: Message, where: Context) -> Message:
        for _ in loader():
            raise error
        raise AssertionError("unreachable")

    grant_of(agent, 64)
    with pytest.raises(type(error)):
        train(agent, 64, app)
    assert agent.board.current_mode() == parked_mode(agent.board)
    assert agent.reports.observations == []
    assert batches_of(agent.learner.predicted_front()[0]) == {16, 32}
    agent.learner.announced(WORKLOAD)  # as after a reconnection
    assert agent.learner.known.offered_batches == (16, 32)


def test_smaller_batches_train_after_one_that_does_not_fit(agent: Agent) -> None:
    def app(request: Message, where: Context) -> Message:
        for (samples,) in loader():
            if len(samples) > 16:
                raise MemoryError
        return answered(request, where)

    for number, (batch, left) in enumerate([(64, {16, 32}), (32, {16})], 1):
        grant_of(agent, batch, f"7/{number}", grant_id=1 + number)
        with pytest.raises(MemoryError):
            train(agent, batch, app, f"7/{number}")
        assert batches_of(agent.learner.predicted_front()[0]) == left
    grant_of(agent, 16, "7/3", grant_id=9)
    assert not train(agent, 16, app, "7/3").has_error()
    assert [observed.plan_id for observed in agent.reports.observations] == ["7/3"]


@pytest.mark.parametrize("has_begun", [False, True], ids=["before the first minibatch", "during the first minibatch"])
def test_the_coordinator_is_told_that_a_batch_does_not_fit(agent: Agent, has_begun: bool) -> None:
    def app(request: Message, where: Context) -> Message:
        minibatches = loader()
        if has_begun:
            next(iter(minibatches))
        raise torch.OutOfMemoryError("CUDA out of memory")

    grant_of(agent, 64)
    with pytest.raises(torch.OutOfMemoryError):
        train(agent, 64, app)
    assert offered(agent) == {16, 32}


@pytest.mark.parametrize("ends", ["with an exception", "with an error"])
def test_a_training_that_fails_otherwise_leaves_all_batches(agent: Agent, ends: str) -> None:
    def app(request: Message, where: Context) -> Message:
        list(loader())
        if ends == "with an error":
            return Message(Error(2, "no data"), reply_to=request)
        raise ValueError("the data are damaged")

    grant_of(agent, 64)
    if ends == "with an error":
        assert train(agent, 64, app).has_error()
    else:
        with pytest.raises(ValueError, match="damaged"):
            train(agent, 64, app)
    assert agent.learner.known.workload.batches == OPTIONS


def test_an_app_that_ignores_its_batch_is_kept_within_its_watts(agent: Agent) -> None:
    """It was granted the power for 16 samples, and trains with 64."""
    during: list[PowerMode] = []

    def app(request: Message, where: Context) -> Message:
        for _ in profiled(DataLoader(TensorDataset(torch.arange(SAMPLES)), 64)):
            during.append(agent.board.current_mode())
        return answered(request, where)

    grant_of(agent, 16)
    train(agent, 16, app)
    assert all(watts(mode, 64) <= 1.05 * watts(MODE, 16) for mode in during)
    assert offered(agent) == set(), "it trains with its own batch"
