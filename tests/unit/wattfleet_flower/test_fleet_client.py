"""An enrolled SuperNode that the SuperLink does not accept."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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


def client_of(fleet: CertifiedFleet, address: str = "localhost:1", clock: VirtualClock | None = None) -> EnrolledClient:
    return EnrolledClient(address, fleet.authority.folder / "trusted.pem", clock=clock or VirtualClock())


class SuperLink(httpx.BaseTransport):
    """A SuperLink that does not know the key for the first `unknown` requests."""

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


class Answering(BaseHTTPRequestHandler):
    """A SuperLink that activates every SuperNode and keeps connections open."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:  # noqa: N802 - named by Python
        self.rfile.read(int(self.headers["content-length"]))
        content = ActivateNodeResponse(node_id=7).SerializeToString()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def tls_server(folder: Path, certificate_pem: bytes, key_pem: bytes) -> Iterator[str]:
    """A SuperLink with a given certificate that activates every SuperNode; yields its loopback address."""
    (folder / "server.pem").write_bytes(certificate_pem)
    (folder / "server.key").write_bytes(key_pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def superlink_certificate(fleet: CertifiedFleet, key_pem: bytes) -> bytes:
    """A certificate by the fleet's authority for a SuperLink on loopback."""
    return fleet.authority.authority.issue_superlink(
        request_certificate(key_pem), ["127.0.0.1"], timedelta(days=1), utc_now()
    )


REQUEST = ActivateNodeRequest(public_key=b"key", heartbeat_interval=30)


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("expired", "has expired at"),
        ("another fleet", "was not issued by the authority of this device's fleet"),
        ("another name", "was issued for other names"),
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
    # Flower gives up permanently if the text contains one of these words.
    assert not {"certificate", "ssl", "tls"} & set(str(refused.value).lower().split())
    assert why in caplog.text


def test_a_replaced_authority_is_trusted_without_a_restart(fleet: CertifiedFleet, tmp_path: Path) -> None:
    new = CertifiedFleet.create(tmp_path / "new")
    key_pem, trusted = new_key(), tmp_path / "trusted.pem"
    trusted.write_bytes(fleet.authority.trusted_pem)
    with (
        tls_server(tmp_path, superlink_certificate(new, key_pem), key_pem) as address,
        EnrolledClient(address, trusted) as client,
    ):
        with pytest.raises(httpx.ConnectError):
            client.ActivateNode(REQUEST)
        trusted.write_bytes(fleet.authority.trusted_pem + new.authority.trusted_pem)
        assert client.ActivateNode(REQUEST).node_id == 7


def test_a_removed_authority_is_not_trusted_any_more(fleet: CertifiedFleet, tmp_path: Path) -> None:
    new = CertifiedFleet.create(tmp_path / "new")
    key_pem, trusted = new_key(), tmp_path / "trusted.pem"
    trusted.write_bytes(fleet.authority.trusted_pem + new.authority.trusted_pem)
    with (
        tls_server(tmp_path, superlink_certificate(fleet, key_pem), key_pem) as address,
        EnrolledClient(address, trusted) as client,
    ):
        assert client.ActivateNode(REQUEST).node_id == 7
        trusted.write_bytes(new.authority.trusted_pem)
        # This also holds for the connection that is already open.
        with pytest.raises(httpx.ConnectError, match="was not accepted"):
            client.ActivateNode(REQUEST)
        trusted.write_bytes(b"damaged")
        with pytest.raises(httpx.ConnectError, match="was not accepted"):
            client.ActivateNode(REQUEST)
