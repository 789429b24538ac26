"""A training in flight whose power mode the coordinator changes."""

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
)
from tests.fakes.polling import until
from wattfleet_flower import power_mode_mod, profiled, until_deadline
from wattfleet_proto.assignment import (
    CUT_KEY,
    RECORD_KEY,
    SHARE_KEY,
)
from wattfleet_proto.convert import mode_to_message
from wattfleet_proto.v1 import session_pb2


def test_a_round_continues_in_the_new_mode_and_is_not_observed(agent: Agent) -> None:
    thriftier = MODE._replace(gpu_hz=306_000_000)

    def train(request: Message, _: Context) -> Message:
        agent.order(session_pb2.Reassign(plan_id="another/1", power_limit_w=1.0))
        agent.order(session_pb2.Reassign(plan_id="7/1", mode=mode_to_message(thriftier), power_limit_w=8.0))
        until(lambda: agent.board.current_mode() == thriftier)
        assert list(until_deadline(profiled(range(6)))) == list(range(6)), "it goes on, and measures no more"
        assert agent.board.current_mode() == thriftier
        return answered(request, _)

    reply = power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), train)
    assert not reply.has_error()
    assert agent.board.current_mode() == parked_mode(agent.board)
    assert agent.reports.observations == []
    assert agent.reports.states[-1].state == session_pb2.DEVICE_STATE_READY


def test_a_stopped_round_keeps_the_work_done(agent: Agent) -> None:
    seen: list[int] = []

    def train(request: Message, _: Context) -> Message:
        for batch in until_deadline(range(1_000_000)):
            seen.append(batch)
            if batch == 3:
                agent.order(session_pb2.Reassign(plan_id="7/1"))
            time.sleep(0.001)
        assert agent.board.current_mode() == parked_mode(agent.board), "the watts are saved at once"
        return answered(request, _)

    reply = power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), train)
    assert 3 < len(seen) < 1_000_000
    assert reply.content[RECORD_KEY][CUT_KEY] is True
    assert reply.content[RECORD_KEY][SHARE_KEY] == pytest.approx(len(seen) / 1_000_000)
    assert agent.reports.observations == []


def test_an_order_that_precedes_its_training_is_applied_at_the_start(agent: Agent) -> None:
    agent.order(session_pb2.Reassign(plan_id="7/1"))

    def train(request: Message, _: Context) -> Message:
        until(lambda: agent.board.current_mode() == parked_mode(agent.board))
        time.sleep(0.05)
        assert list(until_deadline(range(50))) == [0], "one minibatch is always done"
        return answered(request, _)

    power_mode_mod(assigned(), context(**{"agent-socket": str(agent.socket)}), train)
