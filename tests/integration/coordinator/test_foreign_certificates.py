"""Certificates of other authorities, such as step-ca or SPIRE: the required contents, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coordinator.identity.authority_folder import TRUSTED, AuthorityFolder
from coordinator.settings import CoordinatorSettings
from tests.fakes.certified import calling, certified
from tests.fakes.served import Client, hello_of, serving
from wattfleet.errors import InvalidInputError
from wattfleet_identity.identity_folder import Identity
from wattfleet_io.clock import utc_now
from wattfleet_proto.v1 import enrolment_pb2, enrolment_pb2_grpc, view_pb2

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
def secured(config: CoordinatorSettings, authority: AuthorityFolder) -> CoordinatorSettings:
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
    secured: CoordinatorSettings, authority: AuthorityFolder, foreign: ForeignAuthority, further: str
) -> None:
    own = Identity(*foreign.issue([f"spiffe://{FLEET}/device/orin{further}"]), authority.trusted_pem)
    async with serving(secured) as served, calling(served, own) as client:
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
    secured: CoordinatorSettings,
    authority: AuthorityFolder,
    foreign: ForeignAuthority,
    uris: list[str],
    code: grpc.StatusCode,
    why: str,
) -> None:
    own = Identity(*foreign.issue(uris), authority.trusted_pem)
    async with serving(secured) as served, calling(served, own) as client:
        found, details = await refusal(client)
    assert (found, why in details) == (code, True), details


async def test_an_expired_certificate_does_not_connect(
    secured: CoordinatorSettings, authority: AuthorityFolder, foreign: ForeignAuthority
) -> None:
    until = utc_now() - timedelta(minutes=1)
    own = Identity(*foreign.issue([f"spiffe://{FLEET}/operator/anna"], until=until), authority.trusted_pem)
    async with serving(secured) as served, calling(served, own) as client:
        assert (await refusal(client))[0] is grpc.StatusCode.UNAVAILABLE


async def test_certificates_of_an_intermediate_authority_come_with_their_chain(
    secured: CoordinatorSettings, authority: AuthorityFolder, foreign: ForeignAuthority
) -> None:
    intermediate = ForeignAuthority("step-ca intermediate", foreign)
    key_pem, leaf = intermediate.issue([f"spiffe://{FLEET}/operator/anna"])
    async with serving(secured) as served:
        async with calling(served, Identity(key_pem, leaf + intermediate.pem, authority.trusted_pem)) as client:
            await client.view.GetFleet(view_pb2.GetFleetRequest())
        async with calling(served, Identity(key_pem, leaf, authority.trusted_pem)) as client:
            assert (await refusal(client))[0] is grpc.StatusCode.UNAVAILABLE


async def test_an_authority_that_is_not_trusted_does_not_connect(
    secured: CoordinatorSettings, authority: AuthorityFolder
) -> None:
    stranger = ForeignAuthority("step-ca root")  # with the same name
    own = Identity(*stranger.issue([f"spiffe://{FLEET}/operator/anna"]), authority.trusted_pem)
    async with serving(secured) as served, calling(served, own) as client:
        assert (await refusal(client))[0] is grpc.StatusCode.UNAVAILABLE


def test_an_rsa_key_is_refused_on_the_clients_side(authority: AuthorityFolder, foreign: ForeignAuthority) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    with pytest.raises(InvalidInputError, match="ECDSA P-256"):
        Identity(*foreign.issue([f"spiffe://{FLEET}/operator/anna"], key), authority.trusted_pem)
