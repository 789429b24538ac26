"""`profiled(loader)` against a real agent socket: modes are measured while the app trains."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message
from torch.utils.data import DataLoader

from edge_agent.runtime.readiness import parked_mode
from tests.fakes.agent_socket import (
    MODE,
    Agent,
    answered,
    assigned,
    context,
    granted,
)
from wattfleet.modes import PowerMode, array_to_modes, modes_to_array
from wattfleet_flower import AgentUnreachableError, power_mode_mod, profiled
from wattfleet_flower.client.agent_training import CURRENT_TRAINING
from wattfleet_proto.device_state import DeviceState
from wattfleet_proto.v1 import local_pb2


def trains_on(batches: Any, seen: list[int], modes: list[PowerMode], agent: Agent) -> Any:
    def train(request: Message, _: Context) -> Message:
        for batch in profiled(batches):
            seen.append(batch)
            modes.append(agent.board.current_mode())
        modes.append(agent.board.current_mode())
        return answered(request, _)

    return train


def test_modes_are_measured_during_training_and_no_batch_is_lost(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    # Every minibatch is reported: they take no time here, so the usual half second would never pass.
    monkeypatch.setattr("wattfleet_flower.client.loaders._REPORT_INTERVAL_S", 0.0)
    seen: list[int] = []
    modes: list[PowerMode] = []
    before = len(agent.journal.records)
    train = trains_on(range(800), seen, modes, agent)
    reply = power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), train)
    assert not reply.has_error()
    assert seen == list(range(800))
    measured = [record.mode for record in agent.journal.records[before:]]
    assert measured and set(measured) < set(modes)
    assert modes[-1] == MODE, "after the loader the assigned mode is in force again"
    assert agent.board.current_mode() == parked_mode(agent.board)
    # The rest of the training was in the assigned mode only.
    (observed,) = agent.reports.observations
    minibatch_ms, power_mw = agent.board.truth(modes_to_array([MODE]))
    assert observed.epoch_s == pytest.approx(len(seen) * minibatch_ms[0] / 1e3, rel=0.05)
    assert observed.power_w == pytest.approx(power_mw[0] / 1e3, rel=0.05)
    assert len(agent.reports.fronts) == 1


def test_modes_are_measured_while_torch_trains_without_a_change_of_the_app(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wattfleet_flower.client.loaders._REPORT_INTERVAL_S", 0.0)
    before = len(agent.journal.records)
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    modes: list[PowerMode] = []

    def train(request: Message, _: Context) -> Message:
        for batch in DataLoader(torch.zeros(800, 1), batch_size=1):
            net(batch).sum().backward()
            optimizer.step()
            modes.append(agent.board.current_mode())
        modes.append(agent.board.current_mode())
        return answered(request, _)

    reply = power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), train)
    assert not reply.has_error()
    measured = {record.mode for record in agent.journal.records[before:]}
    assert measured and measured < set(modes)
    assert modes[0] == modes[-1] == MODE


def test_no_mode_that_may_exceed_the_rounds_power_limit_is_measured(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wattfleet_flower.client.loaders._REPORT_INTERVAL_S", 0.0)
    front = agent.learner.predicted_front()[0]
    thriftiest = array_to_modes(front.modes)[int(np.argmin(front.power_w))]
    agent.grant(granted(thriftiest, 1.001 * float(np.min(front.power_w)), plan_id="7/2", grant_id=2))
    modes: list[PowerMode] = []
    train = trains_on(range(10), [], modes, agent)
    power_mode_mod(assigned(plan_id="7/2"), context(**{"agent-socket": str(agent.socket)}), train)
    assert set(modes) == {thriftiest}
    assert len(agent.reports.observations) == 1, "such a round is observed as any other"


def test_outside_a_planned_training_a_profiled_loader_only_passes_batches() -> None:
    assert list(profiled(range(3))) == [0, 1, 2]


def test_an_app_killed_while_modes_are_measured_leaves_the_device_parked(agent: Agent) -> None:
    def train(request: Message, _: Context) -> Message:
        for batch in profiled(range(100)):
            if batch == 3:
                assert agent.board.current_mode() != MODE
                raise MemoryError("out of memory")
        raise AssertionError("unreachable")

    with pytest.raises(MemoryError):
        power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), train)
    assert agent.board.current_mode() == parked_mode(agent.board)
    agent.grant(granted(plan_id="7/2", grant_id=2))
    where = context(**{"agent-socket": str(agent.socket)})
    assert not power_mode_mod(assigned(plan_id="7/2"), where, answered).has_error()


@pytest.mark.parametrize(
    ("fetch_stall_ms", "reason"),
    [
        (-1.0, "fetch_stall_ms must be 0 or more"),
        (float("inf"), "fetch_stall_ms must be 0 or more"),
        (float("nan"), "fetch_stall_ms must be 0 or more"),
        (1e12, "1e.09 s of minibatches"),
        (5_000.0, "5.005 s of minibatches"),
    ],
)
def test_a_minibatch_of_impossible_times_is_refused(agent: Agent, fetch_stall_ms: float, reason: str) -> None:
    def train(request: Message, _: Context) -> Message:
        training = CURRENT_TRAINING.get()
        assert training is not None
        training.report([local_pb2.MinibatchTimes(fetch_stall_ms=fetch_stall_ms, compute_ms=5.0)], paused=False)
        raise AssertionError("unreachable")

    with pytest.raises(AgentUnreachableError, match=f"INVALID_ARGUMENT: {reason}"):
        power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), train)
    assert agent.board.current_mode() == parked_mode(agent.board)
    assert agent.reporter.state is DeviceState.READY
