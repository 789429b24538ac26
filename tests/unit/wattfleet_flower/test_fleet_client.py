"""SuperNodes that the SuperLink does not accept, or has forgotten."""

from __future__ import annotations

import json
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
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    ActivateNodeResponse,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
    RegisterNodeFleetResponse,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.error import ApiErrorCode
from flwr.supercore.run import RunNotRunningException

from tests.fakes.certified import CertifiedFleet
from wattfleet_flower.enrolment_header import HEADER, NOT_ENROLLED
from wattfleet_flower.supernode.fleet_client import ACCEPTED_WITHIN_S, EnrolledClient, SteadyClient
from wattfleet_identity.certificates import new_key, request_certificate
from wattfleet_io.clock import VirtualClock, utc_now

KEY = b"key"
ACTIVATE = ActivateNodeRequest(public_key=KEY, heartbeat_interval=30)
Client = TypeVar("Client", bound=SteadyClient)


def client_of(fleet: CertifiedFleet, address: str = "localhost:1", clock: VirtualClock | None = None) -> EnrolledClient:
    return EnrolledClient(address, fleet.authority.folder / "trusted.pem", clock=clock or VirtualClock())


class SuperLink(httpx.BaseTransport):
    """A SuperLink that knows some keys, in memory.

    Attributes:
        registered: node id of each key.
        enrolled: the keys that its list of enrolled SuperNodes holds; None if it has no list.
        registers_itself: whether a SuperNode registers its own key, as without node authentication.
        unregistered: the keys that were unregistered.
        errors: statuses that the next requests are answered with.
        paths: the paths of the requests.
        seen: node id of each accepted request.
    """

    def __init__(self, *keys: bytes, enrolled: set[bytes] | None = None, registers_itself: bool = False) -> None:
        self._ids = count(7)
        self.registered = {key: next(self._ids) for key in keys}
        self.enrolled = enrolled
        self.registers_itself = registers_itself
        self.unregistered: set[bytes] = set()
        self.errors: list[int] = []
        self.paths: list[str] = []
        self.seen: list[int] = []

    def restart(self) -> None:
        self.registered.clear()

    def register(self, key: bytes) -> int:
        self.registered[key] = next(self._ids)
        return self.registered[key]

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path.rpartition("/")[2]
        self.paths.append(path)
        if self.errors and (status := self.errors.pop(0)):
            return httpx.Response(status)
        content = request.read()
        if path == "register-node":
            return self._register(RegisterNodeFleetRequest.FromString(content).public_key)
        if path == "activate-node":
            key = ActivateNodeRequest.FromString(content).public_key
            if key in self.registered:
                return _accepted(ActivateNodeResponse(node_id=self.registered[key]))
            return self._refused(ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED)
        if path == "deactivate-node":
            node_id = DeactivateNodeRequest.FromString(content).node_id
        else:
            node_id = PullMessagesRequest.FromString(content).node.node_id
        if node_id not in self.registered.values():
            return httpx.Response(401, headers=self._headers())
        self.seen.append(node_id)
        return _accepted(PullMessagesResponse())

    def _register(self, key: bytes) -> httpx.Response:
        if not self.registers_itself:
            return self._refused(ApiErrorCode.FLEET_SUPERNODE_REGISTRATION_DISABLED)
        if key in {*self.registered, *self.unregistered}:
            return self._refused(ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE)
        return _accepted(RegisterNodeFleetResponse(node_id=self.register(key)))

    def _refused(self, code: int) -> httpx.Response:
        return httpx.Response(412, text=json.dumps({"code": code, "detail": "refused"}), headers=self._headers())

    def _headers(self) -> dict[str, str]:
        return {HEADER: NOT_ENROLLED} if self.enrolled is not None and KEY not in self.enrolled else {}


def _accepted(message: Any) -> httpx.Response:
    return httpx.Response(200, content=message.SerializeToString())


def using(client: Client, superlink: SuperLink) -> Client:
    client._client = httpx.Client(transport=superlink)  # noqa: SLF001 - Flower's class has no seam for it
    return client


def enrolled_client(fleet: CertifiedFleet, superlink: SuperLink, clock: VirtualClock | None = None) -> EnrolledClient:
    return using(client_of(fleet, clock=clock), superlink)


def plain_client(superlink: SuperLink) -> SteadyClient:
    """The client of a SuperNode without a key of its own, which has registered and activated itself."""
    client = using(SteadyClient("http://localhost:1", clock=VirtualClock()), superlink)
    client.RegisterNode(RegisterNodeFleetRequest(public_key=KEY))
    client.ActivateNode(ACTIVATE)
    return client


def pull(client: SteadyClient, node_id: int = 7) -> None:
    """Request messages as Flower does: always under the node id that it got first."""
    client.PullMessages(PullMessagesRequest(node=Node(node_id=node_id)))


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
    assert caplog.text.count("does not know this SuperNode's key; trying again") == 1


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
        with pytest.raises(httpx.TransportError):
            client.SendNodeHeartbeat(SendNodeHeartbeatRequest(node=Node(node_id=7), heartbeat_interval=30))


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


# --- TLS ----------------------------------------------------------------------------------------------------------


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
