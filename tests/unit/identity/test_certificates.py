"""Which certificates and proofs are accepted, of whom, and the channels that use them."""

from __future__ import annotations

import base64
import json
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from tests.fakes.served import CertifiedFleet
from wattfleet.common.clock import utc_now
from wattfleet.common.identity.authority import DEVICE_NAME, SERVER_NAME, CertificateAuthority
from wattfleet.common.identity.certificates import (
    Certificate,
    CertificateCheck,
    InvalidCertificateError,
    new_key,
    read_certificate,
    read_key,
    request_certificate,
)
from wattfleet.common.identity.channels import open_async_channel, open_channel
from wattfleet.common.identity.http_access import AccessDeniedError, HttpAccess, ServerTls
from wattfleet.common.identity.identity_folder import FOR_SUPERLINK, InvalidProofError, proof_of, proven
from wattfleet.common.identity.peers import Peer, Role, UnknownPeerError
from wattfleet.common.tasks import with_timeout
from wattfleet.core.errors import InvalidInputError

# --- Certificate check ------------------------------------------------------------------------------------------------
# Which certificates are accepted at the beginning of a call, and which ones during a session.


NOW = datetime(2026, 5, 1, tzinfo=timezone.utc)
ORIN = Certificate("1f", NOW - timedelta(days=9), NOW + timedelta(days=1), "spiffe://fleet-1/device/orin")


def check(*revoked: str) -> CertificateCheck:
    return CertificateCheck("fleet-1", is_revoked=revoked.__contains__, now=lambda: NOW)


@pytest.mark.parametrize(
    ("certificate", "revoked", "reason"),
    [
        (replace(ORIN, not_after=NOW), "", "the certificate of device orin expired on 2026-05-01 00:00 UTC"),
        (ORIN, "1f", "the certificate of device orin was revoked"),
    ],
)
def test_an_expired_or_revoked_certificate_begins_no_call_and_keeps_no_session(
    certificate: Certificate, revoked: str, reason: str
) -> None:
    for require in (check(revoked).require_valid, check(revoked).require_still_valid):
        with pytest.raises(InvalidCertificateError, match=reason):
            require(certificate)


def test_a_valid_certificate_begins_a_call_and_keeps_its_session() -> None:
    check("2e").require_valid(ORIN)
    check("2e").require_still_valid(ORIN)


def test_another_fleets_certificate_or_one_without_a_name_begins_no_call() -> None:
    with pytest.raises(InvalidCertificateError, match="belongs to the fleet 'fleet-2', but this fleet is 'fleet-1'"):
        check().require_valid(replace(ORIN, uri="spiffe://fleet-2/device/orin"))
    with pytest.raises(UnknownPeerError):
        check().require_valid(replace(ORIN, uri=""))


def test_names_are_not_taken_apart_each_second() -> None:
    # With ten thousand sessions, parsing the names would block everything else for 0.2 s.
    check().require_still_valid(replace(ORIN, uri=""))


# --- Serving certificates ---------------------------------------------------------------------------------------------
# The server certificates that clients accept: those of devices, under the one name that all devices share.

A_DAY = timedelta(days=1)
AUTHORITY = CertificateAuthority.create("farm", NOW)
REQUEST = request_certificate(new_key())


def may_serve(certificate_pem: bytes) -> bool:
    usage = read_certificate(certificate_pem).extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    return ExtendedKeyUsageOID.SERVER_AUTH in usage


@pytest.mark.parametrize("role", list(Role))
def test_only_a_devices_certificate_may_serve_and_never_as_the_coordinator(role: Role) -> None:
    issued = AUTHORITY.issue(REQUEST, Peer("farm", role, SERVER_NAME), A_DAY, NOW)
    assert may_serve(issued) == (role is Role.DEVICE)
    assert Certificate.from_pem(issued).hosts == ((DEVICE_NAME,) if role is Role.DEVICE else ())


@pytest.mark.parametrize("name", [DEVICE_NAME, SERVER_NAME])
def test_a_superlink_gets_no_name_of_others(name: str) -> None:
    assert may_serve(AUTHORITY.issue_superlink(REQUEST, ["link.example"], A_DAY, NOW))
    with pytest.raises(InvalidInputError, match="name the SuperLink's host"):
        AUTHORITY.issue_superlink(REQUEST, ["link.example", name], A_DAY, NOW)


# --- Proofs -----------------------------------------------------------------------------------------------------------
# Proofs of identity: which ones are accepted, and which ones are not.

DAY = timedelta(days=1)


def test_a_proof_names_its_maker(fleet: CertifiedFleet) -> None:
    own = fleet.identity(Role.FLOWER, "app")
    found = proven(proof_of(own, FOR_SUPERLINK, utc_now()), FOR_SUPERLINK, fleet.authority.trusted_pem, utc_now())
    assert found.serial == own.certificate.serial and str(found.peer) == "flower app"


@pytest.mark.parametrize(
    ("audience", "later", "lifetime", "why"),
    [
        ("another", timedelta(0), DAY, "is for another audience"),
        (FOR_SUPERLINK, timedelta(hours=2), timedelta(hours=1), "the certificate expired on"),
        (FOR_SUPERLINK, timedelta(hours=13), DAY, "the proof of identity expired at .*: create a new one"),
        (FOR_SUPERLINK, timedelta(hours=-2), DAY, "is from the future: check the clocks"),
    ],
)
def test_a_proof_for_another_or_of_the_past_proves_nothing(
    fleet: CertifiedFleet, audience: str, later: timedelta, lifetime: timedelta, why: str
) -> None:
    proof = proof_of(fleet.identity(Role.FLOWER, lifetime=lifetime), audience, utc_now())
    with pytest.raises(InvalidProofError, match=why):
        proven(proof, FOR_SUPERLINK, fleet.authority.trusted_pem, utc_now() + later)


def test_a_proof_holds_for_half_a_day_and_not_for_ever(fleet: CertifiedFleet) -> None:
    own, now = fleet.identity(Role.FLOWER, "app"), utc_now()
    proof = proof_of(own, FOR_SUPERLINK, now)
    assert proven(proof, FOR_SUPERLINK, fleet.authority.trusted_pem, now + timedelta(hours=11))
    # A proof with a future date, which would be valid for longer, is refused.
    lasting = proof_of(own, FOR_SUPERLINK, now + timedelta(days=20))
    with pytest.raises(InvalidProofError, match="create a new one"):
        proven(lasting, FOR_SUPERLINK, fleet.authority.trusted_pem, now)


def test_a_proof_of_another_authority_proves_nothing(fleet: CertifiedFleet, tmp_path: Path) -> None:
    stranger = CertifiedFleet.create(tmp_path / "other").identity(Role.OPERATOR)
    with pytest.raises(InvalidProofError, match="authority that is not trusted"):
        proven(proof_of(stranger, FOR_SUPERLINK, utc_now()), FOR_SUPERLINK, fleet.authority.trusted_pem, utc_now())


def test_a_certificate_of_somebody_else_needs_its_key(fleet: CertifiedFleet) -> None:
    victim = fleet.identity(Role.OPERATOR)
    thief = CertifiedFleet(fleet.authority).identity(Role.VIEWER)
    claim = json.dumps(
        {"certificate": victim.certificate_pem.decode(), "audience": FOR_SUPERLINK, "expires_unix_s": 9e9}
    ).encode()
    forged = base64.urlsafe_b64encode(claim).decode().rstrip("=")
    signature = proof_of(thief, FOR_SUPERLINK, utc_now()).split(".")[1]
    with pytest.raises(InvalidProofError, match="damaged"):
        proven(f"{forged}.{signature}", FOR_SUPERLINK, fleet.authority.trusted_pem, utc_now())


@pytest.mark.parametrize("text", ["", ".", "a.b", "x" * 20_000, "\ud800.\ud800", "WzFd.AAAA"])
def test_rubbish_is_no_proof(fleet: CertifiedFleet, text: str) -> None:
    with pytest.raises(InvalidProofError, match="damaged"):
        proven(text, FOR_SUPERLINK, fleet.authority.trusted_pem, utc_now())


def test_a_deeply_nested_claim_is_no_proof(fleet: CertifiedFleet) -> None:
    claim = base64.urlsafe_b64encode(b"[" * 9_000).decode()
    with pytest.raises(InvalidProofError, match="damaged"):
        proven(f"{claim}.AAAA", FOR_SUPERLINK, fleet.authority.trusted_pem, utc_now())


def test_a_time_that_no_date_can_represent_is_no_proof(fleet: CertifiedFleet) -> None:
    owner = fleet.identity(Role.OPERATOR)
    facts = {"certificate": owner.certificate_pem.decode(), "audience": FOR_SUPERLINK, "expires_unix_s": 1.8e18}
    claim = base64.urlsafe_b64encode(json.dumps(facts).encode()).decode().rstrip("=")
    signature = read_key(owner.key_pem).sign(claim.encode(), ec.ECDSA(hashes.SHA256()))
    proof = f"{claim}.{base64.urlsafe_b64encode(signature).decode().rstrip('=')}"
    with pytest.raises(InvalidProofError, match="damaged"):
        proven(proof, FOR_SUPERLINK, fleet.authority.trusted_pem, utc_now())


def test_a_servers_certificate_proves_nobody(fleet: CertifiedFleet) -> None:
    from wattfleet.common.identity.certificates import request_certificate
    from wattfleet.common.identity.identity_folder import Identity

    key = new_key()
    authority = fleet.authority.authority
    pem = authority.issue_superlink(request_certificate(key), ["localhost"], timedelta(days=1), utc_now())
    server = Identity(key, pem, fleet.authority.trusted_pem)
    with pytest.raises(InvalidProofError, match="authority that is not trusted"):
        proven(proof_of(server, FOR_SUPERLINK, utc_now()), FOR_SUPERLINK, fleet.authority.trusted_pem, utc_now())


# --- HTTP access ------------------------------------------------------------------------------------------------------
# Who may read over HTTPS, once TLS has checked that a certificate is by a trusted authority.

KEY = new_key()
OWN = AUTHORITY.issue_server(KEY, [], timedelta(days=9), NOW)


class Connection:
    """A TLS connection that only provides the caller's certificate."""

    def __init__(self, role: Role, lifetime: timedelta = timedelta(days=1)) -> None:
        self._pem = AUTHORITY.issue(request_certificate(KEY), Peer("farm", role, "anna"), lifetime, NOW)

    def getpeercert(self, binary_form: bool) -> bytes:
        return ssl.PEM_cert_to_DER_cert(self._pem.decode())


def access(fleet: str = "farm", is_revoked: bool = False) -> HttpAccess:
    check = CertificateCheck(fleet, lambda serial: is_revoked, lambda: NOW)
    return HttpAccess(lambda: ServerTls(KEY, OWN, AUTHORITY.certificate_pem), check)


@pytest.mark.parametrize("role", list(Role))
def test_viewers_and_operators_may_read_and_nobody_else(role: Role) -> None:
    connection: Any = Connection(role)
    if role in (Role.VIEWER, Role.OPERATOR):
        assert access().require_viewer(connection) is role
        return
    with pytest.raises(AccessDeniedError, match=f"{role.value} anna may not read this"):
        access().require_viewer(connection)


def test_a_viewer_of_another_fleet_or_with_an_invalid_certificate_may_not_read() -> None:
    viewer: Any = Connection(Role.VIEWER)
    with pytest.raises(InvalidCertificateError, match="belongs to the fleet 'farm', but this fleet is 'mill'"):
        access("mill").require_viewer(viewer)
    with pytest.raises(InvalidCertificateError, match="was revoked"):
        access(is_revoked=True).require_viewer(viewer)
    expired: Any = Connection(Role.VIEWER, timedelta(0))
    with pytest.raises(InvalidCertificateError, match="expired"):
        access().require_viewer(expired)


# --- Channels ---------------------------------------------------------------------------------------------------------
# Channels to the coordinator.

_SETTINGS = b"\0\0\0\4\0\0\0\0\0"
_PREFACE_BYTES = 24
_GOAWAY_UNREAD = struct.pack(">I", 8)[1:] + b"\7\0" + struct.pack(">III", 0, 0, 2)
"""The last stream that was seen is 0, so that gRPC would repeat every call."""


@contextmanager
def hanging_up() -> Iterator[tuple[str, Callable[[], int]]]:
    """A server that reads the preface of each connection only, and then closes it as unused.

    Yields:
        Its host:port, and a function that returns the number of connections so far.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    accepted: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            accepted.append(connection)
            connection.sendall(_SETTINGS)
            connection.recv(_PREFACE_BYTES, socket.MSG_WAITALL)
            # The call is on its way once its headers have arrived after the client's settings.
            while (received := connection.recv(65_536)) and b"/wattfleet" not in received:
                pass
            connection.sendall(_GOAWAY_UNREAD)
            connection.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=serve, name="server that hangs up")
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}", lambda: len(accepted)
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        for connection in accepted:
            connection.close()
        thread.join()
        listener.close()


async def test_a_call_is_not_repeated_behind_its_callers_back() -> None:
    """gRPC would repeat it at once and without end, and take hundreds of MiB a second meanwhile."""
    with hanging_up() as (address, connections):
        async with open_async_channel(address, None) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await with_timeout(10.0, channel.stream_stream("/wattfleet/Session")().read())
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert connections() == 1
        with open_channel(address, None) as channel, pytest.raises(grpc.RpcError) as failed_too:
            channel.unary_unary("/wattfleet/Plan")(b"", timeout=10.0)
        assert failed_too.value.code() is grpc.StatusCode.UNAVAILABLE
        assert connections() == 2
