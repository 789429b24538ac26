"""A training whose grant the coordinator changes, or that has none."""

from __future__ import annotations

import time

import pytest
from flwr.app import Context, Message

from edge_agent.runtime.readiness import parked_mode
from tests.fakes.agent_socket import (
    MODE,
    Agent,
    answered,
    assigned,
    context,
    granted,
)
from tests.fakes.polling import until
from wattfleet_flower import AgentUnreachableError, power_mode_mod, profiled, until_deadline
from wattfleet_proto.assignment import (
    CUT_KEY,
    RECORD_KEY,
    SHARE_KEY,
)
from wattfleet_proto.v1 import session_pb2


def test_a_round_continues_in_the_new_mode_and_is_not_observed(agent: Agent) -> None:
    thriftier = MODE._replace(gpu_hz=306_000_000)

    def train(request: Message, _: Context) -> Message:
        agent.grant(granted(thriftier, power_limit_w=16.0, grant_id=2))
        until(lambda: agent.board.current_mode() == thriftier)
        assert list(until_deadline(profiled(range(6)))) == list(range(6)), "it goes on, and measures no more"
        assert agent.board.current_mode() == thriftier
        return answered(request, _)

    reply = power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), train)
    assert not reply.has_error()
    assert agent.board.current_mode() == parked_mode(agent.board)
    assert agent.reports.observations == []
    assert agent.reports.states[-1].state == session_pb2.DEVICE_STATE_READY


@pytest.mark.parametrize("plan_id", ["7/1", "another/1"])
def test_a_stopped_round_keeps_the_work_done(agent: Agent, plan_id: str) -> None:
    seen: list[int] = []

    def train(request: Message, _: Context) -> Message:
        for batch in until_deadline(range(1_000_000)):
            seen.append(batch)
            if batch == 3:
                agent.grant(granted(None, plan_id=plan_id, grant_id=2))
            time.sleep(0.001)
        assert agent.board.current_mode() == parked_mode(agent.board), "the watts are saved at once"
        return answered(request, _)

    reply = power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), train)
    assert 3 < len(seen) < 1_000_000
    assert reply.content[RECORD_KEY][CUT_KEY] is True
    assert reply.content[RECORD_KEY][SHARE_KEY] == pytest.approx(len(seen) / 1_000_000)
    assert agent.reports.observations == []


def test_a_training_ends_after_its_longest_time(agent: Agent) -> None:
    grant = granted(plan_id="7/2", grant_id=2)
    grant.longest_s = 0.1
    agent.grant(grant)
    seen: list[int] = []

    def train(request: Message, _: Context) -> Message:
        for batch in until_deadline(range(1_000_000)):
            seen.append(batch)
            time.sleep(0.001)
        assert agent.board.current_mode() == parked_mode(agent.board)
        return answered(request, _)

    power_mode_mod(assigned(plan_id="7/2"), context(**{"agent-socket": str(agent.socket)}), train)
    assert 1 < len(seen) < 1_000_000


def test_a_training_stops_when_the_coordinator_is_lost_for_too_long(agent: Agent) -> None:
    agent.grant(granted(plan_id="7/2", grant_id=2), lifetime_s=1.0)
    seen: list[int] = []

    def train(request: Message, _: Context) -> Message:
        for batch in until_deadline(range(1_000_000)):
            seen.append(batch)
            time.sleep(0.001)
        assert agent.board.current_mode() == parked_mode(agent.board)
        return answered(request, _)

    power_mode_mod(assigned(plan_id="7/2"), context(**{"agent-socket": str(agent.socket)}), train)
    assert 1 < len(seen) < 1_000_000


def refused(agent: Agent, reason: str, plan_id: str = "7/1") -> None:
    with pytest.raises(AgentUnreachableError, match=reason):
        power_mode_mod(assigned(plan_id=plan_id), context(**{"agent-socket": str(agent.socket)}), answered)
    assert agent.board.current_mode() == parked_mode(agent.board)
    assert agent.reports.states == [], "it never trained"


@pytest.mark.parametrize("plan_id", ["7/2", "made up"])
def test_a_training_without_a_grant_is_refused(agent: Agent, plan_id: str) -> None:
    refused(agent, "FAILED_PRECONDITION: the coordinator has granted no watts", plan_id)


def test_a_training_that_was_called_off_is_refused(agent: Agent) -> None:
    agent.grant(granted(None, grant_id=2))
    refused(agent, "FAILED_PRECONDITION: the coordinator has granted no watts")


def test_a_message_that_arrives_after_its_plan_was_given_up_is_refused(agent: Agent) -> None:
    agent.grant(granted(plan_id="7/2", grant_id=2))
    refused(agent, "FAILED_PRECONDITION: the coordinator has granted no watts")


def test_a_grant_serves_one_training(agent: Agent) -> None:
    where = context(**{"agent-socket": str(agent.socket)})
    assert not power_mode_mod(assigned(), where, answered).has_error()
    agent.grant(granted(grant_id=2))  # as a restarted coordinator repeats it
    with pytest.raises(AgentUnreachableError, match="FAILED_PRECONDITION"):
        power_mode_mod(assigned(), where, answered)


def test_a_mode_that_draws_more_than_its_limit_is_refused(agent: Agent) -> None:
    agent.grant(granted(power_limit_w=1.0, plan_id="7/2", grant_id=2))
    refused(agent, "INVALID_ARGUMENT: .* is predicted to draw .* more than the limit of 1.0 W", "7/2")
