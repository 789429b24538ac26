"""An app sends arbitrary messages over the agent's socket; the agent still serves the next app."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import grpc
import pytest
from google.protobuf import descriptor_pool

from edge_agent.runtime.readiness import parked_mode
from tests.fakes.agent_socket import MODE, Agent, agent_at, granted
from tests.fakes.coordinator_in_process import on_loop
from tests.fakes.polling import eventually
from tests.fuzz.campaign import Campaign, bounded_memory, service_log
from tests.fuzz.hostile_messages import Known
from tests.fuzz.remote_calls import HostileCall, Valid, methods_of
from wattfleet_proto.v1 import local_pb2

METHOD, SHOW, DEVICE = methods_of(descriptor_pool.Default().FindServiceByName("wattfleet.v1.LocalAgentService"))


def known_values(plan_id: str) -> Known:
    """Values that a request may refer to."""
    return {"plan_id": [plan_id], "device_id": ["orin-nano-0"], "epochs": [1.0], "epochs_done": [0.5, 1.0]}


def trainings(plan_id: str) -> list[list[local_pb2.TrainRequest]]:
    """The messages that an ordinary app sends."""
    start = local_pb2.StartTraining(plan_id=plan_id, device_id="orin-nano-0", epochs=1.0)
    times = [local_pb2.MinibatchTimes(fetch_stall_ms=0.5, compute_ms=5.0)] * 3
    begin = local_pb2.TrainRequest(start=start)
    report = local_pb2.TrainRequest(minibatches=local_pb2.MinibatchesTrained(minibatches=times))
    finish = local_pb2.TrainRequest(finish=local_pb2.FinishTraining())
    fail = local_pb2.TrainRequest(finish=local_pb2.FinishTraining(failed=True))
    return [[begin, finish], [begin, report, report, finish], [begin, fail]]


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    with agent_at(tmp_path_factory.mktemp("agent") / "agent.sock", grant_timeout_s=0.01, fits_once=True) as running:
        yield running


def test_no_app_fails_the_agent(agent: Agent, campaign: Campaign) -> None:
    on_loop(_no_app_fails_the_agent(agent, campaign)).result()


async def _no_app_fails_the_agent(agent: Agent, campaign: Campaign) -> None:
    numbers = count(2)

    def grant_next() -> str:
        number = next(numbers)
        agent.grant(granted(MODE, plan_id=f"7/{number}", grant_id=number))
        return f"7/{number}"

    with grpc.insecure_channel(f"unix:{agent.socket}") as channel:
        with service_log() as log, bounded_memory():
            for hostile in campaign.inputs():
                plan_id = grant_next()
                valid: Valid = {
                    METHOD.path: trainings(plan_id),
                    SHOW.path: [[local_pb2.ShowTrainingRequest()]],
                    DEVICE.path: [[local_pb2.GetDeviceRequest()]],
                }
                method = {0: SHOW, 1: DEVICE}.get(campaign.seed % 8, METHOD)
                call = HostileCall.drawn(hostile, method, valid, known_values(plan_id))
                with campaign.judged(call, log):
                    await call.ended_with(channel)
                    await eventually(lambda: agent.board.current_mode() == parked_mode(agent.board))
        plain = [message.SerializeToString() for message in trainings(grant_next())[0]]

        async def serves_the_next_app() -> bool:
            code = await HostileCall(METHOD, plain, goes_away=False).ended_with(channel)
            # The agent may still be ending the training of an app that disconnected.
            assert code in (grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED)
            return code is grpc.StatusCode.OK

        await eventually(serves_the_next_app)
