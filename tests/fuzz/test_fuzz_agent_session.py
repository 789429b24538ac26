"""A coordinator sends an agent arbitrary answers; the agent keeps running, and reports to an ordinary one later."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import grpc
from google.protobuf.message import Message

from edge_agent.session.certificate_keeper import connects_to
from edge_agent.session.coordinator_session import CoordinatorSession
from edge_agent.session.outbox import Outbox, OutboxFile
from edge_agent.session.references import reference_of_digest
from edge_agent.session.status import LatestWelcome, WelcomeFile
from edge_agent.settings import SessionSettings
from tests.fakes.coordinator_in_process import REFERENCE, on_loop
from tests.fakes.fronts import front
from tests.fuzz.campaign import Campaign, bounded_memory, service_log
from tests.fuzz.hostile_coordinator import HostileCoordinator
from tests.fuzz.hostile_messages import HostileMessages, Known
from tests.fuzz.hostile_values import Hostile
from wattfleet.errors import WattfleetError
from wattfleet.prediction import Artefact
from wattfleet_identity.channels import Endpoint
from wattfleet_proto.convert import front_to_message
from wattfleet_proto.names import own_version
from wattfleet_proto.v1 import power_pb2, session_pb2

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
    settings = SessionSettings(silence_timeout_s=0.2, welcome_timeout_s=1.0)
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
                session.report_front(session_pb2.FrontReport(front=points, idle_w=5.0, profiled_modes=50))
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
