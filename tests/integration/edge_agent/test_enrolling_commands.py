"""Enrolment from a user's point of view: over TLS, from `coordinator init` to commands and agents with an identity."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from coordinator.settings import CoordinatorSettings
from edge_agent.session.certificate_keeper import CertificateKeeper, connects_to
from tests.fakes.certified import CertifiedFleet, calling, certified, joined
from tests.fakes.served import Agent, serving
from wattfleet_identity.channels import Endpoint, HandshakeError
from wattfleet_identity.identity_folder import read_identity, write_identity
from wattfleet_identity.invites import Invite, new_token
from wattfleet_identity.joining import Applicant
from wattfleet_identity.peers import Role
from wattfleet_identity.renewal import due_at
from wattfleet_identity.supernode_folder import SuperNodeFacts, read_facts
from wattfleet_io import cli
from wattfleet_io.clock import utc_now
from wattfleet_proto.v1 import (
    enrolment_pb2,
    enrolment_pb2_grpc,
    identity_pb2_grpc,
    power_pb2,
    session_pb2,
)

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
