"""A coordinator and apps send an agent arbitrary messages; the agent keeps running, and serves the next one."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pool
from google.protobuf.message import Message

from edge_agent.runtime.readiness import parked_mode
from edge_agent.session.certificate_keeper import connects_to
from edge_agent.session.coordinator_session import CoordinatorSession
from edge_agent.session.outbox import Outbox, OutboxFile
from edge_agent.session.references import reference_of_digest
from edge_agent.session.status import LatestWelcome, WelcomeFile
from edge_agent.settings import ConnectionSettings
from tests.fakes.agent_socket import MODE, Agent, agent_at, granted
from tests.fakes.coordinator_in_process import REFERENCE, on_loop
from tests.fakes.duties import DutyAgent, duty, duty_agent_at
from tests.fakes.fleets import front
from tests.fakes.polling import eventually
from tests.fuzz.campaign import Campaign, bounded_memory, service_log
from tests.fuzz.hostile_input import Hostile, HostileMessages, Known
from tests.fuzz.remote_calls import HostileCall, HostileCoordinator, Valid, methods_of
from wattfleet.common.identity.channels import Endpoint
from wattfleet.core.errors import WattfleetError
from wattfleet.core.prediction import Artefact
from wattfleet_proto.convert import front_to_message
from wattfleet_proto.limits import MAX_ANSWER_BYTES
from wattfleet_proto.names import own_version, owner_socket
from wattfleet_proto.v1 import duty_pb2, local_pb2, power_pb2, session_pb2

# --- Test fuzz agent session ------------------------------------------------------------------------------------------
# A coordinator sends an agent arbitrary answers; the agent keeps running, and reports to an ordinary one later.


PLAN = "7/1"
KNOWN: Known = {
    "reference_digest": [REFERENCE.digest],
    "plan_id": [PLAN, PLAN, "x" * 100_000],
    "sequence": [1, 2, 3],
    "lease_number": [1, 2],
    "lease_s": [5.0],
    "manifest": [REFERENCE.manifest],
    "weights_chunk": [REFERENCE.weights],
    "weights_bytes": [len(REFERENCE.weights)],
}
_MODE = power_pb2.PowerMode(cores=6, cpu_khz=1_510_400, gpu_hz=624_750_000, mem_hz=2_133_000_000)
_WELCOME = session_pb2.SessionResponse(
    welcome=session_pb2.Welcome(
        reference_digest=REFERENCE.digest, profile_modes=20, lease_s=5.0, protocol=own_version(), grant_lifetime_s=120.0
    )
)
_GRANT = session_pb2.SessionResponse(
    grant=session_pb2.Grant(id=1, plan_id=PLAN, mode=_MODE, power_limit_w=25.0, longest_s=600.0)
)
_ACK = session_pb2.SessionResponse(ack=session_pb2.Ack(sequence=1, lease_s=5.0, lease_number=1, is_renewed=True))
_SENT = session_pb2.FetchReferenceResponse(
    manifest=REFERENCE.manifest, weights_chunk=REFERENCE.weights, weights_bytes=len(REFERENCE.weights)
)
SESSION_ANSWERS: list[Message] = [_WELCOME, _GRANT, _ACK]
REFERENCE_ANSWERS: list[Message] = [_SENT]
_ENDS = (None, None, grpc.StatusCode.OK, grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT,
         grpc.StatusCode.ABORTED, grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.UNAVAILABLE)  # fmt: skip
_MAX_SENT_BYTES = 20_000
_MAX_MESSAGES = 100
_PATIENCE_S = 0.5


def answers(hostile: Hostile, plain: Sequence[Message]) -> list[bytes]:
    """The messages that a hostile coordinator sends instead of ordinary answers."""
    made, kind = HostileMessages(hostile, KNOWN), plain[0].DESCRIPTOR
    sent = [message.SerializeToString() for message in plain]
    if hostile.random() < 0.2:
        hostile.shuffle(sent)
    for _ in range(hostile.choice((1, 1, 2, 5))):
        at = hostile.randrange(len(sent) + 1)
        content = made.serialized(kind, plain)
        sent = [*sent[:at], content, *sent[at + hostile.choice((0, 1)) :]]
    return sent


def shown(sent: Sequence[bytes], status: grpc.StatusCode | None) -> str:
    return f"{[part[:300].hex() for part in sent]}, then {status}"


def test_no_coordinator_fails_an_agent_session(tmp_path: Path, campaign: Campaign) -> None:
    on_loop(_no_coordinator_fails_an_agent_session(tmp_path, campaign)).result()


async def _no_coordinator_fails_an_agent_session(tmp_path: Path, campaign: Campaign) -> None:
    hostile_coordinator = HostileCoordinator()
    hello = session_pb2.Hello(device_id="orin-0", board="agx-orin", mode_count=1, installation="a" * 32)
    settings = ConnectionSettings(silence_timeout_s=0.2)
    async with hostile_coordinator.served() as address:
        with service_log() as log, bounded_memory():
            for hostile in campaign.inputs(at_least=10):
                sent, status = answers(hostile, SESSION_ANSWERS), hostile.choice(_ENDS)
                hostile_coordinator.answer_with(sent, status)
                latest = LatestWelcome(WelcomeFile(tmp_path / "welcome.json"))
                session = CoordinatorSession(
                    connects_to(Endpoint(address)),
                    hello,
                    latest.receive,
                    Outbox(OutboxFile(tmp_path / "outbox.jsonl")),
                    settings,
                )
                session.report_state(session_pb2.StateReport(state=session_pb2.DEVICE_STATE_READY, detail="parked"))
                points = front_to_message(front((10, 50), (20, 30)))
                session.report_front(
                    session_pb2.FrontReport(front=points, idle_w=5.0, profiled_modes=50, minibatches_per_epoch=100)
                )
                with campaign.judged(shown(sent, status), log):
                    running = asyncio.create_task(session.run())
                    await _until_any(hostile_coordinator.answered, session.attempted)
                    with suppress(WattfleetError, TimeoutError):
                        await session.grants.wait_for(PLAN, 0.01)
                        session.grants.begin(PLAN)
                        await asyncio.wait_for(session.grants.next_change(), 0.01)
                    assert not running.done(), "the agent gives the coordinator up"
                    running.cancel()
                    await asyncio.wait([running])
                    assert running.cancelled(), running.exception()
                    assert max(hostile_coordinator.received, default=0) < _MAX_SENT_BYTES
                    assert len(hostile_coordinator.received) < _MAX_MESSAGES


async def _until_any(*events: asyncio.Event) -> None:
    """Wait until one of these is set, and then as long as the agent may need to react."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waiting, timeout=_PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    await asyncio.sleep(0.005)


def test_no_reference_of_a_coordinator_fails_an_agent(tmp_path: Path, campaign: Campaign) -> None:
    on_loop(_no_reference_of_a_coordinator_fails_an_agent(tmp_path, campaign)).result()


async def _no_reference_of_a_coordinator_fails_an_agent(tmp_path: Path, campaign: Campaign) -> None:
    hostile_coordinator = HostileCoordinator()
    async with hostile_coordinator.served() as address:
        with service_log() as log, bounded_memory():
            for hostile in campaign.inputs(at_least=10):
                sent, status = answers(hostile, REFERENCE_ANSWERS), hostile.choice(_ENDS)
                hostile_coordinator.answer_with(sent, status)
                with campaign.judged(shown(sent, status), log):
                    fetched = await _fetched(address, tmp_path / "references")
                    assert fetched is None or fetched.digest == REFERENCE.digest
                shutil.rmtree(tmp_path / "references", ignore_errors=True)


async def _fetched(address: str, cache: Path) -> Artefact | None:
    """The reference that an agent accepts; None if it has refused it, or requests it again."""
    with suppress(WattfleetError, TimeoutError):
        async with asyncio.timeout(0.1):
            return await reference_of_digest(REFERENCE.digest, cache, connects_to(Endpoint(address)), 0.05)
    return None


async def test_an_answer_that_is_larger_than_any_may_be_is_refused(tmp_path: Path) -> None:
    hostile_coordinator = HostileCoordinator()
    hostile_coordinator.answer_with([bytes(MAX_ANSWER_BYTES + 1)], None)
    async with hostile_coordinator.served() as address:
        with pytest.raises(WattfleetError, match="larger than"):
            await reference_of_digest(REFERENCE.digest, tmp_path, connects_to(Endpoint(address)), 20.0)


# --- Test fuzz agent socket -------------------------------------------------------------------------------------------
# An app sends arbitrary messages over the agent's socket; the agent still serves the next app.

TRAIN, SHOW, DEVICE, NOTE = methods_of(descriptor_pool.Default().FindServiceByName("wattfleet.v1.LocalAgentService"))


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
                    TRAIN.path: trainings(plan_id),
                    SHOW.path: [[local_pb2.ShowTrainingRequest()]],
                    DEVICE.path: [[local_pb2.GetDeviceRequest()]],
                    NOTE.path: [[local_pb2.NoteUnplannedRequest(run_id="4711")]],
                }
                method = {0: SHOW, 1: DEVICE, 2: NOTE}.get(campaign.seed % 8, TRAIN)
                call = HostileCall.drawn(hostile, method, valid, known_values(plan_id))
                with campaign.judged(call, log):
                    await call.ended_with(channel)
                    await eventually(lambda: agent.board.current_mode() == parked_mode(agent.board))
        plain = [message.SerializeToString() for message in trainings(grant_next())[0]]

        async def serves_the_next_app() -> bool:
            code = await HostileCall(TRAIN, plain, goes_away=False).ended_with(channel)
            # The agent may still be ending the training of an app that disconnected.
            assert code in (grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED)
            return code is grpc.StatusCode.OK

        await eventually(serves_the_next_app)


# --- Test fuzz duty service -------------------------------------------------------------------------------------------
# An app sends arbitrary messages to the duty service on the agent's socket; the agent still serves the next app.

DUTY_METHODS = methods_of(descriptor_pool.Default().FindServiceByName("wattfleet.v1.DutyService"))
HELLO = duty_pb2.ServeRequest(hello=duty_pb2.ServerHello(largest_batch=4, measures=True))
WAITING = duty_pb2.RequestsWaiting(count=1, oldest_ms=1.0, wants_turn=True, number=1)
ANSWERED = duty_pb2.BatchAnswered(batch=1, model_ms=2.0, latency_ms=[3.0], arrived=1)
MEASURED = duty_pb2.BatchMeasured(number=1, problem="no room for so many")
VALID_DUTY_REQUESTS: dict[str, list[list[Message]]] = {
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


@pytest.fixture
def without_lost_answers() -> Iterator[None]:
    """Ignore the traceback that gRPC logs itself if a client disconnects while it is being answered."""
    log = logging.getLogger("grpc._cython.cygrpc")

    def is_ours(record: logging.LogRecord) -> bool:
        return "ExecuteBatchError" not in record.getMessage()

    log.addFilter(is_ours)
    yield
    log.removeFilter(is_ours)


@pytest.fixture
def duty_agent(tmp_path: Path) -> Iterator[DutyAgent]:
    with duty_agent_at(tmp_path / "agent.sock", duty()) as running:
        yield running


@pytest.mark.usefixtures("without_lost_answers")
def test_no_app_fails_the_duty_service(duty_agent: DutyAgent, campaign: Campaign) -> None:
    assert {method.path for method in DUTY_METHODS} == set(VALID_DUTY_REQUESTS)
    on_loop(_no_app_fails_the_duty_service(duty_agent, campaign)).result()


async def _no_app_fails_the_duty_service(duty_agent: DutyAgent, campaign: Campaign) -> None:
    with grpc.insecure_channel(f"unix:{owner_socket(Path(duty_agent.socket))}") as channel:
        with service_log() as log, bounded_memory():
            for hostile in campaign.inputs():
                method = DUTY_METHODS[campaign.seed % len(DUTY_METHODS)]
                call = HostileCall.drawn(hostile, method, VALID_DUTY_REQUESTS, {})
                with campaign.judged(call, log):
                    await call.ended_with(channel)
                    await eventually(lambda: duty_agent.turns.servers == 0)
        show = next(method for method in DUTY_METHODS if method.path.endswith("ShowDuty"))
        plain = HostileCall(show, [duty_pb2.ShowDutyRequest().SerializeToString()], goes_away=False)
        assert await plain.ended_with(channel) is grpc.StatusCode.OK
