"""The messages that an app may send over the agent's socket: others are refused, with at most one log line."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from edge_agent.runtime.readiness import parked_mode
from tests.fakes.agent_socket import Agent, agent_at, granted
from tests.fakes.polling import until
from wattfleet_proto.v1 import local_pb2

TRAIN = "/wattfleet.v1.LocalAgentService/Train"
INVALID = grpc.StatusCode.INVALID_ARGUMENT
GRANT_IDS = itertools.count(2)


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    with agent_at(tmp_path_factory.mktemp("agent") / "agent.sock") as running:
        yield running


def outcome(agent: Agent, *requests: bytes) -> tuple[grpc.StatusCode, str, int]:
    """Send messages and end the stream; returns its status, and the number of answers."""
    with grpc.insecure_channel(f"unix:{agent.socket}") as channel:
        call: Any = channel.stream_stream(TRAIN, None, None)(iter(requests))
        answers = 0
        try:
            for _ in call:
                answers += 1
        except grpc.RpcError:
            pass
        return call.code(), call.details(), answers


def granted_start(agent: Agent, plan_id: str) -> bytes:
    """The start of a training that the coordinator has granted; each grant is valid for one training."""
    agent.grant(granted(plan_id=plan_id, grant_id=next(GRANT_IDS)))
    return start(plan_id=plan_id)


def start(**other: Any) -> bytes:
    values = {"plan_id": "7/1", "device_id": "orin-nano-0", "epochs": 1.0}
    return local_pb2.TrainRequest(start=local_pb2.StartTraining(**{**values, **other})).SerializeToString()


def is_clean(caplog: pytest.LogCaptureFixture) -> bool:
    return "Traceback" not in caplog.text and "raised by servicer" not in caplog.text and len(caplog.text) < 10_000


def test_a_stream_that_ends_before_its_start_is_refused(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    code, text, _ = outcome(agent)
    assert code is INVALID and "before its Start" in text
    assert is_clean(caplog)


def test_a_stream_that_ends_before_its_finish_parks_the_device(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    code, text, answers = outcome(agent, granted_start(agent, "7/2"))
    assert code is grpc.StatusCode.ABORTED and "before its Finish" in text
    assert answers == 1
    until(lambda: agent.board.current_mode() == parked_mode(agent.board))
    assert is_clean(caplog)


@pytest.mark.parametrize(
    "request_", [b"\xff", b"\x0a\x05ab", b"\x0a\x04\x0a\x02\xff\xfe"], ids=["tag", "length", "utf8"]
)
def test_a_malformed_message_is_refused_in_one_line(
    agent: Agent, caplog: pytest.LogCaptureFixture, request_: bytes
) -> None:
    caplog.set_level(logging.DEBUG, "wattfleet_proto")
    code, text, _ = outcome(agent, request_)
    assert code is INVALID and "not a valid" in text
    assert is_clean(caplog)


def test_a_malformed_message_in_a_training_parks_the_device(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    code, _, answers = outcome(agent, granted_start(agent, "7/3"), b"\xff")
    assert code is INVALID and answers == 1
    until(lambda: agent.board.current_mode() == parked_mode(agent.board))
    assert is_clean(caplog)


def test_a_report_of_400000_minibatches_is_refused(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    report = local_pb2.MinibatchesTrained(minibatches=[local_pb2.MinibatchTimes()] * 400_000)
    request = local_pb2.TrainRequest(minibatches=report).SerializeToString()
    code, text, _ = outcome(agent, granted_start(agent, "7/4"), request)
    assert code is INVALID and "at most 10,000 minibatches" in text
    assert is_clean(caplog)


def test_ids_that_no_coordinator_gives_are_refused_in_a_short_text(agent: Agent) -> None:
    for request in (start(plan_id="x" * 10_000), start(device_id="x" * 10_000)):
        code, text, _ = outcome(agent, request)
        assert code is INVALID and len(text) < 500


def test_the_longest_plan_id_of_a_coordinator_is_accepted(agent: Agent) -> None:
    finish = local_pb2.TrainRequest(finish=local_pb2.FinishTraining(failed=True)).SerializeToString()
    code, text, _ = outcome(agent, granted_start(agent, "r" * 200 + "/1000000"), finish)
    assert code is grpc.StatusCode.OK, text
