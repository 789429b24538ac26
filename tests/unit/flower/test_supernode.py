"""SuperNodes: their connection to the fleet, SuperLinks that do not know them, and how often they poll."""

from __future__ import annotations

import re
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import ActivateNodeResponse, DeactivateNodeRequest, PushMessagesRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.run import RunNotRunningException

from tests.fakes.fleet_api import ACTIVATE, KEY, SuperLink, client_of, enrolled_client, plain_client, pull
from tests.fakes.flower_in_process import RecordingClock
from tests.fakes.served import CertifiedFleet
from wattfleet.common.clock import VirtualClock, utc_now
from wattfleet.common.identity.certificates import new_key, request_certificate
from wattfleet.flower.supernode.fleet_client import ACCEPTED_WITHIN_S, EnrolledClient, SteadyClient
from wattfleet.flower.supernode.fork_server import Receiver

# --- Fleet client -----------------------------------------------------------------------------------------------------
# The connection of an enrolled SuperNode: it trusts the fleet's authorities only, and explains wrong certificates.


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


# --- Forgotten SuperNodes ---------------------------------------------------------------------------------------------
# SuperNodes that the SuperLink does not know yet, or has forgotten.

# --- the start ----------------------------------------------------------------------------------------------------


class KnownLater(VirtualClock):
    """A clock on which a SuperLink gets to know the key after some time, in seconds."""

    def __init__(self, superlink: SuperLink, after_s: float) -> None:
        super().__init__()
        self._superlink, self._after_s = superlink, after_s

    def sleep_s(self, seconds: float) -> None:
        super().sleep_s(seconds)
        if self.now_s() >= self._after_s and not self._superlink.registered:
            self._superlink.register(KEY)


def test_a_board_that_is_not_known_yet_asks_again(fleet: CertifiedFleet) -> None:
    superlink = SuperLink(enrolled=set())
    clock = KnownLater(superlink, after_s=4.0)
    with enrolled_client(fleet, superlink, clock) as client:
        assert client.ActivateNode(ACTIVATE).node_id == 7
    assert clock.now_s() < 10


def test_a_board_that_is_not_enrolled_gives_up_and_says_what_to_do(
    fleet: CertifiedFleet, caplog: pytest.LogCaptureFixture
) -> None:
    clock = VirtualClock()
    with enrolled_client(fleet, SuperLink(enrolled={b"other"}), clock) as client:
        with pytest.raises(httpx.HTTPStatusError):
            client.ActivateNode(ACTIVATE)
    assert ACCEPTED_WITHIN_S / 2 < clock.now_s() <= ACCEPTED_WITHIN_S
    assert "enrol it again with `wattfleet agent join`" in caplog.text


def test_a_board_waits_for_a_superlink_that_has_no_list_yet(
    fleet: CertifiedFleet, caplog: pytest.LogCaptureFixture
) -> None:
    superlink = SuperLink()
    clock = KnownLater(superlink, after_s=3_600.0)
    with enrolled_client(fleet, superlink, clock) as client:
        assert client.ActivateNode(ACTIVATE).node_id == 7
    assert 3_600.0 <= clock.now_s() < 3_620.0
    assert "revoked" not in caplog.text


def test_other_errors_are_not_waited_for(fleet: CertifiedFleet) -> None:
    clock, superlink = VirtualClock(), SuperLink()
    superlink.errors = [400]
    with enrolled_client(fleet, superlink, clock) as client, pytest.raises(httpx.HTTPStatusError):
        client.ActivateNode(ACTIVATE)
    assert len(superlink.paths) == 1 and clock.now_s() == 0


def test_a_board_whose_clock_is_wrong_says_so(fleet: CertifiedFleet, caplog: pytest.LogCaptureFixture) -> None:
    class Later(SuperLink):
        """A SuperLink an hour ahead, which refuses signatures from its past."""

        def handle_request(self, request: httpx.Request) -> httpx.Response:
            if len(self.paths) < 3:
                self.paths.append(request.url.path)
                return httpx.Response(401, headers={"date": format_datetime(utc_now() + timedelta(hours=1))})
            return super().handle_request(request)

    with enrolled_client(fleet, Later(KEY)) as client:
        assert client.ActivateNode(ACTIVATE).node_id == 7
    [logged] = [each for each in caplog.messages if "clock" in each]
    assert re.search(r"clocks of the two machines differ by 3(599|600|601) s: set the clock", logged)


# --- a restart of the SuperLink -----------------------------------------------------------------------------------


def test_a_plain_supernode_returns_to_a_superlink_that_was_restarted() -> None:
    superlink = SuperLink(registers_itself=True)
    with plain_client(superlink) as client:
        new_ids: list[int] = []
        client.on_new_id = new_ids.append
        pull(client)
        for _ in range(2):
            superlink.restart()
            pull(client)
            pull(client)
        client.DeactivateNode(DeactivateNodeRequest(node_id=7))
    assert superlink.seen == [7, 8, 8, 9, 9, 9]
    assert new_ids == [8, 9]


def test_an_enrolled_board_returns_once_the_superlink_has_registered_it(
    fleet: CertifiedFleet, caplog: pytest.LogCaptureFixture
) -> None:
    superlink = SuperLink(KEY, enrolled={KEY})
    with enrolled_client(fleet, superlink) as client:
        client.ActivateNode(ACTIVATE)
        superlink.restart()
        for _ in range(3):
            # Flower repeats requests after this error, as long as it does not mention TLS.
            with pytest.raises(httpx.ConnectError) as error:
                pull(client)
            assert not {"certificate", "ssl", "tls"} & set(str(error.value).lower().split())
        superlink.register(KEY)
        pull(client)
    assert superlink.seen == [8]
    assert "revoked" not in caplog.text
    assert caplog.text.count("does not accept this SuperNode yet; trying again") == 1


def test_both_threads_of_a_supernode_return_as_one_node() -> None:
    superlink = SuperLink(registers_itself=True)
    with plain_client(superlink) as client:
        superlink.restart()
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: pull(client), range(8)))
    assert superlink.seen == [8] * 8
    assert superlink.paths.count("register-node") == 2


def test_a_revoked_board_ends_and_says_what_to_do(fleet: CertifiedFleet, caplog: pytest.LogCaptureFixture) -> None:
    superlink = SuperLink(KEY, enrolled={KEY})
    with enrolled_client(fleet, superlink) as client:
        client.ActivateNode(ACTIVATE)
        superlink.restart()
        superlink.enrolled = {b"other"}
        with pytest.raises(httpx.HTTPStatusError) as error:  # Flower ends a SuperNode after this answer
            pull(client)
    assert error.value.response.status_code == 401
    assert "it was revoked or forgotten" in caplog.text


def test_a_board_that_is_revoked_just_after_its_return_says_what_to_do(
    fleet: CertifiedFleet, caplog: pytest.LogCaptureFixture
) -> None:
    superlink = SuperLink(KEY, enrolled={KEY})

    def revoke(_: int) -> None:
        superlink.restart()
        superlink.enrolled = {b"other"}

    with enrolled_client(fleet, superlink) as client:
        client.ActivateNode(ACTIVATE)
        client.on_new_id = revoke
        superlink.restart()
        superlink.register(KEY)
        with pytest.raises(httpx.HTTPStatusError):
            pull(client)
    assert "it was revoked or forgotten" in caplog.text


def test_a_board_whose_superlink_is_restarted_again_and_again_returns(fleet: CertifiedFleet) -> None:
    superlink = SuperLink(KEY, enrolled={KEY})

    def restart(_: int) -> None:
        superlink.restart()
        superlink.register(KEY)

    with enrolled_client(fleet, superlink) as client:
        client.ActivateNode(ACTIVATE)
        client.on_new_id = restart
        restart(0)
        with pytest.raises(httpx.ConnectError, match="has accepted this SuperNode"):  # which Flower repeats
            pull(client)
        client.on_new_id = lambda _: None
        pull(client)
    assert len(superlink.seen) == 1


def test_a_supernode_that_the_user_has_unregistered_ends(caplog: pytest.LogCaptureFixture) -> None:
    superlink = SuperLink(registers_itself=True)
    with plain_client(superlink) as client:
        superlink.unregistered = set(superlink.registered)
        superlink.restart()
        with pytest.raises(httpx.HTTPStatusError):
            pull(client)
    assert "was unregistered at the SuperLink" in caplog.text


def test_a_supernode_that_leaves_does_not_return() -> None:
    superlink = SuperLink(registers_itself=True)
    with plain_client(superlink) as client:
        superlink.restart()
        with pytest.raises(httpx.HTTPStatusError):
            client.DeactivateNode(DeactivateNodeRequest(node_id=7))
    assert superlink.registered == {}


# --- errors of the SuperLink --------------------------------------------------------------------------------------


def test_flower_repeats_a_request_for_messages_and_a_heartbeat_after_a_server_error() -> None:
    # Without this, Flower's SuperNode stops to work, or sends no further heartbeat.
    superlink = SuperLink(registers_itself=True)
    with plain_client(superlink) as client:
        superlink.errors = [500, 0, 500]
        with pytest.raises(httpx.TransportError):
            pull(client)
        pull(client)
        heartbeat = SendNodeHeartbeatRequest(node=Node(node_id=7), heartbeat_interval=30)
        with pytest.raises(httpx.TransportError):
            client.SendNodeHeartbeat(heartbeat)
        superlink.accepts_heartbeats = False
        with pytest.raises(httpx.TransportError):
            client.SendNodeHeartbeat(heartbeat)
        superlink.accepts_heartbeats = True
        assert client.SendNodeHeartbeat(heartbeat).success


def test_other_requests_are_sent_three_times() -> None:
    superlink = SuperLink(registers_itself=True)
    with plain_client(superlink) as client:
        superlink.errors = [500, 500]
        client.PushMessages(PushMessagesRequest(node=Node(node_id=7)))
        superlink.errors = [500] * 9
        with pytest.raises(httpx.HTTPStatusError):
            client.PushMessages(PushMessagesRequest(node=Node(node_id=7)))
    assert superlink.paths.count("push-messages") == 6


def test_a_message_of_a_run_that_cannot_be_requested_is_ignored() -> None:
    superlink = SuperLink(registers_itself=True)
    with plain_client(superlink) as client:
        superlink.errors = [500, 0, *[500] * 6]
        client.GetRun(GetRunRequest(node=Node(node_id=7), run_id=1))
        for request in (
            lambda: client.GetRun(GetRunRequest(node=Node(node_id=7), run_id=1)),
            lambda: client.GetFab(GetFabRequest(node=Node(node_id=7), run_id=1)),
        ):
            with pytest.raises(RunNotRunningException):
                request()


# --- Polling of a SuperNode -------------------------------------------------------------------------------------------
# How often a SuperNode polls for a message.


class BusySuperLink:
    """A SuperLink that has a message after `after_s`, and takes `answers_in_s` for every answer."""

    def __init__(self, after_s: float, answers_in_s: float = 0.0) -> None:
        self.clock = RecordingClock()
        self.requests = 0
        self._from_s = self.clock.now_s() + after_s
        self._answers_in_s = answers_in_s

    def receive(self) -> str | None:
        self.requests += 1
        self.clock.advance(self._answers_in_s)
        return "message" if self.clock.now_s() >= self._from_s else None


@pytest.mark.parametrize(("after_s", "late_s"), [(0.0, 0.0), (1.0, 0.25), (30.0, 1.5), (3600.0, 3.0)])
def test_a_message_is_late_by_5_percent_of_the_wait_at_most(after_s: float, late_s: float) -> None:
    superlink = BusySuperLink(after_s)
    began_s = superlink.clock.now_s()
    assert Receiver(superlink.receive, 0.25, superlink.clock)() == "message"
    assert 0.0 <= superlink.clock.now_s() - began_s - after_s <= late_s + 1e-6


def test_an_idle_supernode_asks_as_rarely_as_flowers() -> None:
    superlink = BusySuperLink(24 * 3600.0)
    Receiver(superlink.receive, 0.25, superlink.clock)()
    assert superlink.requests < 1.01 * 24 * 3600 / 3.0


def test_a_busy_superlink_is_asked_less_often() -> None:
    superlink = BusySuperLink(20.0, answers_in_s=0.2)
    Receiver(superlink.receive, 0.25, superlink.clock)()
    assert min(superlink.clock.slept) >= 2.0


def test_a_longer_pause_than_flowers_is_kept() -> None:
    superlink = BusySuperLink(100.0)
    Receiver(superlink.receive, 10.0, superlink.clock)()
    assert set(superlink.clock.slept) == {10.0}
