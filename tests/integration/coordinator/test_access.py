"""Who may call which RPC of a coordinator with an authority, over TLS: roles, ended certificates, and foreign ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from coordinator.identity.access import ROLES, STREAMS, WITHOUT_CERTIFICATE, LiveCalls
from coordinator.identity.authority_folder import TRUSTED, AuthorityFolder
from coordinator.server import SERVICES
from coordinator.settings import CoordinatorSettings
from tests.fakes.served import CertifiedFleet, Client, calling, certified, hello_of, joined, serving
from wattfleet.common.clock import utc_now
from wattfleet.common.identity.certificates import InvalidCertificateError, new_key, request_certificate
from wattfleet.common.identity.identity_folder import Identity, write_identity
from wattfleet.common.identity.joining import Applicant
from wattfleet.common.identity.peers import Role
from wattfleet.core.errors import InvalidInputError
from wattfleet_proto.v1 import (
    enrolment_pb2,
    enrolment_pb2_grpc,
    identity_pb2,
    identity_pb2_grpc,
    operator_pb2,
    planning_pb2,
    superlink_pb2,
    superlink_pb2_grpc,
    view_pb2,
)

# --- Access -----------------------------------------------------------------------------------------------------------
# Which roles may call which RPC of a coordinator with an authority, over TLS.


_DENIED = {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED}
_WITHIN_S = 20.0
_TRIES = 20
"""gRPC's client makes the status INTERNAL of a refusal that comes before it has written its request."""


@pytest.fixture
def secured(config: CoordinatorSettings, fleet: CertifiedFleet) -> CoordinatorSettings:
    return certified(config, fleet.authority.folder)


async def outcome(client: Client, method: str) -> grpc.StatusCode | None:
    """The error of a call with an empty request; None if it is answered by a message."""
    for _ in range(_TRIES):
        # On the wire, a unary call looks like a stream of one message.
        call: Any = client.channel.stream_stream(method)(iter([b""]), timeout=_WITHIN_S)
        try:
            if await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
                return None
        except grpc.aio.AioRpcError:
            pass
        finally:
            call.cancel()
        if (code := await call.code()) is not grpc.StatusCode.INTERNAL:
            return code  # type: ignore[no-any-return]
    return grpc.StatusCode.INTERNAL


async def refused_greeting(client: Client, device_id: str) -> grpc.aio.AioRpcError:
    """The status with which a device's session is refused."""
    for _ in range(_TRIES):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await greeted(client, device_id)
        if refused.value.code() is not grpc.StatusCode.INTERNAL:
            break
    return refused.value


async def greeted(client: Client, device_id: str, board: str = "agx-orin", installation: str = "") -> Any:
    agent = client.agent()
    await agent.greet(hello_of(device_id, board, installation))
    return agent


def test_every_served_rpc_has_a_row_and_every_row_an_rpc() -> None:
    served = {f"/{service.full_name}/{method.name}" for service in SERVICES for method in service.methods}
    served.discard("/grpc.health.v1.Health/List")  # the Python service does not have this RPC
    assert served | {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"} == ROLES.keys()
    assert WITHOUT_CERTIFICATE <= ROLES.keys()


@pytest.mark.parametrize("role", Role)
async def test_a_role_may_call_exactly_the_rpcs_of_its_rows(
    secured: CoordinatorSettings, fleet: CertifiedFleet, role: Role
) -> None:
    async with serving(secured) as served, calling(served, fleet.identity(role)) as client:
        outcomes = {method: await outcome(client, method) for method in ROLES}
    allowed = {method for method, code in outcomes.items() if code not in _DENIED}
    assert allowed == {method for method, roles in ROLES.items() if role in roles}


async def test_without_a_certificate_only_enrolment_answers(
    secured: CoordinatorSettings, fleet: CertifiedFleet
) -> None:
    async with serving(secured) as served:
        async with calling(served, None) as client:
            assert await outcome(client, "/wattfleet.v1.ViewService/GetFleet") is grpc.StatusCode.UNAVAILABLE
        credentials = grpc.ssl_channel_credentials(fleet.authority.trusted_pem)
        options = [("grpc.ssl_target_name_override", "coordinator.wattfleet")]
        async with grpc.aio.secure_channel(served.bound.address, credentials, options) as channel:
            client = Client(served.bound, channel, served.stop, served.running)
            assert await outcome(client, "/wattfleet.v1.ViewService/GetFleet") is grpc.StatusCode.UNAVAILABLE
        assert served.bound.enrolment_address is not None
        async with grpc.aio.secure_channel(served.bound.enrolment_address, credentials, options) as channel:
            client = Client(served.bound, channel, served.stop, served.running)
            outcomes = {method: await outcome(client, method) for method in ROLES}
    assert {method for method, code in outcomes.items() if code not in _DENIED} == WITHOUT_CERTIFICATE


async def test_a_certificate_of_another_fleet_does_not_connect(
    secured: CoordinatorSettings, fleet: CertifiedFleet, tmp_path: Path
) -> None:
    stranger = CertifiedFleet.create(tmp_path / "another").identity(Role.OPERATOR)
    posing = fleet.identity(Role.OPERATOR)
    async with serving(secured) as served:
        async with calling(served, stranger) as client:
            assert await outcome(client, "/wattfleet.v1.ViewService/GetFleet") is grpc.StatusCode.UNAVAILABLE
        async with calling(served, posing) as client:
            await client.view.GetFleet(view_pb2.GetFleetRequest())


@pytest.mark.parametrize(
    ("claimed", "reason"),
    [
        ({"device_id": "nano"}, "the certificate is for the device 'orin', not 'nano'"),
        ({"device_id": "orin", "board": "orin-nano"}, "the certificate is for the board 'agx-orin', not 'orin-nano'"),
        (
            {"device_id": "orin", "installation": "another"},
            "the certificate is for the installation 'first', not 'another'",
        ),
    ],
)
async def test_a_device_is_only_what_its_certificate_says(
    secured: CoordinatorSettings, fleet: CertifiedFleet, claimed: dict[str, str], reason: str
) -> None:
    own = fleet.identity(Role.DEVICE, "orin", board="agx-orin", installation="first")
    async with serving(secured) as served, calling(served, own) as client:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await greeted(client, **{"installation": "first", **claimed})
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert reason in str(refused.value.details())
        await greeted(client, "orin", installation="first")


async def test_a_device_takes_its_id_back_from_another_installation(
    secured: CoordinatorSettings, fleet: CertifiedFleet
) -> None:
    copy, own = (fleet.identity(Role.DEVICE, "orin", installation=each) for each in ("copy", "own"))
    async with serving(secured) as served, calling(served, copy) as former, calling(served, own) as client:
        replaced = await greeted(former, "orin", installation="copy")
        await greeted(client, "orin", installation="own")
        assert await replaced.call.code() is grpc.StatusCode.ABORTED


async def test_a_session_ends_when_its_certificate_expires(secured: CoordinatorSettings, fleet: CertifiedFleet) -> None:
    long_lived = fleet.identity(Role.DEVICE, "orin")
    expiring = fleet.identity(Role.DEVICE, "nano", timedelta(seconds=3))
    quick = secured.with_values(sessions={"check_s": 0.1})
    async with serving(quick) as served, calling(served, long_lived) as one, calling(served, expiring) as other:
        orin, nano = await greeted(one, "orin"), await greeted(other, "nano")
        async with asyncio.timeout(_WITHIN_S):
            assert await nano.call.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "expired" in await nano.call.details()
        assert utc_now() >= expiring.certificate.not_after
        await orin.lease()


async def test_operators_may_have_an_address_of_their_own(config: CoordinatorSettings, fleet: CertifiedFleet) -> None:
    settings = certified(config, fleet.authority.folder, operator_address="127.0.0.1:0")
    operator = fleet.identity(Role.OPERATOR)
    request = view_pb2.GetFleetRequest()
    async with serving(settings) as served:
        async with calling(served, operator) as client:
            with pytest.raises(grpc.aio.AioRpcError, match="use the address for operators"):
                await client.view.GetFleet(request)
        async with calling(served, operator, served.bound.operator_address) as client:
            await client.view.GetFleet(request)
        async with calling(served, fleet.identity(Role.DEVICE, "orin"), served.bound.operator_address) as client:
            refused = await refused_greeting(client, "orin")
            assert "does not serve the role device" in str(refused.details())


async def test_a_fleet_moves_over_through_a_plaintext_address(
    config: CoordinatorSettings, fleet: CertifiedFleet
) -> None:
    settings = certified(config, fleet.authority.folder, plaintext_address="127.0.0.1:0")
    async with serving(settings) as served, calling(served, None, served.bound.plaintext_address) as plaintext:
        await greeted(plaintext, "orin")
        with pytest.raises(grpc.aio.AioRpcError, match="needs a certificate"):
            await plaintext.view.GetFleet(view_pb2.GetFleetRequest())
        async with calling(served, fleet.identity(Role.OPERATOR)) as operator:
            assert await operator.states() == {"orin": "enrolled"}


async def test_nobody_gets_a_servers_certificate_in_plaintext(
    config: CoordinatorSettings, fleet: CertifiedFleet
) -> None:
    settings = certified(config, fleet.authority.folder, plaintext_address="127.0.0.1:0")
    settings = settings.with_values(superlink={"address": "site.example:8000"})
    async with serving(settings) as served, calling(served, None, served.bound.plaintext_address) as plaintext:
        service = superlink_pb2_grpc.SuperLinkServiceStub(plaintext.channel)
        request = superlink_pb2.IssueServerCertificateRequest(request_pem=request_certificate(new_key()))
        with pytest.raises(grpc.aio.AioRpcError, match="IssueServerCertificate needs a certificate"):
            await service.IssueServerCertificate(request)
        with pytest.raises(grpc.aio.AioRpcError, match="ListSuperNodes needs a certificate"):
            await service.ListSuperNodes(superlink_pb2.ListSuperNodesRequest()).read()


async def test_plaintext_on_other_machines_addresses_is_refused_unless_asked_for(config: CoordinatorSettings) -> None:
    exposed = config.with_values(server={"address": "0.0.0.0:0"})
    with pytest.raises(InvalidInputError, match=r"`wattfleet coordinator init`, or pass --insecure"):
        async with serving(exposed):
            pass


async def test_a_run_belongs_to_the_certificate_that_started_it(
    secured: CoordinatorSettings, fleet: CertifiedFleet
) -> None:
    request = planning_pb2.StartRunRequest(run_id="mine", strategy="FedAvg", rounds=3, run_token="known to both")
    owner, other = fleet.identity(Role.FLOWER, "mine"), fleet.identity(Role.FLOWER, "other")
    async with serving(secured) as served:
        async with calling(served, owner) as client:
            await client.planning.StartRun(request)
        async with calling(served, other) as client:
            with pytest.raises(grpc.aio.AioRpcError, match="was started by another app"):
                await client.planning.StartRun(request)
        async with calling(served, owner) as client:
            await client.planning.StartRun(request)


async def test_a_run_of_plaintext_goes_on_over_tls(config: CoordinatorSettings, fleet: CertifiedFleet) -> None:
    settings = certified(config, fleet.authority.folder, plaintext_address="127.0.0.1:0")
    request = planning_pb2.StartRunRequest(run_id="mine", strategy="FedAvg", rounds=3, run_token="secret")
    async with serving(settings) as served:
        async with calling(served, None, served.bound.plaintext_address) as client:
            await client.planning.StartRun(request)
        async with calling(served, fleet.identity(Role.FLOWER)) as client:
            await client.planning.StartRun(request)
            request.run_token = "another"
            with pytest.raises(grpc.aio.AioRpcError, match="was started by another app"):
                await client.planning.StartRun(request)


# --- Lasting calls ----------------------------------------------------------------------------------------------------
# Long-lasting calls end within seconds once their certificate is revoked or expires, for every RPC.

_CALLS_WITHIN_S = 5.0


def test_every_stream_ends_with_its_certificate() -> None:
    streams = {
        f"/{service.full_name}/{method.name}"
        for service in SERVICES
        for method in service.methods
        if method.server_streaming or method.client_streaming
    }
    assert streams | {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"} == STREAMS


async def watched(client: Client) -> Any:
    call = health_pb2_grpc.HealthStub(client.channel).Watch(health_pb2.HealthCheckRequest())
    assert (await call.read()).status == health_pb2.HealthCheckResponse.SERVING
    return call


async def session(client: Client) -> Any:
    agent = client.agent()
    await agent.greet(hello_of("peer"))
    return agent.call


async def upload(client: Client) -> Any:
    async def endless() -> AsyncIterator[operator_pb2.PublishReferenceRequest]:
        yield operator_pb2.PublishReferenceRequest(manifest=b"{}")
        await asyncio.Event().wait()

    call = client.operator.PublishReference(endless())
    await client.view.GetFleet(view_pb2.GetFleetRequest())  # the upload has begun
    return call


async def reflection(client: Client) -> Any:
    call = reflection_pb2_grpc.ServerReflectionStub(client.channel).ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    await call.read()
    return call


@pytest.mark.parametrize(
    ("role", "begin"),
    [(Role.VIEWER, watched), (Role.DEVICE, session), (Role.OPERATOR, upload), (Role.OPERATOR, reflection)],
)
async def test_a_revoked_peers_calls_end(config: CoordinatorSettings, tmp_path: Path, role: Role, begin: Any) -> None:
    fleet = CertifiedFleet.create(tmp_path / "authority")
    async with (
        serving(certified(config, fleet.authority.folder)) as served,
        calling(served, fleet.identity(Role.OPERATOR, "anna")) as operator,
    ):
        service = identity_pb2_grpc.IdentityServiceStub(operator.channel)
        name = "" if role is Role.DEVICE else "peer"
        peer = await joined(service, role, Applicant("peer", "agx-orin"), name)
        async with calling(served, peer) as client, asyncio.timeout(60):
            call = await begin(client)
            others = await watched(operator)
            await service.RevokeCertificates(identity_pb2.RevokeCertificatesRequest(name_or_serial="peer"))
            async with asyncio.timeout(_CALLS_WITHIN_S):
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
            assert "was revoked" in await call.details()
            with pytest.raises(grpc.aio.AioRpcError) as refused:  # on the same connection
                await client.view.GetFleet(view_pb2.GetFleetRequest())
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert not others.done()
            others.cancel()


async def test_an_operator_may_revoke_its_own_certificate(config: CoordinatorSettings, tmp_path: Path) -> None:
    fleet = CertifiedFleet.create(tmp_path / "authority")
    write_identity(fleet.authority.folder / "operator", fleet.identity(Role.OPERATOR, "anna"))
    async with serving(certified(config, fleet.authority.folder)) as served:
        async with calling(served, fleet.identity(Role.OPERATOR, "bea")) as client:
            service = identity_pb2_grpc.IdentityServiceStub(client.channel)
            answer = await service.RevokeCertificates(identity_pb2.RevokeCertificatesRequest(name_or_serial="anna"))
    assert [each.name for each in answer.certificates] == ["anna"]


async def test_a_caller_that_leaves_is_not_told_of_its_certificate(tmp_path: Path) -> None:
    calls, certificate = LiveCalls(), CertifiedFleet.create(tmp_path / "a").identity(Role.VIEWER).certificate
    seen: list[BaseException] = []

    async def call() -> None:
        try:
            with calls.holding(certificate, lambda _: None):
                await asyncio.Event().wait()
        except BaseException as error:
            seen.append(error)

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    assert calls.end_invalid() == 0
    task.cancel()
    await task
    assert [type(each) for each in seen] == [asyncio.CancelledError]


async def test_a_call_is_ended_once(tmp_path: Path) -> None:
    calls, certificate = LiveCalls(), CertifiedFleet.create(tmp_path / "a").identity(Role.VIEWER).certificate
    cleaned_up = []

    def refuse(_: object) -> None:
        raise InvalidCertificateError("it was revoked")

    async def call() -> None:
        with calls.holding(certificate, refuse):
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.01)  # like the cleanup of a session
                cleaned_up.append(True)

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    assert calls.end_invalid() == 1
    await asyncio.sleep(0)
    assert calls.end_invalid() == 0
    with pytest.raises(InvalidCertificateError, match="revoked"):
        await task
    assert cleaned_up, "a second check does not interrupt it"


# --- Foreign certificates ---------------------------------------------------------------------------------------------
# Certificates of other authorities, such as step-ca or SPIRE: the required contents, and what is refused.

Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey
FLEET = "plant-7"


class ForeignAuthority:
    """A certificate authority that is independent of Wattfleet."""

    def __init__(self, name: str, issuer: ForeignAuthority | None = None) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        signer = issuer or self
        self.certificate = (
            _begun(self.name, signer.name, self.key, utc_now() + timedelta(days=300))
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(signer.key, hashes.SHA256())
        )

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def issue(self, uris: Sequence[str], key: Key | None = None, until: datetime | None = None) -> tuple[bytes, bytes]:
        """A key and a certificate, both PEM."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a workload")])
        builder = _begun(subject, self.name, key, until or utc_now() + timedelta(hours=1)).add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
        )
        if uris:
            names = x509.SubjectAlternativeName(list(map(x509.UniformResourceIdentifier, uris)))
            builder = builder.add_extension(names, critical=False)
        encoding = serialization.Encoding.PEM
        key_pem = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        return key_pem, builder.sign(self.key, hashes.SHA256()).public_bytes(encoding)


def _begun(subject: x509.Name, issuer: x509.Name, key: Key, until: datetime) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    begin = min(utc_now(), until) - timedelta(hours=2)
    return builder.serial_number(x509.random_serial_number()).not_valid_before(begin).not_valid_after(until)


@pytest.fixture
def foreign() -> ForeignAuthority:
    return ForeignAuthority("step-ca root")


@pytest.fixture
def authority(tmp_path: Path, foreign: ForeignAuthority) -> AuthorityFolder:
    """A fleet whose coordinator also trusts the foreign authority, as docs/security.md describes."""
    folder = AuthorityFolder.create(tmp_path / "authority", [], utc_now(), FLEET)
    (folder.folder / TRUSTED).write_bytes(folder.trusted_pem + foreign.pem)
    return AuthorityFolder.open(folder.folder)


@pytest.fixture
def foreign_secured(config: CoordinatorSettings, authority: AuthorityFolder) -> CoordinatorSettings:
    return certified(config, authority.folder)


async def refusal(client: Client) -> tuple[grpc.StatusCode, str]:
    """The error for a client, or for a device named orin where only devices may call."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await client.view.GetFleet(view_pb2.GetFleetRequest(), timeout=20)
    return refused.value.code(), refused.value.details() or ""


async def greet(client: Client, installation: str = "") -> None:
    await client.agent().greet(hello_of("orin", installation=installation))


@pytest.mark.parametrize("further", ["", "/board/agx-orin", "/board/agx-orin/installation/6f0c"])
async def test_a_device_may_have_a_certificate_of_another_authority(
    foreign_secured: CoordinatorSettings, authority: AuthorityFolder, foreign: ForeignAuthority, further: str
) -> None:
    own = Identity(*foreign.issue([f"spiffe://{FLEET}/device/orin{further}"]), authority.trusted_pem)
    async with serving(foreign_secured) as served, calling(served, own) as client:
        await greet(client, "6f0c")
        if "installation" in further:
            with pytest.raises(grpc.aio.AioRpcError, match="for the installation '6f0c', not 'beef'"):
                await greet(client, "beef")
        code, _ = await refusal(client)
        assert code is grpc.StatusCode.PERMISSION_DENIED, "a device does not become an operator"
        renew = enrolment_pb2_grpc.EnrolmentServiceStub(client.channel).Renew
        with pytest.raises(grpc.aio.AioRpcError, match="renew it with the authority that issued it"):
            await renew(enrolment_pb2.RenewRequest(request_pem=b"none"))


@pytest.mark.parametrize(
    ("uris", "code", "why"),
    [
        (["spiffe://another-plant/operator/anna"], grpc.StatusCode.UNAUTHENTICATED, "the fleet 'another-plant'"),
        ([], grpc.StatusCode.UNAUTHENTICATED, "no SPIFFE id"),
        (["https://plant-7/operator/anna"], grpc.StatusCode.UNAUTHENTICATED, "not of the form"),
        ([f"spiffe://{FLEET}/ns/default/sa/anna"], grpc.StatusCode.UNAUTHENTICATED, "not of the form"),
        ([f"spiffe://{FLEET}/operator/anna/board/x"], grpc.StatusCode.UNAUTHENTICATED, "not of the form"),
        (
            [f"spiffe://{FLEET}/operator/anna", f"spiffe://{FLEET}/viewer/anna"],
            grpc.StatusCode.UNAUTHENTICATED,
            "several URIs",
        ),
    ],
)
async def test_a_certificate_that_names_nobody_of_this_fleet_is_refused(
    foreign_secured: CoordinatorSettings,
    authority: AuthorityFolder,
    foreign: ForeignAuthority,
    uris: list[str],
    code: grpc.StatusCode,
    why: str,
) -> None:
    own = Identity(*foreign.issue(uris), authority.trusted_pem)
    async with serving(foreign_secured) as served, calling(served, own) as client:
        found, details = await refusal(client)
    assert (found, why in details) == (code, True), details


async def test_an_expired_certificate_does_not_connect(
    foreign_secured: CoordinatorSettings, authority: AuthorityFolder, foreign: ForeignAuthority
) -> None:
    until = utc_now() - timedelta(minutes=1)
    own = Identity(*foreign.issue([f"spiffe://{FLEET}/operator/anna"], until=until), authority.trusted_pem)
    async with serving(foreign_secured) as served, calling(served, own) as client:
        assert (await refusal(client))[0] is grpc.StatusCode.UNAVAILABLE


async def test_certificates_of_an_intermediate_authority_come_with_their_chain(
    foreign_secured: CoordinatorSettings, authority: AuthorityFolder, foreign: ForeignAuthority
) -> None:
    intermediate = ForeignAuthority("step-ca intermediate", foreign)
    key_pem, leaf = intermediate.issue([f"spiffe://{FLEET}/operator/anna"])
    async with serving(foreign_secured) as served:
        async with calling(served, Identity(key_pem, leaf + intermediate.pem, authority.trusted_pem)) as client:
            await client.view.GetFleet(view_pb2.GetFleetRequest())
        async with calling(served, Identity(key_pem, leaf, authority.trusted_pem)) as client:
            assert (await refusal(client))[0] is grpc.StatusCode.UNAVAILABLE


async def test_an_authority_that_is_not_trusted_does_not_connect(
    foreign_secured: CoordinatorSettings, authority: AuthorityFolder
) -> None:
    stranger = ForeignAuthority("step-ca root")  # with the same name
    own = Identity(*stranger.issue([f"spiffe://{FLEET}/operator/anna"]), authority.trusted_pem)
    async with serving(foreign_secured) as served, calling(served, own) as client:
        assert (await refusal(client))[0] is grpc.StatusCode.UNAVAILABLE


def test_an_rsa_key_is_refused_on_the_clients_side(authority: AuthorityFolder, foreign: ForeignAuthority) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    with pytest.raises(InvalidInputError, match="ECDSA P-256"):
        Identity(*foreign.issue([f"spiffe://{FLEET}/operator/anna"], key), authority.trusted_pem)
