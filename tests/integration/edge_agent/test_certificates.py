"""Certificates from a user's point of view: enrolment over TLS, and renewals during rounds and after an outage."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from coordinator.settings import CoordinatorSettings
from edge_agent.session.certificate_keeper import CertificateKeeper, connects_to
from edge_agent.session.coordinator_session import CoordinatorSession
from edge_agent.session.outbox import Outbox, OutboxFile
from tests.fakes.polling import eventually
from tests.fakes.served import READY, Agent, CertifiedFleet, Client, calling, certified, invited, joined, serving
from tests.fakes.small_fleet import ORIN_FRONT, ORIN_NODE, RUN
from wattfleet.common import cli
from wattfleet.common.clock import VirtualClock, utc_now
from wattfleet.common.identity.channels import Endpoint, HandshakeError
from wattfleet.common.identity.identity_folder import Identity, read_identity, write_identity
from wattfleet.common.identity.invites import Invite, new_token
from wattfleet.common.identity.joining import Applicant
from wattfleet.common.identity.peers import Role
from wattfleet.common.identity.renewal import due_at, note_time
from wattfleet.common.identity.supernode_folder import SuperNodeFacts, read_facts
from wattfleet.core.errors import InvalidInputError
from wattfleet.flower.server.planning_client import PlanningClient
from wattfleet_proto.convert import front_to_message
from wattfleet_proto.names import own_version
from wattfleet_proto.v1 import (
    enrolment_pb2,
    enrolment_pb2_grpc,
    identity_pb2,
    identity_pb2_grpc,
    planning_pb2,
    power_pb2,
    session_pb2,
)

# --- Enrolling commands -----------------------------------------------------------------------------------------------
# Enrolment from a user's point of view: over TLS, from `coordinator init` to commands and agents with an identity.


pytestmark = pytest.mark.usefixtures("own_folder")
JOIN = ("agent", "join", "--device", "simulated:orin-nano", "--device-id", "nano-1", "--state-dir", "state")


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WATTFLEET_IDENTITY", raising=False)


async def command(*words: str, line: str = "") -> Result:
    """A command against the coordinator that is served here."""
    return await asyncio.to_thread(CliRunner().invoke, cli.wattfleet, list(words), input=line)


async def greeted(endpoint: Endpoint, **hello: Any) -> Any:
    """The coordinator's Welcome to an agent that connects as `agent run` does."""
    async with connects_to(endpoint)() as stub:
        agent = Agent(stub)
        return await agent.greet(session_pb2.Hello(mode_count=7, provenance=power_pb2.PROVENANCE_SIMULATED, **hello))


async def test_a_device_enrols_by_a_pasted_line_and_connects(config: CoordinatorSettings) -> None:
    assert (await command("coordinator", "init")).exit_code == 0
    async with serving(certified(config, Path("wattfleet-identity"))) as served:
        operator = ("--coordinator", served.bound.address)
        invited = await command("coordinator", "invite", *operator)
        line = re.search(r"^wfj1/\S+$", invited.stdout, re.MULTILINE)
        assert line is not None, invited.output
        joined = await command(*JOIN, line=f"{line[0]}\n")
        assert joined.exit_code == 0, joined.output
        options = "--device-id nano-1 --device simulated:orin-nano --state-dir state"
        assert f"next: wattfleet agent run {options}\n" in joined.stdout
        assert line[0].split("/")[3] not in joined.output
        installation = Path("state/installation").read_text().strip()
        endpoint = Endpoint.of(None, Path("state/identity"))
        hello = {"device_id": "nano-1", "board": "orin-nano", "installation": installation}
        assert await greeted(endpoint, **hello) is not None
        devices = await command("coordinator", "devices", *operator, "--json")
        assert '"nano-1"' in devices.stdout, devices.output
        # The same invite enrolled the device's SuperNode.
        assert read_facts(Path("state/supernode")) == SuperNodeFacts("nano-1")
        certificates = await command("coordinator", "certificates", *operator, "--json")
        listed = next(each for each in json.loads(certificates.stdout) if each["name"] == "nano-1")
        private = load_ssh_private_key(Path("state/supernode/supernode.key").read_bytes(), None)
        assert load_ssh_public_key(listed["flower_public_key"].encode()) == private.public_key()
        again = await command(*JOIN, line=f"{line[0]}\n")
        assert again.exit_code != 0 and "used up" in str(again.exception)


async def test_an_operator_replaces_the_authority_by_two_commands(config: CoordinatorSettings) -> None:
    assert (await command("coordinator", "init")).exit_code == 0
    before = read_identity(Path("wattfleet-identity/operator"))
    async with serving(certified(config, Path("wattfleet-identity"))) as served:
        operator = ("--coordinator", served.bound.address)
        begun = await command("coordinator", "rotate-authority", "begin", *operator)
        assert "0 owners have to renew theirs" in begun.stdout, begun.output + str(begun.exception)
        after = read_identity(Path("wattfleet-identity/operator"))
        assert before is not None and after is not None and after.certificate.serial != before.certificate.serial
        finished = await command("coordinator", "rotate-authority", "finish", *operator)
        assert finished.exit_code == 0, finished.output + str(finished.exception)
        listed = await command("coordinator", "certificates", *operator)
        assert listed.exit_code == 0, listed.output + str(listed.exception)


async def test_an_invite_as_an_argument_is_refused_and_not_repeated(tmp_path: Path) -> None:
    done = await command(*JOIN, "wfj1/10.0.0.2:7071/CA/SECRET/1790000000")
    assert done.exit_code != 0 and "treat its token as exposed" in str(done.exception)
    assert "SECRET" not in done.output + str(done.exception)
    assert not Path("state").exists()


class Recording(enrolment_pb2_grpc.EnrolmentServiceServicer):
    """Poses as the coordinator with an authority of its own, and records the tokens that it receives."""

    def __init__(self, authority_pem: bytes) -> None:
        self.authority_pem = authority_pem
        self.tokens: list[str] = []

    async def GetAuthority(self, request: Any, context: Any) -> Any:  # noqa: N802 - named by the protocol
        return enrolment_pb2.GetAuthorityResponse(authority_pem=self.authority_pem)

    async def Join(self, request: Any, context: Any) -> Any:  # noqa: N802 - named by the protocol
        self.tokens.append(request.token)
        return enrolment_pb2.JoinResponse()


@pytest.mark.parametrize("shown", ["its own", "the right one"])
async def test_the_token_is_not_sent_to_another_authority(shown: str, tmp_path: Path) -> None:
    right, wrong = (CertifiedFleet.create(tmp_path / name).authority for name in ("right", "wrong"))
    posing = Recording((wrong if shown == "its own" else right).authority.certificate_pem)
    server = grpc.aio.server()
    enrolment_pb2_grpc.add_EnrolmentServiceServicer_to_server(posing, server)
    proof = grpc.ssl_server_credentials([(wrong.server_key_pem, wrong.server_pem)])
    port = server.add_secure_port("127.0.0.1:0", proof)
    await server.start()
    try:
        invite = Invite(f"127.0.0.1:{port}", right.authority.fingerprint, new_token(), utc_now())
        done = await command(*JOIN, line=invite.line)
    finally:
        await server.stop(None)
    assert done.exit_code != 0 and posing.tokens == []
    if shown == "its own":
        assert "the token was not sent" in str(done.exception)
    assert read_identity(Path("state/identity")) is None


@pytest.mark.parametrize(
    ("whose", "why"), [("nobody", "requires a certificate"), ("stranger", "is not from the authority")]
)
async def test_a_refused_handshake_says_why(whose: str, why: str, config: CoordinatorSettings, tmp_path: Path) -> None:
    fleet = CertifiedFleet.create(tmp_path / "authority")
    folder = tmp_path / "identity"
    if whose == "stranger":
        write_identity(folder, CertifiedFleet.create(tmp_path / "other").identity(Role.DEVICE, "nano-1"))
    async with serving(certified(config, fleet.authority.folder)) as served:
        with pytest.raises(HandshakeError, match=why):
            await greeted(Endpoint.of(served.bound.address, folder), device_id="nano-1", board="orin-nano")


async def test_a_certificate_that_is_due_is_renewed(config: CoordinatorSettings, tmp_path: Path) -> None:
    fleet = CertifiedFleet.create(tmp_path / "authority")
    folder = tmp_path / "identity"
    async with (
        serving(certified(config, fleet.authority.folder)) as served,
        calling(served, fleet.identity(Role.OPERATOR)) as client,
    ):
        service = identity_pb2_grpc.IdentityServiceStub(client.channel)
        first = await joined(service, Role.DEVICE, Applicant("nano-1", "orin-nano", "6f0c"))
        write_identity(folder, first)
        endpoint, renewed = Endpoint.of(None, folder), asyncio.Event()
        later = due_at(folder) + (first.certificate.not_after - due_at(folder)) / 2
        keeper = asyncio.create_task(CertificateKeeper(endpoint, renewed.set, now=lambda: later).run())
        async with asyncio.timeout(20):
            await renewed.wait()
        keeper.cancel()
        newer = read_identity(folder)
        assert newer is not None and newer.key_pem == first.key_pem
        assert newer.certificate.serial != first.certificate.serial
        assert await greeted(endpoint, device_id="nano-1", board="orin-nano", installation="6f0c") is not None


# --- Keeping certificates ---------------------------------------------------------------------------------------------
# Certificates are renewed at two thirds of their lifetime: during rounds, and after a coordinator was away.

_WITHIN_S = 120.0


@dataclass
class Enrolled:
    """A coordinator with an operator, and machines that it has enrolled."""

    served: Client
    service: Any
    folder: Path
    fleet: CertifiedFleet
    identities: dict[str, Identity] = field(default_factory=dict)

    async def enrol(self, role: Role, name: str) -> Endpoint:
        identity = await joined(self.service, role, Applicant("", "agx-orin", "6f0c"), name)
        write_identity(self.folder / name, identity)
        self.identities[name] = identity
        return Endpoint.of(None, self.folder / name)

    def serial(self, name: str) -> str:
        found = read_identity(self.folder / name)
        assert found is not None
        return found.certificate.serial

    def is_renewed(self, name: str) -> bool:
        return self.serial(name) != self.identities[name].certificate.serial


@asynccontextmanager
async def enrolling(config: CoordinatorSettings, tmp_path: Path) -> AsyncIterator[Enrolled]:
    fleet = CertifiedFleet.create(tmp_path / "authority")
    anna = fleet.identity(Role.OPERATOR, "anna", timedelta(seconds=3000))
    settings = certified(config, fleet.authority.folder)
    async with asyncio.timeout(_WITHIN_S), serving(settings) as served, calling(served, anna) as client:
        yield Enrolled(served, identity_pb2_grpc.IdentityServiceStub(client.channel), tmp_path, fleet)


def overdue(folder: Path) -> datetime:
    """A moment at which the certificate in a folder is due for renewal, whatever its jitter, and still valid."""
    found = read_identity(folder)
    assert found is not None
    return due_at(folder) + (found.certificate.not_after - due_at(folder)) / 2


@asynccontextmanager
async def running_session(endpoint: Endpoint, tmp_path: Path) -> AsyncIterator[CoordinatorSession]:
    """The agent's own session for the device orin, which is ready to train."""

    async def welcomed(_: session_pb2.Welcome) -> None:
        pass

    hello = session_pb2.Hello(
        device_id="orin",
        board="agx-orin",
        provenance=power_pb2.PROVENANCE_SIMULATED,
        mode_count=7,
        installation="6f0c",
        protocol=own_version(),
    )
    session = CoordinatorSession(connects_to(endpoint), hello, welcomed, Outbox(OutboxFile(tmp_path / "outbox")))
    session.report_front(session_pb2.FrontReport(front=front_to_message(ORIN_FRONT), idle_w=5.0))
    session.report_state(READY)
    task = asyncio.create_task(session.run())
    try:
        assert await session.flush(60.0)
        yield session
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def renewed_by_keeper(endpoint: Endpoint, session: CoordinatorSession) -> None:
    """Let the keeper renew the certificate of a device, at two thirds of its lifetime."""
    assert endpoint.folder is not None
    later, renewed = overdue(endpoint.folder), asyncio.Event()

    def on_renewed() -> None:
        session.reconnect()
        renewed.set()

    keeper = asyncio.create_task(CertificateKeeper(endpoint, on_renewed, now=lambda: later).run())
    await renewed.wait()
    keeper.cancel()
    await asyncio.gather(keeper, return_exceptions=True)


def planner_of(endpoint: Endpoint, clock: VirtualClock, now: list[datetime]) -> PlanningClient:
    return PlanningClient(endpoint, clock, lambda: now[0])


async def begin_round(planner: PlanningClient) -> planning_pb2.PlanRoundResponse:
    """Start a run, and plan its first round with the device orin."""
    binding = planning_pb2.NodeBinding(node_id=ORIN_NODE, device_id="orin")
    await asyncio.to_thread(planner.call, "BindNodes", planning_pb2.BindNodesRequest(bindings=[binding]))
    start = planning_pb2.StartRunRequest(run_id=RUN, strategy="FedAvg", rounds=2, run_token="t")
    await asyncio.to_thread(planner.call, "StartRun", start)
    return await plan(planner, 1)


async def plan(planner: PlanningClient, number: int) -> planning_pb2.PlanRoundResponse:
    request = planning_pb2.PlanRoundRequest(run_id=RUN, round=number, node_ids=[ORIN_NODE], epochs=1.0, run_token="t")
    found: planning_pb2.PlanRoundResponse = await asyncio.to_thread(planner.call, "PlanRound", request)
    assert len(found.assignments) == 1
    return found


async def finish_round(planner: PlanningClient, plan_id: str) -> None:
    result = planning_pb2.DeviceResult(device_id="orin", num_examples=10.0, share=1.0)
    request = planning_pb2.FinishRoundRequest(plan_id=plan_id, wall_s=12.0, results=[result], run_token="t")
    await asyncio.to_thread(planner.call, "FinishRound", request)


async def test_both_sides_renew_during_a_round_in_flight(config: CoordinatorSettings, tmp_path: Path) -> None:
    async with enrolling(config, tmp_path) as enrolled:
        device, app = await enrolled.enrol(Role.DEVICE, "orin"), await enrolled.enrol(Role.FLOWER, "app")
        clock, now = VirtualClock(), [utc_now()]
        planner = planner_of(app, clock, now)
        async with running_session(device, tmp_path) as session:
            planned = await begin_round(planner)
            await eventually(lambda: session.grants.lease().plan_id == planned.plan_id)
            grant = session.grants.lease().grant_id
            await renewed_by_keeper(device, session)
            assert enrolled.is_renewed("orin")
            await eventually(lambda: not session.connected)
            await eventually(lambda: session.connected)
            assert session.grants.lease().grant_id == grant, "the grant stays in force"
            now[0] = overdue(tmp_path / "app")
            clock.sleep_s(61.0)
            await asyncio.to_thread(planner.call, "ResolveNodes", planning_pb2.ResolveNodesRequest())
            assert enrolled.is_renewed("app")
            # The former certificates are not needed any more.
            for name in ("orin", "app"):
                serial = enrolled.identities[name].certificate.serial
                await enrolled.service.RevokeCertificates(identity_pb2.RevokeCertificatesRequest(name_or_serial=serial))
            assert session.connected
            session.report_observation(session_pb2.Observation(plan_id=planned.plan_id, epoch_s=10.0, power_w=20.0))
            assert await session.flush(60.0)
            await finish_round(planner, planned.plan_id)


async def test_an_authority_is_replaced_with_a_round_in_flight(config: CoordinatorSettings, tmp_path: Path) -> None:
    async with enrolling(config, tmp_path) as enrolled:
        device, app = await enrolled.enrol(Role.DEVICE, "orin"), await enrolled.enrol(Role.FLOWER, "app")
        clock, now = VirtualClock(), [utc_now()]
        planner = planner_of(app, clock, now)
        async with running_session(device, tmp_path) as session:
            planned = await begin_round(planner)
            answer = await enrolled.service.BeginRotation(identity_pb2.BeginRotationRequest())
            assert {f"{each.role} {each.name}" for each in answer.to_renew} == {"device orin", "flower app"}
            open_invite = await invited(enrolled.service, Role.DEVICE)
            with pytest.raises(Exception, match="2 certificates of the old authority are still valid"):
                await enrolled.service.FinishRotation(identity_pb2.FinishRotationRequest())
            await renewed_by_keeper(device, session)
            now[0] = overdue(tmp_path / "app")
            clock.sleep_s(61.0)
            await asyncio.to_thread(planner.call, "ResolveNodes", planning_pb2.ResolveNodesRequest())
            assert enrolled.is_renewed("orin") and enrolled.is_renewed("app")
            await enrolled.service.FinishRotation(identity_pb2.FinishRotationRequest())
            # New connections of both sides: the server's certificate is from the new authority, and so are theirs.
            await eventually(lambda: session.connected)
            session.reconnect()
            await eventually(lambda: not session.connected)
            await eventually(lambda: session.connected)
            session.report_observation(session_pb2.Observation(plan_id=planned.plan_id, epoch_s=10.0, power_w=20.0))
            assert await session.flush(60.0)
            await finish_round(planner_of(app, clock, now), planned.plan_id)
            async with calling(enrolled.served, enrolled.identities["orin"]) as former:
                with pytest.raises(Exception, match="UNAVAILABLE"):
                    await former.agent().hello("orin")
            listed = await enrolled.service.ListInvites(identity_pb2.ListInvitesRequest())
            assert not listed.invites, f"{open_invite.address} has another authority now"


async def test_a_certificate_of_which_the_clock_was_ahead_is_renewed(
    config: CoordinatorSettings, tmp_path: Path
) -> None:
    async with enrolling(config, tmp_path) as enrolled:
        endpoint = await enrolled.enrol(Role.DEVICE, "orin")
        note_time(tmp_path / "orin", utc_now() + timedelta(days=4000))
        renewed = asyncio.Event()
        keeper = asyncio.create_task(CertificateKeeper(endpoint, renewed.set).run())
        await renewed.wait()
        keeper.cancel()
        assert enrolled.is_renewed("orin")


async def test_a_coordinator_that_was_away_at_two_thirds_renews_when_it_is_back(
    config: CoordinatorSettings, tmp_path: Path
) -> None:
    async with enrolling(config, tmp_path) as enrolled:
        endpoint = await enrolled.enrol(Role.DEVICE, "orin")
        address = enrolled.served.bound.address
    back = certified(config.with_values(server={"address": address}), tmp_path / "authority")
    back = back.model_copy(update={"identity": back.identity.model_copy(update={"enrolment_address": "127.0.0.1:0"})})
    clock, began = VirtualClock(), utc_now()
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        clock.sleep_s(seconds)
        await asyncio.sleep(0)

    def now() -> datetime:
        return began + timedelta(seconds=clock.now_s())

    due_s = (due_at(tmp_path / "orin") - began).total_seconds()
    renewed_after: list[int] = []  # waits
    keeper = CertificateKeeper(endpoint, lambda: renewed_after.append(len(waits)), now, clock.now_s, sleep)
    async with asyncio.timeout(_WITHIN_S):
        task = asyncio.create_task(keeper.run())
        await eventually(lambda: clock.now_s() > due_s + 4 * 86400.0)
        assert not renewed_after
        async with serving(back):
            await eventually(lambda: bool(renewed_after))
        task.cancel()
    attempts = [wait for wait in waits[: renewed_after[0]][-5:] if wait < 3600.0]
    assert attempts and all(wait >= 1800.0 for wait in attempts), "it tries about every hour"
    assert enrolled.is_renewed("orin")


async def test_power_aware_renews_in_time_and_does_not_look_all_the_time(
    config: CoordinatorSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with enrolling(config, tmp_path) as enrolled:
        app = await enrolled.enrol(Role.FLOWER, "app")
        clock, now = VirtualClock(), [utc_now()]
        planner = planner_of(app, clock, now)
        looked: list[None] = []
        identity = Endpoint.identity
        monkeypatch.setattr(Endpoint, "identity", lambda self: looked.append(None) or identity(self))

        async def ask() -> None:
            await asyncio.to_thread(planner.call, "ResolveNodes", planning_pb2.ResolveNodesRequest())

        for _request in range(30):
            await ask()
        assert not looked
        now[0] = due_at(tmp_path / "app") - timedelta(days=1)
        clock.sleep_s(61.0)
        await ask()
        assert looked and not enrolled.is_renewed("app")
        now[0] = overdue(tmp_path / "app")
        clock.sleep_s(61.0)
        await ask()
        assert enrolled.is_renewed("app")
        serial = enrolled.identities["app"].certificate.serial
        await enrolled.service.RevokeCertificates(identity_pb2.RevokeCertificatesRequest(name_or_serial=serial))
        await ask()


async def test_power_aware_follows_an_identity_that_another_program_has_renewed(
    config: CoordinatorSettings, tmp_path: Path
) -> None:
    async with enrolling(config, tmp_path) as enrolled:
        app = await enrolled.enrol(Role.FLOWER, "app")
        clock = VirtualClock()
        planner = planner_of(app, clock, [utc_now()])
        former = enrolled.identities["app"].certificate.serial
        await enrolled.enrol(Role.FLOWER, "app")
        clock.sleep_s(61.0)
        request = planning_pb2.ResolveNodesRequest()
        await asyncio.to_thread(planner.call, "ResolveNodes", request)
        await enrolled.service.RevokeCertificates(identity_pb2.RevokeCertificatesRequest(name_or_serial=former))
        await asyncio.to_thread(planner.call, "ResolveNodes", request)


def test_an_agent_without_a_certificate_has_none_to_renew(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="has no identity"):
        due_at(tmp_path)
