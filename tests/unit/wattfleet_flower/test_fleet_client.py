"""What an enrolled SuperNode does when the SuperLink does not accept it."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from flwr.proto.fleet_pb2 import ActivateNodeRequest, ActivateNodeResponse
from flwr.supercore.error import ApiErrorCode

from tests.fakes.certified import CertifiedFleet
from wattfleet_flower.supernode.fleet_client import ACCEPTED_WITHIN_S, EnrolledClient
from wattfleet_identity.certificates import new_key, request_certificate
from wattfleet_io.clock import VirtualClock, utc_now


@pytest.fixture
def fleet(tmp_path: Path) -> CertifiedFleet:
    return CertifiedFleet.create(tmp_path / "authority")


def client_of(fleet: CertifiedFleet, address: str = "localhost:1", clock: VirtualClock | None = None) -> EnrolledClient:
    return EnrolledClient(address, fleet.authority.folder / "trusted.pem", clock=clock or VirtualClock())


class SuperLink(httpx.BaseTransport):
    """A SuperLink that knows the key once `unknown` requests are over."""

    def __init__(self, unknown: int, code: int = ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED) -> None:
        self.unknown = unknown
        self.code = code
        self.requests = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.requests += 1
        if self.requests <= self.unknown:
            return httpx.Response(409, text=json.dumps({"code": self.code, "detail": "refused"}))
        return httpx.Response(200, content=ActivateNodeResponse(node_id=7).SerializeToString())


def activated(client: EnrolledClient, superlink: SuperLink) -> int:
    client._client = httpx.Client(transport=superlink)  # noqa: SLF001 - Flower's class has no seam for it
    return int(client.ActivateNode(ActivateNodeRequest(public_key=b"key", heartbeat_interval=30)).node_id)


def test_a_board_that_is_not_known_yet_asks_again(fleet: CertifiedFleet) -> None:
    clock = VirtualClock()
    with client_of(fleet, clock=clock) as client:
        assert activated(client, SuperLink(3)) == 7
    assert 0 < clock.now_s() < ACCEPTED_WITHIN_S / 2


def test_a_revoked_board_gives_up_and_says_what_to_do(fleet: CertifiedFleet, caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    with client_of(fleet, clock=clock) as client, pytest.raises(httpx.HTTPStatusError):
        activated(client, SuperLink(1000))
    assert ACCEPTED_WITHIN_S / 2 < clock.now_s() <= ACCEPTED_WITHIN_S
    assert "enrol it again with `wattfleet agent join`" in caplog.text


def test_other_errors_are_not_waited_for(fleet: CertifiedFleet) -> None:
    clock, superlink = VirtualClock(), SuperLink(1000, ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL)
    with client_of(fleet, clock=clock) as client, pytest.raises(httpx.HTTPStatusError):
        activated(client, superlink)
    assert superlink.requests == 1 and clock.now_s() == 0


@contextmanager
def tls_server(folder: Path, certificate_pem: bytes, key_pem: bytes) -> Iterator[str]:
    """A server that shows a certificate and says nothing; yields its address on loopback."""
    (folder / "server.pem").write_bytes(certificate_pem)
    (folder / "server.key").write_bytes(key_pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    try:
                        context.wrap_socket(connection, server_side=True).close()
                    except OSError:
                        continue

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("expired", "has expired at"),
        ("another fleet", "is not from the authority of this device's fleet"),
        ("another name", "is made out to other names"),
    ],
)
def test_a_superlink_with_a_wrong_certificate_is_explained(
    case: str, why: str, fleet: CertifiedFleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shown = CertifiedFleet.create(tmp_path / "other") if case == "another fleet" else fleet
    hosts = ["site.example"] if case == "another name" else ["127.0.0.1"]
    since: Any = utc_now() - timedelta(days=2) if case == "expired" else utc_now()
    assert isinstance(since, datetime)
    key_pem = new_key()
    pem = shown.authority.authority.issue_superlink(request_certificate(key_pem), hosts, timedelta(days=1), since)
    with tls_server(tmp_path, pem, key_pem) as address, client_of(fleet, address) as client:
        with pytest.raises(httpx.ConnectError) as refused:
            client.ActivateNode(ActivateNodeRequest(public_key=b"key", heartbeat_interval=30))
    # Flower gives up for good if the text speaks of these.
    assert not {"certificate", "ssl", "tls"} & set(str(refused.value).lower().split())
    assert why in caplog.text


def test_a_replaced_authority_is_trusted_without_a_restart(fleet: CertifiedFleet, tmp_path: Path) -> None:
    new = CertifiedFleet.create(tmp_path / "new")
    key_pem = new_key()
    pem = new.authority.authority.issue_superlink(
        request_certificate(key_pem), ["127.0.0.1"], timedelta(days=1), utc_now()
    )
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(fleet.authority.trusted_pem)
    request = ActivateNodeRequest(public_key=b"key", heartbeat_interval=30)
    with tls_server(tmp_path, pem, key_pem) as address, EnrolledClient(address, trusted) as client:
        with pytest.raises(httpx.ConnectError):
            client.ActivateNode(request)
        trusted.write_bytes(fleet.authority.trusted_pem + new.authority.trusted_pem)
        with pytest.raises(httpx.TransportError) as ended:  # the server says nothing, but is accepted
            client.ActivateNode(request)
        assert not isinstance(ended.value, httpx.ConnectError)
