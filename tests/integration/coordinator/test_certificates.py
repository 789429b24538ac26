"""Certificates from a coordinator over TLS: enrolments, renewals, revocations, and those of Flower's SuperLink."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from coordinator.errors import InvalidInviteError, QuotaExceededError
from coordinator.identity.access import ServerCredentials
from coordinator.identity.authority_folder import SERVER_LIFETIME, AuthorityFolder
from coordinator.services.identities import EnrolmentServicer
from coordinator.services.issuing import Issuing, PublicAddresses
from coordinator.settings import CoordinatorSettings
from coordinator.state.identities import Identities
from coordinator.state.identity_records import Terms
from tests.fakes.served import CertifiedFleet, Client, calling, certified, command, hello_of, invited, joined, serving
from tests.fakes.small_fleet import PlaintextContext
from wattfleet.common.addresses import split_address
from wattfleet.common.clock import utc_now
from wattfleet.common.identity.authority import SERVER_NAME
from wattfleet.common.identity.certificates import Certificate, matches, new_key, request_certificate
from wattfleet.common.identity.identity_folder import Identity, write_identity
from wattfleet.common.identity.joining import Applicant, EnrolmentRefusedError, join
from wattfleet.common.identity.peers import Role
from wattfleet.common.identity.supernode_folder import SuperNodeKey
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet_proto.v1 import (
    enrolment_pb2,
    enrolment_pb2_grpc,
    identity_pb2,
    identity_pb2_grpc,
    operator_pb2,
    operator_pb2_grpc,
    superlink_pb2,
    superlink_pb2_grpc,
    view_pb2,
)

# --- Enrolling --------------------------------------------------------------------------------------------------------
# Enrolment over real TLS: from an invite to a certificate, its revocation, and the audit log.


async def test_a_device_enrols_once_and_is_revoked(
    config: CoordinatorSettings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = CertifiedFleet.create(tmp_path / "authority")
    anna = fleet.identity(Role.OPERATOR, "anna")
    async with serving(certified(config, fleet.authority.folder)) as served, calling(served, anna) as client:
        service = identity_pb2_grpc.IdentityServiceStub(client.channel)
        invite = await invited(service, Role.DEVICE)
        found = await asyncio.to_thread(join, invite, Applicant("orin-3", "agx-orin", "6f0c"))
        assert (found.peer.name, found.peer.role, found.coordinator) == ("orin-3", Role.DEVICE, served.bound.address)
        with pytest.raises(EnrolmentRefusedError, match="unknown, has expired, or was used up"):
            await asyncio.to_thread(join, invite, Applicant("orin-4"))
        revoked = await service.RevokeCertificates(identity_pb2.RevokeCertificatesRequest(name_or_serial="orin-3"))
        assert [each.serial for each in revoked.certificates] == [found.certificate.serial]
        async with calling(served, found) as device:
            with pytest.raises(grpc.aio.AioRpcError, match="was revoked"):
                await device.view.GetFleet(view_pb2.GetFleetRequest())
        entries = [
            entry
            async for answer in service.ReadAuditLog(identity_pb2.ReadAuditLogRequest())
            for entry in answer.entries
        ]
        assert [(each.caller, each.method) for each in entries] == [
            ("operator anna", "Invite"),
            ("operator anna", "RevokeCertificates"),
        ]
        assert invite.token not in repr(entries) and invite.token not in caplog.text


# --- Renewing ---------------------------------------------------------------------------------------------------------
# Renewals and enrolments at a coordinator over TLS: validity, limits, permissions, and the cost of a refusal.

SOON = timedelta(minutes=10)
ORIN_3 = Applicant("orin-3", "agx-orin", "6f0c")


@asynccontextmanager
async def administered(config: CoordinatorSettings, folder: Path) -> AsyncIterator[tuple[Client, Any, CertifiedFleet]]:
    """A coordinator, and the identity service as called by the operator anna."""
    fleet = CertifiedFleet.create(folder)
    anna = fleet.identity(Role.OPERATOR, "anna")
    async with serving(certified(config, folder)) as served, calling(served, anna) as client, asyncio.timeout(120):
        yield served, identity_pb2_grpc.IdentityServiceStub(client.channel), fleet


async def renewed(served: Client, identity: Identity) -> Certificate:
    async with calling(served, identity) as client:
        request = enrolment_pb2.RenewRequest(request_pem=request_certificate(identity.key_pem))
        answer = await enrolment_pb2_grpc.EnrolmentServiceStub(client.channel).Renew(request)
    return Identity(identity.key_pem, answer.certificate_pem, answer.trusted_pem).certificate


def is_about(found: datetime, expected: datetime) -> bool:
    return abs(found - expected) < SOON


async def test_a_renewal_does_not_lengthen_what_an_operator_has_shortened(
    config: CoordinatorSettings, tmp_path: Path
) -> None:
    async with administered(config, tmp_path / "authority") as (served, service, _):
        key_pem = new_key()
        answer = await service.IssueCertificate(
            identity_pb2.IssueCertificateRequest(
                request_pem=request_certificate(key_pem), role="operator", name="contractor", lifetime_s=3600
            )
        )
        contractor = Identity(key_pem, answer.certificate_pem, answer.trusted_pem)
        assert is_about((await renewed(served, contractor)).not_after, utc_now() + timedelta(hours=1))
        device = await joined(service, Role.DEVICE, ORIN_3)
        assert is_about((await renewed(served, device)).not_after, utc_now() + timedelta(days=30))


async def test_early_renewals_are_limited_and_the_newest_certificate_stays_valid(
    config: CoordinatorSettings, tmp_path: Path
) -> None:
    async with administered(config, tmp_path / "authority") as (served, service, _):
        device = await joined(service, Role.DEVICE, ORIN_3)
        for _attempt in range(3):
            await renewed(served, device)
        with pytest.raises(grpc.aio.AioRpcError, match="use the newest one") as refused:
            await renewed(served, device)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("role", [Role.DEVICE, Role.VIEWER])
async def test_a_renewal_keeps_the_key_of_the_certificate(
    config: CoordinatorSettings, tmp_path: Path, role: Role
) -> None:
    async with administered(config, tmp_path / "authority") as (served, service, _):
        name, applicant = ("orin-3", ORIN_3) if role is Role.DEVICE else ("anna-2", Applicant())
        identity = await joined(service, role, applicant, name)
        async with calling(served, identity) as client:
            request = enrolment_pb2.RenewRequest(request_pem=request_certificate(new_key()))
            with pytest.raises(grpc.aio.AioRpcError, match="another key than .*enrol again for a new key") as refused:
                await enrolment_pb2_grpc.EnrolmentServiceStub(client.channel).Renew(request)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        listed = service.ListCertificates(identity_pb2.ListCertificatesRequest())
        own = [each async for answer in listed for each in answer.certificates if each.name == name]
        assert [each.serial for each in own] == [identity.certificate.serial]
        assert (await renewed(served, identity)).peer.name == name


async def test_a_revoked_owner_renews_nothing(config: CoordinatorSettings, tmp_path: Path) -> None:
    async with administered(config, tmp_path / "authority") as (served, service, _):
        device = await joined(service, Role.DEVICE, ORIN_3)
        async with calling(served, device) as client:
            await service.RevokeCertificates(identity_pb2.RevokeCertificatesRequest(name_or_serial="orin-3"))
            request = enrolment_pb2.RenewRequest(request_pem=request_certificate(device.key_pem))
            with pytest.raises(grpc.aio.AioRpcError, match="was revoked") as refused:
                await enrolment_pb2_grpc.EnrolmentServiceStub(client.channel).Renew(request)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_an_invite_is_used_as_often_as_it_says_by_many_at_once(
    config: CoordinatorSettings, tmp_path: Path
) -> None:
    async with administered(config, tmp_path / "authority") as (_, service, _fleet):
        invite = await invited(service, Role.DEVICE, uses=3)
        joins = [asyncio.to_thread(join, invite, Applicant(f"orin-{number}")) for number in range(8)]
        results = await asyncio.gather(*joins, return_exceptions=True)
    assert sum(isinstance(each, Identity) for each in results) == 3
    assert sum(isinstance(each, EnrolmentRefusedError) for each in results) == 5


def rsa_request() -> bytes:
    return _request(rsa.generate_private_key(public_exponent=65537, key_size=2048))


def wide_request() -> bytes:
    return _request(ec.generate_private_key(ec.SECP384R1()))


def forged_request() -> bytes:
    """A request for somebody else's key: its signature does not match."""
    request = x509.load_pem_x509_csr(request_certificate(new_key()))
    der = bytearray(request.public_bytes(serialization.Encoding.DER))
    der[-1] ^= 1
    return x509.load_der_x509_csr(bytes(der)).public_bytes(serialization.Encoding.PEM)


def _request(key: Any) -> bytes:
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


async def test_a_request_that_cannot_be_certified_uses_no_invite_up(
    config: CoordinatorSettings, tmp_path: Path
) -> None:
    async with administered(config, tmp_path / "authority") as (served, service, fleet):
        invite = await invited(service, Role.DEVICE)
        credentials = grpc.ssl_channel_credentials(fleet.authority.trusted_pem)
        options = [("grpc.ssl_target_name_override", "coordinator.wattfleet")]
        async with grpc.aio.secure_channel(str(served.bound.enrolment_address), credentials, options) as channel:
            stub = enrolment_pb2_grpc.EnrolmentServiceStub(channel)
            for pem in (rsa_request(), wide_request(), forged_request(), b"nonsense", b""):
                with pytest.raises(grpc.aio.AioRpcError, match="request") as refused:
                    await stub.Join(enrolment_pb2.JoinRequest(token=invite.token, request_pem=pem, name="orin-3"))
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await asyncio.to_thread(join, invite, Applicant("orin-3"))).peer.name == "orin-3"


class LocalContext(PlaintextContext):
    """The context of a call from this machine."""

    def peer(self) -> str:
        return "ipv4:127.0.0.1:4711"


class Repository:
    """A fleet without devices, whose store responds immediately unless it is stuck."""

    def __init__(self, is_stuck: bool = False) -> None:
        self.fleet, self.operator = self, self
        self.is_stuck = is_stuck
        self.saved: list[Any] = []

    def place(self, *_: Any) -> list[Any]:
        return []

    async def save(self, *_: Any) -> None:
        if self.is_stuck:
            await asyncio.Event().wait()

    def save_soon(self, *records: Any) -> None:
        self.saved.extend(records)


def enrolment(tmp_path: Path, repository: Any, identities: Identities, now_s: Callable[[], float]) -> EnrolmentServicer:
    folder = AuthorityFolder.create(tmp_path / "authority", [], utc_now())
    addresses = PublicAddresses("a:1", "a:1", "a:1")
    issuing = Issuing(identities, ServerCredentials(folder), lambda: addresses, timedelta(days=30))
    return EnrolmentServicer(repository, issuing, lambda _: None, lambda: 0, now_s)


def joining(token: str) -> enrolment_pb2.JoinRequest:
    return enrolment_pb2.JoinRequest(token=token, request_pem=request_certificate(new_key()), name="orin-3")


async def test_guesses_of_one_host_are_slowed_down(tmp_path: Path) -> None:
    identities, now_s = Identities(), [0.0]
    identities.invite("secret", Terms(), "operator anna", utc_now())
    servicer = enrolment(tmp_path, Repository(), identities, lambda: now_s[0])
    for _guess in range(10):
        with pytest.raises(InvalidInviteError):
            await servicer.Join(joining("guessed"), LocalContext())
    for token in ("guessed", "secret"):
        with pytest.raises(QuotaExceededError, match="too many wrong tokens"):
            await servicer.Join(joining(token), LocalContext())
    now_s[0] += 60.0
    assert (await servicer.Join(joining("secret"), LocalContext())).certificate_pem


async def test_an_enrolment_that_is_given_up_leaves_the_invite_usable(tmp_path: Path) -> None:
    identities, stuck = Identities(), Repository(is_stuck=True)
    invite = identities.invite("secret", Terms(), "operator anna", utc_now())
    task = asyncio.create_task(
        enrolment(tmp_path, stuck, identities, lambda: 0.0).Join(joining("secret"), LocalContext())
    )
    await asyncio.sleep(0.01)
    assert not identities.invites(utc_now())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [each.number for each in identities.invites(utc_now())] == [invite.number]
    assert all(each.revoked_at for each in identities.certificates(utc_now()))
    assert len(stuck.saved) == 2


# --- the server's certificate, and TLS ------------------------------------------------------------------------------


async def test_the_servers_certificate_is_renewed_at_two_thirds_of_its_life(tmp_path: Path) -> None:
    folder = AuthorityFolder.create(tmp_path / "authority", ["127.0.0.1"], utc_now())
    now = [utc_now()]
    credentials = ServerCredentials(folder, lambda: now[0])
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", credentials.of_enrolment())
    await server.start()

    async def shown() -> str:
        pem = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))
        return Certificate.from_pem(pem.encode()).serial

    try:
        first = await shown()
        now[0] += SERVER_LIFETIME * 0.6
        assert not credentials.renew_if_due() and await shown() == first
        now[0] += SERVER_LIFETIME * 0.1
        assert credentials.renew_if_due()
        second = await shown()
        renewed = AuthorityFolder.open(folder.folder)
        assert second != first and second == renewed.server.serial
        assert renewed.server_key_pem != folder.server_key_pem
        assert not credentials.renew_if_due()
    finally:
        await server.stop(None)


@pytest.mark.parametrize("name", ["address", "enrolment_address"])
async def test_tls_below_1_2_is_refused(config: CoordinatorSettings, tmp_path: Path, name: str) -> None:
    def handshake(address: str, version: ssl.TLSVersion) -> str | None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_ciphers("ALL:@SECLEVEL=0")
        context.set_alpn_protocols(["h2"])
        context.load_cert_chain(tmp_path / "peer" / "certificate.pem", tmp_path / "peer" / "key.pem")
        context.minimum_version = context.maximum_version = version
        with socket.create_connection(split_address(address), 20) as connection:
            with context.wrap_socket(connection) as protected:
                return protected.version()

    async with administered(config, tmp_path / "authority") as (served, _, fleet):
        write_identity(tmp_path / "peer", fleet.identity(Role.VIEWER))
        address = getattr(served.bound, name)
        with pytest.warns(DeprecationWarning), pytest.raises(ssl.SSLError, match="(?i)version|alert|protocol"):
            await asyncio.to_thread(handshake, address, ssl.TLSVersion.TLSv1_1)
        assert await asyncio.to_thread(handshake, address, ssl.TLSVersion.TLSv1_2) == "TLSv1.2"


# --- the audit log --------------------------------------------------------------------------------------------------


async def test_denied_changes_are_in_the_audit_log_and_cannot_flood_it(
    config: CoordinatorSettings, tmp_path: Path
) -> None:
    async with administered(config, tmp_path / "authority") as (served, service, fleet):
        async with calling(served, fleet.identity(Role.VIEWER, "eve")) as client:
            for _attempt in range(40):
                with pytest.raises(grpc.aio.AioRpcError, match="may not call"):
                    await client.operator.SetBudget(operator_pb2.SetBudgetRequest())
            await client.view.GetFleet(view_pb2.GetFleetRequest())
        entries: list[identity_pb2.AuditEntry] = []
        async with asyncio.timeout(60):  # refusals are written to disk without anybody waiting for it
            while len(entries) < 10:
                answers = [each async for each in service.ReadAuditLog(identity_pb2.ReadAuditLogRequest())]
                entries = [entry for answer in answers for entry in answer.entries]
    assert {(each.caller, each.method) for each in entries} == {("viewer eve", "SetBudget")}
    assert len(entries) == 10 and all("refused: a certificate of the role viewer" in each.outcome for each in entries)


# --- Revoking commands ------------------------------------------------------------------------------------------------
# `wattfleet coordinator revoke`: whose certificates it revokes, and the questions that it asks.


@pytest.fixture
async def shell(config: CoordinatorSettings, tmp_path: Path) -> AsyncIterator[Callable[..., str]]:
    """Runs commands as an operator of a fleet that has a device and a viewer of the same name."""
    fleet = CertifiedFleet.create(tmp_path / "authority")
    write_identity(tmp_path / "operator", fleet.identity(Role.OPERATOR))
    settings = certified(config, fleet.authority.folder)
    async with serving(settings) as served, calling(served, fleet.identity(Role.OPERATOR)) as operator:
        service = identity_pb2_grpc.IdentityServiceStub(operator.channel)
        await joined(service, Role.DEVICE, Applicant("roof", "orin-nano", "6f0c"), "roof")
        await joined(service, Role.VIEWER, Applicant(), "roof")
        options = ("--coordinator", served.bound.address, "--identity", str(tmp_path / "operator"))
        yield lambda *words, **typed: command(*words, *options, **typed).output


def roles_left(shell: Callable[..., str]) -> list[str]:
    return [each["role"] for each in json.loads(shell("certificates", "--json")) if each["revoked"] is None]


async def test_a_role_is_revoked_alone(shell: Callable[..., str]) -> None:
    await asyncio.to_thread(shell, "revoke", "roof", "--role", "viewer")
    assert await asyncio.to_thread(roles_left, shell) == ["device"]
    with pytest.raises(WattfleetError, match="no valid certificate has the name or serial number 'viewer roof'"):
        await asyncio.to_thread(shell, "revoke", "roof", "--role", "viewer")


async def test_without_a_terminal_every_role_is_revoked(shell: Callable[..., str]) -> None:
    out = await asyncio.to_thread(shell, "revoke", "roof")
    assert "of device roof is revoked" in out and "of viewer roof is revoked" in out


@pytest.mark.parametrize(("answer", "left"), [("n\n", ["device", "viewer"]), ("y\n", []), ("\n", [])])
async def test_on_a_terminal_it_asks_before_it_revokes_several_roles(
    shell: Callable[..., str], answer: str, left: list[str]
) -> None:
    out = await asyncio.to_thread(shell, "revoke", "roof", typed=answer)
    assert "roof has certificates of several roles: device, viewer" in out
    assert ("nothing was revoked: repeat the command with --role device or --role viewer" in out) == bool(left)
    assert await asyncio.to_thread(roles_left, shell) == left


# --- Superlink service ------------------------------------------------------------------------------------------------
# What the coordinator provides to Flower's SuperLink: a TLS certificate, and the list of enrolled SuperNodes.


@pytest.fixture
def settings(config: CoordinatorSettings, fleet: CertifiedFleet) -> CoordinatorSettings:
    told = {"address": "site.example:8000", "hosts": ("10.0.0.5",)}
    return certified(config, fleet.authority.folder).with_values(superlink=told)


async def enrolled_with(key: SuperNodeKey, client: Client, device_id: str) -> Identity:
    """Enrol a device with the key of its SuperNode."""
    service = identity_pb2_grpc.IdentityServiceStub(client.channel)
    return await joined(service, Role.DEVICE, Applicant(device_id, "orin-nano", "6f0c"), device_id, key.public)


async def supernodes(client: Client, known: str = "") -> tuple[dict[str, str], Any]:
    service = superlink_pb2_grpc.SuperLinkServiceStub(client.channel)
    parts = [part async for part in service.ListSuperNodes(superlink_pb2.ListSuperNodesRequest(known_revision=known))]
    return {view.device_id: view.public_key for part in parts for view in part.supernodes}, parts[0]


async def test_enrolled_supernodes_are_listed_until_they_are_revoked_or_forgotten(
    settings: CoordinatorSettings, fleet: CertifiedFleet
) -> None:
    keys = {name: SuperNodeKey.create() for name in ("nano-1", "nano-2", "nano-3")}
    async with (
        serving(settings) as served,
        calling(served, fleet.identity(Role.OPERATOR)) as operator,
        calling(served, fleet.identity(Role.SUPERLINK)) as superlink,
    ):
        for name, key in keys.items():
            identity = await enrolled_with(key, operator, name)
            assert identity.superlink == "site.example:8000"
        found, first = await supernodes(superlink)
        assert found == {name: key.public.decode() for name, key in keys.items()}
        unchanged, again = await supernodes(superlink, first.revision)
        assert again.is_unchanged and unchanged == {}
        service = identity_pb2_grpc.IdentityServiceStub(operator.channel)
        await service.RevokeCertificates(identity_pb2.RevokeCertificatesRequest(name_or_serial="nano-1"))
        found, second = await supernodes(superlink, first.revision)
        assert set(found) == {"nano-2", "nano-3"} and second.revision != first.revision
        async with calling(served, identity) as device:  # nano-3 renews its certificate, and keeps its key
            renewing = enrolment_pb2_grpc.EnrolmentServiceStub(device.channel)
            request = enrolment_pb2.RenewRequest(request_pem=request_certificate(identity.key_pem))
            assert (await renewing.Renew(request)).superlink == "site.example:8000"
        found, _ = await supernodes(superlink)
        assert found["nano-3"] == keys["nano-3"].public.decode()
        renewed = SuperNodeKey.create()
        await enrolled_with(renewed, operator, "nano-2")
        found, _ = await supernodes(superlink)
        assert found["nano-2"] == renewed.public.decode()


async def test_a_forgotten_device_has_to_enrol_again(settings: CoordinatorSettings, fleet: CertifiedFleet) -> None:
    async with (
        serving(settings) as served,
        calling(served, fleet.identity(Role.OPERATOR)) as operator,
        calling(served, fleet.identity(Role.SUPERLINK)) as superlink,
    ):
        identity = await enrolled_with(SuperNodeKey.create(), operator, "nano-1")
        async with calling(served, identity) as device:
            agent = device.agent()
            await agent.greet(hello_of("nano-1", "orin-nano", "6f0c"))
            await agent.goodbye()
        await operator_pb2_grpc.OperatorServiceStub(operator.channel).ForgetDevices(
            operator_pb2.ForgetDevicesRequest(device_ids=["nano-1"])
        )
        found, _ = await supernodes(superlink)
        assert found == {}
        async with calling(served, identity) as device:
            with pytest.raises(grpc.aio.AioRpcError, match="was revoked: enrol again"):
                await superlink_pb2_grpc.SuperLinkServiceStub(device.channel).GetSuperLink(
                    superlink_pb2.GetSuperLinkRequest()
                )


async def test_the_certificate_is_for_the_superlinks_addresses_only(
    settings: CoordinatorSettings, fleet: CertifiedFleet
) -> None:
    key = new_key()
    request = superlink_pb2.IssueServerCertificateRequest(request_pem=request_certificate(key), hosts=["10.0.0.5"])
    async with serving(settings) as served, calling(served, fleet.identity(Role.SUPERLINK)) as superlink:
        service = superlink_pb2_grpc.SuperLinkServiceStub(superlink.channel)
        answer = await service.IssueServerCertificate(request)
        hosts = Certificate.from_pem(answer.certificate_pem).hosts
        assert set(hosts) == {"site.example", "10.0.0.5", "localhost", "127.0.0.1", "::1"}
        assert matches(key, answer.certificate_pem)
        _, first = await supernodes(superlink)
        assert answer.authority == first.authority
        for foreign in ("other.example", SERVER_NAME):
            request = superlink_pb2.IssueServerCertificateRequest(request_pem=request.request_pem, hosts=[foreign])
            with pytest.raises(grpc.aio.AioRpcError, match=".* is not a known address of the SuperLink"):
                await service.IssueServerCertificate(request)


async def test_only_a_superlink_gets_a_certificate_and_the_audit_log_says_who(
    settings: CoordinatorSettings, fleet: CertifiedFleet
) -> None:
    request = superlink_pb2.IssueServerCertificateRequest(request_pem=request_certificate(new_key()))
    async with serving(settings) as served, calling(served, fleet.identity(Role.OPERATOR)) as operator:
        for role, name in ((Role.FLOWER, "anna"), (Role.OPERATOR, "bea"), (Role.SUPERLINK, "rack")):
            async with calling(served, fleet.identity(role, name)) as caller:
                issuing = superlink_pb2_grpc.SuperLinkServiceStub(caller.channel).IssueServerCertificate(request)
                if role is Role.SUPERLINK:
                    assert (await issuing).certificate_pem
                    continue
                with pytest.raises(grpc.aio.AioRpcError, match="may not call .*: use one of the role superlink"):
                    await issuing
        log = identity_pb2_grpc.IdentityServiceStub(operator.channel)
        entries = [e async for part in log.ReadAuditLog(identity_pb2.ReadAuditLogRequest()) for e in part.entries]
    found = {each.caller: each.outcome for each in entries if each.method == "IssueServerCertificate"}
    assert found["superlink rack"] == "" and found["flower anna"].startswith("refused: ")


async def test_a_coordinator_that_was_not_told_says_how(config: CoordinatorSettings, fleet: CertifiedFleet) -> None:
    request = superlink_pb2.IssueServerCertificateRequest(request_pem=request_certificate(new_key()))
    async with (
        serving(certified(config, fleet.authority.folder)) as served,
        calling(served, fleet.identity(Role.SUPERLINK)) as superlink,
    ):
        service = superlink_pb2_grpc.SuperLinkServiceStub(superlink.channel)
        with pytest.raises(grpc.aio.AioRpcError, match="restart it with --superlink-address HOST:PORT"):
            await service.IssueServerCertificate(request)


async def test_a_superlink_needs_an_authority(config: CoordinatorSettings) -> None:
    with pytest.raises(InvalidInputError, match=r"--superlink-address needs an authority"):
        async with serving(config.with_values(superlink={"address": "site.example:8000"})):
            pass
