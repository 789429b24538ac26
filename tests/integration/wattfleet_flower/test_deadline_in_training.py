"""`until_deadline(loader)` against a real agent socket."""

from __future__ import annotations

import grpc
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from edge_agent.runtime.readiness import parked_mode
from tests.fakes.agent_socket import (
    MODE,
    Agent,
    answered,
    assigned,
    context,
    granted,
    message,
)
from wattfleet.modes import PowerMode
from wattfleet_flower import AgentUnreachableError, power_mode_mod, profiled, until_deadline
from wattfleet_flower.client.agent_training import CURRENT_TRAINING
from wattfleet_proto.assignment import (
    APP_WEIGHS_KEY,
    CUT_KEY,
    OBSERVED_EPOCH_S_KEY,
    OBSERVED_POWER_W_KEY,
    RECORD_KEY,
    SHARE_KEY,
    UNPROFILED_KEY,
    RoundAssignment,
)


def assigned_until(deadline_s: float | None, epochs: float = 1.0, plan_id: str = "7/1") -> Message:
    record = RoundAssignment(plan_id, "orin-nano-0", epochs, deadline_s=deadline_s).to_record()
    return message(RecordDict({RECORD_KEY: ConfigRecord(record)}))


def work_in(reply: Message) -> dict[str, object]:
    """The part of a reply that describes the work that was done."""
    left_out = ("observed-", UNPROFILED_KEY)
    return {key: value for key, value in reply.content[RECORD_KEY].items() if not key.startswith(left_out)}


def test_a_training_cut_by_its_deadline_is_reported_for_the_work_done(agent: Agent) -> None:
    seen: list[int] = []

    def train(request: Message, _: Context) -> Message:
        for _epoch in range(2):
            seen.extend(until_deadline(range(10)))
        return answered(request, _)

    where = context(**{"agent-socket": str(agent.socket)})
    whole = power_mode_mod(assigned_until(None, epochs=2.0), where, train)
    assert work_in(whole) == {CUT_KEY: False, APP_WEIGHS_KEY: False, SHARE_KEY: 1.0}
    assert seen == [*range(10), *range(10)]

    seen.clear()
    agent.grant(granted(plan_id="7/2", grant_id=2))
    cut = power_mode_mod(assigned_until(1e-9, 2.0, "7/2"), where, train)
    assert not cut.has_error()
    assert work_in(cut) == {CUT_KEY: True, APP_WEIGHS_KEY: False, SHARE_KEY: 0.05}
    assert seen == [0]
    # One minibatch on the simulated board is too short to sample its power.
    (only,) = agent.reports.observations
    assert whole.content[RECORD_KEY][OBSERVED_EPOCH_S_KEY] == only.epoch_s
    assert whole.content[RECORD_KEY][OBSERVED_POWER_W_KEY] == only.power_w


def test_a_deadline_during_measuring_restores_the_assigned_mode(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wattfleet_flower.client.loaders._REPORT_INTERVAL_S", 0.0)
    modes: list[PowerMode] = []

    def train(request: Message, _: Context) -> Message:
        for _batch in until_deadline(profiled(range(800)), app_weighs=True):
            modes.append(agent.board.current_mode())
        modes.append(agent.board.current_mode())
        return answered(request, _)

    reply = power_mode_mod(assigned_until(1e-9), context(**{"agent-socket": str(agent.socket)}), train)
    assert len(modes) == 2 and modes[0] != MODE and modes[1] == MODE
    assert reply.content[RECORD_KEY][APP_WEIGHS_KEY] is True
    assert reply.content[RECORD_KEY][SHARE_KEY] == pytest.approx(1 / 800)
    assert agent.reports.observations == []


def test_without_a_loaders_length_no_epoch_time_is_learnt(agent: Agent) -> None:
    def train(request: Message, _: Context) -> Message:
        assert list(until_deadline(iter(range(10)))) == [0]
        return answered(request, _)

    reply = power_mode_mod(assigned_until(1e-9), context(**{"agent-socket": str(agent.socket)}), train)
    assert work_in(reply) == {CUT_KEY: True, APP_WEIGHS_KEY: False}
    assert agent.reports.observations == []
    assert agent.board.current_mode() == parked_mode(agent.board)


@pytest.mark.parametrize("epochs_done", [1.5, -0.1, float("nan")])
def test_more_epochs_than_assigned_are_refused(agent: Agent, epochs_done: float) -> None:
    def train(request: Message, _: Context) -> Message:
        training = CURRENT_TRAINING.get()
        assert training is not None
        with pytest.raises(grpc.RpcError):
            training.finish(False, epochs_done)
        raise MemoryError("to leave the mod")

    with pytest.raises((MemoryError, AgentUnreachableError)):
        power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), train)
    assert agent.board.current_mode() == parked_mode(agent.board)
    assert agent.reports.observations == []
