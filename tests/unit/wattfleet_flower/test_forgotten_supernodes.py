"""SuperNodes that the SuperLink does not know yet, or has forgotten."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from email.utils import format_datetime

import httpx
import pytest
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import DeactivateNodeRequest, PushMessagesRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.run import RunNotRunningException

from tests.fakes.certified import CertifiedFleet
from tests.fakes.fleet_api import ACTIVATE, KEY, SuperLink, enrolled_client, plain_client, pull
from wattfleet_flower.supernode.fleet_client import ACCEPTED_WITHIN_S
from wattfleet_io.clock import VirtualClock, utc_now

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
