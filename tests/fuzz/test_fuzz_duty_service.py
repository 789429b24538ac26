"""An app sends arbitrary messages to the duty service on the agent's socket; the agent still serves the next app."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pool
from google.protobuf.message import Message

from tests.fakes.coordinator_in_process import on_loop
from tests.fakes.duty_agent import DutyAgent, duty, duty_agent_at
from tests.fakes.polling import eventually
from tests.fuzz.campaign import Campaign, bounded_memory, service_log
from tests.fuzz.remote_calls import HostileCall, methods_of
from wattfleet_proto.names import owner_socket
from wattfleet_proto.v1 import duty_pb2

METHODS = methods_of(descriptor_pool.Default().FindServiceByName("wattfleet.v1.DutyService"))
HELLO = duty_pb2.ServeRequest(hello=duty_pb2.ServerHello(largest_batch=4, measures=True))
WAITING = duty_pb2.RequestsWaiting(count=1, oldest_ms=1.0, wants_turn=True, number=1)
ANSWERED = duty_pb2.BatchAnswered(batch=1, model_ms=2.0, latency_ms=[3.0], arrived=1)
MEASURED = duty_pb2.BatchMeasured(number=1, problem="no room for so many")
VALID: dict[str, list[list[Message]]] = {
    "/wattfleet.v1.DutyService/Serve": [
        [HELLO, duty_pb2.ServeRequest(waiting=WAITING), duty_pb2.ServeRequest(answered=ANSWERED)],
        [HELLO, duty_pb2.ServeRequest(measured=MEASURED)],
    ],
    "/wattfleet.v1.DutyService/Share": [
        [
            duty_pb2.ShareRequest(wanted=duty_pb2.MinibatchWanted()),
            duty_pb2.ShareRequest(ended=duty_pb2.MinibatchEnded(minibatch_ms=5.0)),
        ]
    ],
    "/wattfleet.v1.DutyService/SetDuty": [[duty_pb2.SetDutyRequest(duty=duty().to_json())]],
    "/wattfleet.v1.DutyService/ShowDuty": [[duty_pb2.ShowDutyRequest()]],
    "/wattfleet.v1.DutyService/ClearDuty": [[duty_pb2.ClearDutyRequest()]],
}


@pytest.fixture(autouse=True)
def without_lost_answers() -> Iterator[None]:
    """Ignore the traceback that gRPC logs itself if a client disconnects while it is being answered."""
    log = logging.getLogger("grpc._cython.cygrpc")

    def is_ours(record: logging.LogRecord) -> bool:
        return "ExecuteBatchError" not in record.getMessage()

    log.addFilter(is_ours)
    yield
    log.removeFilter(is_ours)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[DutyAgent]:
    with duty_agent_at(tmp_path / "agent.sock", duty()) as running:
        yield running


def test_no_app_fails_the_duty_service(agent: DutyAgent, campaign: Campaign) -> None:
    assert {method.path for method in METHODS} == set(VALID)
    on_loop(_no_app_fails_the_duty_service(agent, campaign)).result()


async def _no_app_fails_the_duty_service(agent: DutyAgent, campaign: Campaign) -> None:
    with grpc.insecure_channel(f"unix:{owner_socket(Path(agent.socket))}") as channel:
        with service_log() as log, bounded_memory():
            for hostile in campaign.inputs():
                method = METHODS[campaign.seed % len(METHODS)]
                call = HostileCall.drawn(hostile, method, VALID, {})
                with campaign.judged(call, log):
                    await call.ended_with(channel)
                    await eventually(lambda: agent.turns.servers == 0)
        show = next(method for method in METHODS if method.path.endswith("ShowDuty"))
        plain = HostileCall(show, [duty_pb2.ShowDutyRequest().SerializeToString()], goes_away=False)
        assert await plain.ended_with(channel) is grpc.StatusCode.OK
