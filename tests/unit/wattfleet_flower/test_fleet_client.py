"""The connection of an enrolled SuperNode: it trusts the fleet's authorities only, and explains wrong certificates."""

from __future__ import annotations

import socket
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
from flwr.proto.fleet_pb2 import ActivateNodeResponse

from tests.fakes.certified import CertifiedFleet
from tests.fakes.fleet_api import ACTIVATE, client_of
from wattfleet_flower.supernode.fleet_client import EnrolledClient, SteadyClient
from wattfleet_identity.certificates import new_key, request_certificate
from wattfleet_io.clock import utc_now


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
            client.ActivateNode(ACTIVATE)
    # Flower gives up permanently if the text contains one of these words.
    assert not {"certificate", "ssl", "tls"} & set(str(refused.value).lower().split())
    assert why in caplog.text


def test_a_handshake_that_a_superlink_breaks_off_is_tried_again(
    fleet: CertifiedFleet, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def stop() -> None:
            connection, _ = server.accept()
            connection.recv(1)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(100_000)
            connection.close()

        for client in (
            client_of(fleet, f"127.0.0.1:{server.getsockname()[1]}"),
            SteadyClient(f"https://127.0.0.1:{server.getsockname()[1]}"),
        ):
            thread = threading.Thread(target=stop)
            thread.start()
            with client, pytest.raises(httpx.ConnectError, match="was not accepted"):
                client.ActivateNode(ACTIVATE)
            thread.join()
    assert caplog.text.count("has ended a connection before it was protected") == 2
    assert "does not speak TLS" not in caplog.text


def test_a_replaced_authority_is_trusted_without_a_restart(fleet: CertifiedFleet, tmp_path: Path) -> None:
    new = CertifiedFleet.create(tmp_path / "new")
    key_pem, trusted = new_key(), tmp_path / "trusted.pem"
    trusted.write_bytes(fleet.authority.trusted_pem)
    with (
        tls_server(tmp_path, superlink_certificate(new, key_pem), key_pem) as address,
        EnrolledClient(address, trusted) as client,
    ):
        with pytest.raises(httpx.ConnectError):
            client.ActivateNode(ACTIVATE)
        trusted.write_bytes(fleet.authority.trusted_pem + new.authority.trusted_pem)
        assert client.ActivateNode(ACTIVATE).node_id == 7


def test_a_removed_authority_is_not_trusted_any_more(fleet: CertifiedFleet, tmp_path: Path) -> None:
    new = CertifiedFleet.create(tmp_path / "new")
    key_pem, trusted = new_key(), tmp_path / "trusted.pem"
    trusted.write_bytes(fleet.authority.trusted_pem + new.authority.trusted_pem)
    with (
        tls_server(tmp_path, superlink_certificate(fleet, key_pem), key_pem) as address,
        EnrolledClient(address, trusted) as client,
    ):
        assert client.ActivateNode(ACTIVATE).node_id == 7
        trusted.write_bytes(new.authority.trusted_pem)
        # This also holds for the connection that is already open.
        with pytest.raises(httpx.ConnectError, match="was not accepted"):
            client.ActivateNode(ACTIVATE)
        trusted.write_bytes(b"damaged")
        with pytest.raises(httpx.ConnectError, match="was not accepted"):
            client.ActivateNode(ACTIVATE)
