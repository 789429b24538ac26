"""The server behind all HTTP addresses: which connections it closes, whom it answers, and attacks on it."""

from __future__ import annotations

import asyncio
import gc
import http.client
import resource
import socket
import ssl
import threading
import tracemalloc
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
import psutil
import pytest

from edge_agent.exporter import read_url
from tests.fakes import lasting_agent
from tests.fakes.connections import client_hello, connect, ends
from tests.fakes.fittings import fitting_here
from tests.fakes.polling import until
from tests.fakes.process_fleet import BOARD, FleetFolder, ForkedProcess
from tests.fakes.real_processes import CoordinatorProcess
from tests.fakes.served import Agent, CertifiedFleet, hello_of
from wattfleet.common.addresses import split_address
from wattfleet.common.identity.certificates import CertificateCheck, new_key, request_certificate
from wattfleet.common.identity.channels import open_async_channel
from wattfleet.common.identity.http_access import HttpAccess
from wattfleet.common.identity.http_server import HttpLimits, caller_of, serving_http
from wattfleet.common.identity.identity_folder import Identity, read_identity, write_identity
from wattfleet.common.identity.peers import Role
from wattfleet.core.errors import InvalidInputError
from wattfleet_proto.v1 import identity_pb2, identity_pb2_grpc, session_pb2_grpc

# --- HTTP server ------------------------------------------------------------------------------------------------------
# The server behind all HTTP addresses: which connections it closes, which it keeps, and whom it answers.


WITHIN_S = 30.0
NEVER_S = 600.0
SLOW_LIMITS = HttpLimits(connections=8, timeout_s=NEVER_S)
QUICK_LIMITS = HttpLimits(timeout_s=0.2)
LONG_BODY = b"x" * 50_000_000


class App:
    """An ASGI application that answers with its caller's role, or what its path says.

    Like that of `/metrics`, it reads a request's body first.
    """

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Event()
        self.has_ended = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            raise AssertionError("it has none")
        caller = caller_of(scope)
        while (await receive()).get("more_body"):
            pass
        self.begun.release()
        if scope["path"] == "/wait":
            while not (self.may_end.is_set() or caller.is_stopping()):
                await asyncio.sleep(0.01)
        body = LONG_BODY if scope["path"] == "/long" else str(caller.role()).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        if scope["path"] == "/lingers":
            await asyncio.sleep(0.05)
        self.has_ended.set()


@pytest.fixture
def app() -> App:
    return App()


@asynccontextmanager
async def served(
    app: App, limits: HttpLimits = SLOW_LIMITS, access: HttpAccess | None = None
) -> AsyncIterator[Callable[..., Any]]:
    """The application; yields a function that runs another one in a thread, with the port as its first argument."""
    async with serving_http(app, "test", "127.0.0.1", 0, limits, access) as port:

        async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
            return await asyncio.to_thread(function, port, *arguments)

        yield in_thread


def get(port: int, path: str = "/", context: ssl.SSLContext | None = None) -> str:
    url = f"{'http' if context is None else 'https'}://127.0.0.1:{port}{path}"
    with urllib.request.urlopen(url, timeout=WITHIN_S, context=context) as answer:
        return str(answer.read().decode())


class Fleet:
    """A fleet's certificates, and who has been revoked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._certified = CertifiedFleet.create(folder / "authority")
        self.revoked: set[str] = set()
        authority = self._certified.authority
        check = CertificateCheck(authority.authority.fleet, lambda serial: serial in self.revoked)
        self.access = HttpAccess(lambda: authority.server_tls, check)

    def identity(self, role: Role) -> Identity:
        return self._certified.identity(role)

    def context(self, identity: Identity | None) -> ssl.SSLContext:
        return self._certified.https_context(identity, self.folder / "caller")


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


# --- room ---------------------------------------------------------------------------------------------------------


async def test_the_oldest_connections_without_a_request_make_room(app: App) -> None:
    def attack(port: int) -> None:
        with ExitStack() as opened:
            idle = connect(opened, port, 50)
            assert all(ends(each) for each in idle[:46])
            assert get(port) == "None"
            for newest in idle[-3:]:
                newest.sendall(b"GET / HTTP/1.0\r\n\r\n")
                assert newest.recv(12) == b"HTTP/1.1 200"

    async with served(app) as in_thread:
        await in_thread(attack)


async def test_many_connections_of_one_peer_close_none_of_another(app: App) -> None:
    def attack(port: int) -> None:
        with ExitStack() as opened:
            [kept] = connect(opened, port, 1, host="127.0.0.2")
            crowd = connect(opened, port, 50)
            others = connect(opened, port, 20, host="127.0.0.3")
            assert all(ends(each) for each in (*crowd[:40], *others[:10]))
            kept.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert kept.recv(12) == b"HTTP/1.1 200"

    async with served(app) as in_thread:
        await in_thread(attack)


async def test_many_peers_share_the_connections(app: App) -> None:
    def attack(port: int) -> None:
        with ExitStack() as opened:
            idle = [connect(opened, port, 1, host=f"127.0.1.{last}")[0] for last in range(1, 30)]
            assert all(ends(each) for each in idle[:21])
            assert get(port) == "None"

    async with served(app) as in_thread:
        await in_thread(attack)


async def test_a_request_that_is_being_answered_is_not_cut_off(app: App) -> None:
    def attack(port: int) -> None:
        with ExitStack() as opened:
            asking = connect(opened, port, 4)
            for each in asking:
                each.sendall(b"GET /wait HTTP/1.0\r\n\r\n")
                assert app.begun.acquire(timeout=WITHIN_S)
            [further] = connect(opened, port, 1)
            assert ends(further), "this peer has used up its share"
            [another] = connect(opened, port, 1, host="127.0.0.2")
            another.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert another.recv(12) == b"HTTP/1.1 200"
            app.may_end.set()
            assert [each.recv(12) for each in asking] == 4 * [b"HTTP/1.1 200"]

    async with served(app) as in_thread:
        await in_thread(attack)


async def test_most_file_descriptors_are_kept_for_others(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda kind: (64, 64))

    def attack(port: int) -> None:
        with ExitStack() as opened:
            idle = connect(opened, port, 20)
            assert all(ends(each) for each in idle[:16])

    async with served(app, HttpLimits(connections=1_000, timeout_s=NEVER_S)) as in_thread:
        await in_thread(attack)


# --- time ---------------------------------------------------------------------------------------------------------


async def test_whoever_sends_no_request_in_time_is_closed(app: App) -> None:
    def attack(port: int) -> None:
        stop = threading.Event()

        def drip(slow: socket.socket, text: bytes) -> None:
            try:
                slow.sendall(text)
                while not stop.wait(0.02):
                    slow.sendall(b"x")
            except OSError:
                pass

        with ExitStack() as opened:
            idle, slow, answered = connect(opened, port, 3)
            answered.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert answered.recv(12) == b"HTTP/1.1 200"
            dripping = [
                threading.Thread(target=drip, args=(slow, b"GET / HTTP/1.1\r\nX-Slow: ")),
                threading.Thread(target=drip, args=(answered, b"GET / HTTP/1.1\r\nX-Slow: ")),
            ]
            for each in dripping:
                each.start()
            try:
                assert ends(idle) and ends(slow) and ends(answered)
            finally:
                stop.set()
                for each in dripping:
                    each.join()
            assert get(port) == "None"

    async with served(app, QUICK_LIMITS) as in_thread:
        await in_thread(attack)


@pytest.mark.parametrize("header", ["Content-Length: 100", "Transfer-Encoding: chunked"])
async def test_a_body_is_never_waited_for(app: App, header: str) -> None:
    def attack(port: int) -> None:
        with ExitStack() as opened:
            for each in connect(opened, port, SLOW_LIMITS.of_peer):
                each.sendall(f"POST / HTTP/1.1\r\nHost: x\r\n{header}\r\n\r\n".encode())
                assert each.recv(12) == b"HTTP/1.1 413"
                assert ends(each)
            assert get(port) == "None"

    async with served(app) as in_thread:
        await in_thread(attack)


async def test_a_body_without_content_is_none(app: App) -> None:
    def ask(port: int) -> None:
        with ExitStack() as opened:
            [asking] = connect(opened, port, 1)
            asking.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
            assert asking.recv(12) == b"HTTP/1.1 200"

    async with served(app) as in_thread:
        await in_thread(ask)


async def test_an_unfinished_handshake_is_closed_in_time(app: App, fleet: Fleet) -> None:
    def attack(port: int) -> None:
        with ExitStack() as opened:
            silent, half, begun = connect(opened, port, 3)
            half.sendall(client_hello()[:60])
            begun.sendall(client_hello())
            assert ends(silent) and ends(half) and ends(begun)

    async with served(app, QUICK_LIMITS, fleet.access) as in_thread:
        await in_thread(attack)


async def test_whoever_accepts_no_answer_in_time_is_closed(app: App) -> None:
    def attack(port: int) -> None:
        with ExitStack() as opened:
            [slow] = connect(opened, port, 1)
            slow.sendall(2 * b"GET /long HTTP/1.1\r\nHost: x\r\n\r\n")
            assert app.has_ended.wait(WITHIN_S), "its answer is given up"
            received = 0
            while not ends(slow):
                received += len(slow.recv(1_000_000))
            assert received < len(LONG_BODY)

    async with served(app, QUICK_LIMITS) as in_thread:
        await in_thread(attack)


async def test_an_answer_may_take_longer_than_a_peer(app: App) -> None:
    def ask(port: int) -> None:
        threading.Timer(3 * QUICK_LIMITS.timeout_s, app.may_end.set).start()
        assert get(port, "/wait") == "None"

    async with served(app, QUICK_LIMITS) as in_thread:
        await in_thread(ask)


async def test_so_may_the_answer_to_a_request_that_was_sent_with_another(app: App) -> None:
    def ask(port: int) -> None:
        with ExitStack() as opened:
            [asking] = connect(opened, port, 1)
            asking.sendall(b"GET /lingers HTTP/1.1\r\nHost: x\r\n\r\nGET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
            threading.Timer(3 * QUICK_LIMITS.timeout_s, app.may_end.set).start()
            received = b""
            while received.count(b"None") < 2:
                received += asking.recv(1_000) or pytest.fail("the connection was closed")

    async with served(app, QUICK_LIMITS) as in_thread:
        await in_thread(ask)


async def test_the_memory_of_unfinished_handshakes_comes_back(app: App, fleet: Fleet) -> None:
    def attack(port: int) -> None:
        with ExitStack() as opened:
            for _ in range(40):
                [each] = connect(opened, port, 1)
                each.sendall(client_hello())
                each.recv(1)  # its answer has begun

    async def attacked() -> None:
        async with served(app, HttpLimits(connections=4), fleet.access) as in_thread:
            await in_thread(attack)

    gc.disable()  # it comes back without a collection, since one may be far away
    tracemalloc.start()
    try:
        await attacked()
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        await attacked()
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert after - before < 0.5e6 and peak - before < 3e6, "each has buffers of 0.3 MB"


# --- callers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", [Role.VIEWER, Role.OPERATOR])
async def test_an_application_knows_its_callers_role(app: App, fleet: Fleet, role: Role) -> None:
    async with served(app, access=fleet.access) as in_thread:
        assert await in_thread(get, "/", fleet.context(fleet.identity(role))) == str(role)


async def test_other_callers_are_told_why_they_are_refused(app: App, fleet: Fleet) -> None:
    async with served(app, access=fleet.access) as in_thread:
        with pytest.raises(urllib.error.HTTPError, match="403") as refused:
            await in_thread(get, "/", fleet.context(fleet.identity(Role.DEVICE)))
        assert "use a certificate of the role viewer" in refused.value.read().decode()
        for stranger in (fleet.context(None), Fleet(fleet.folder / "x").context(None)):
            with pytest.raises((OSError, http.client.HTTPException)):
                await in_thread(get, "/", stranger)


async def test_a_certificate_is_checked_at_each_request_of_a_connection(app: App, fleet: Fleet) -> None:
    viewer = fleet.identity(Role.VIEWER)

    def ask(port: int) -> None:
        context = fleet.context(viewer)
        with closing(http.client.HTTPSConnection("127.0.0.1", port, timeout=WITHIN_S, context=context)) as connection:
            connection.request("GET", "/")
            with connection.getresponse() as answer:
                assert (answer.status, answer.read()) == (200, b"Role.VIEWER")
            fleet.revoked.add(viewer.certificate.serial)
            connection.request("GET", "/")
            with connection.getresponse() as answer:
                assert answer.status == 403 and b"was revoked" in answer.read()

    async with served(app, access=fleet.access) as in_thread:
        await in_thread(ask)


# --- start and stop -----------------------------------------------------------------------------------------------


async def test_a_stop_ends_idle_connections_and_answers_without_an_end(app: App) -> None:
    with ExitStack() as opened:
        async with served(app) as in_thread:

            def ask(port: int) -> list[socket.socket]:
                found = connect(opened, port, 2)
                found[0].sendall(b"GET /wait HTTP/1.0\r\n\r\n")
                assert app.begun.acquire(timeout=WITHIN_S)
                return found

            asking, idle = await in_thread(ask)
        assert asking.recv(12) == b"HTTP/1.1 200"
        assert ends(idle)


async def test_an_address_that_cannot_be_served_is_refused_with_what_to_do(app: App) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidInputError, match=f"cannot serve test on 127.0.0.1:{port}: .*choose another port"):
            async with serving_http(app, "test", "127.0.0.1", port, SLOW_LIMITS):
                pass
    with pytest.raises(InvalidInputError, match="cannot serve test on 203.0.113.7:0"):
        async with serving_http(app, "test", "203.0.113.7", 0, SLOW_LIMITS):
            pass


# --- HTTP attacks -----------------------------------------------------------------------------------------------------
# The HTTP addresses of real processes: attacks on them, with few file descriptors, and viewers who are revoked.

DESCRIPTORS = 128
IDLE, HANDSHAKES, UNFINISHED, SLOW = 60, 40, 30, 10
REQUESTS = {
    "coordinator": b"GET /static/uplot/uplot.min.js HTTP/1.1\r\nHost: x\r\n\r\n",
    "exporter": b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
}
ATTACKS_WITHIN_S = 60.0
ANYWHERE = "0.0.0.0:0"
ATTACKED = "orin-nano-0"


@dataclass(frozen=True)
class Site:
    """A coordinator over TLS, with the page and `/metrics` for other machines; and the agent of a board."""

    fleet: FleetFolder
    coordinator: CoordinatorProcess
    agent: ForkedProcess
    viewer: ssl.SSLContext

    @property
    def ports(self) -> dict[str, int]:
        agent_url = read_url(self.fleet.state(ATTACKED)) or ""
        return {
            "coordinator": split_address(self.coordinator.addresses["http_address"])[1],
            "exporter": split_address(agent_url.removeprefix("https://").removesuffix("/metrics"))[1],
        }

    def get(self, server: str, path: str = "/metrics") -> str:
        """What a viewer reads."""
        url = f"https://127.0.0.1:{self.ports[server]}{path}"
        with urllib.request.urlopen(url, timeout=ATTACKS_WITHIN_S, context=self.viewer) as answer:
            return str(answer.read().decode())

    def connect_an_agent(self) -> None:
        """Connect a device to the coordinator."""

        async def hello() -> None:
            identity = read_identity(self.fleet.state("another") / "identity")
            assert identity is not None
            async with (
                asyncio.timeout(ATTACKS_WITHIN_S),
                open_async_channel(self.coordinator.address, identity) as channel,
            ):
                agent = Agent(session_pb2_grpc.SessionServiceStub(channel))
                await agent.greet(hello_of("another", BOARD, identity.peer.installation))
                await agent.goodbye()

        asyncio.run(hello())

    def ask_as_operator(self, method: str, request: object) -> Any:
        """Call a method of the coordinator's identity service."""

        async def ask() -> Any:
            async with open_async_channel(self.coordinator.address, self.fleet.operator) as channel:
                return await getattr(identity_pb2_grpc.IdentityServiceStub(channel), method)(request)

        return asyncio.run(ask())

    def connect_an_app(self) -> None:
        """Connect an app to the agent."""
        with grpc.insecure_channel(f"unix:{self.fleet.agent_socket(ATTACKED)}") as channel:
            grpc.channel_ready_future(channel).result(ATTACKS_WITHIN_S)


def run_limited_agent(folder: Path, coordinator: str, socket: Path) -> None:
    """An agent that may open few files; arguments as for `run_agent`."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    with patch("edge_agent.runtime.readiness.fitting_process", fitting_here):
        asyncio.run(lasting_agent.main(folder, coordinator, ATTACKED, socket=socket, metrics_address=ANYWHERE))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("s")
    fleet = FleetFolder(folder, [ATTACKED, "another"])
    # Not `preexec_fn`: this process has threads of gRPC, which a fork would break.
    limited = ("sh", "-c", f'ulimit -n {DESCRIPTORS}; exec "$@"', "sh")
    options = ["--identity", str(fleet.authority), "--enrolment-address", "127.0.0.1:0", "--site-budget-w", "100"]
    options += ["--http-address", ANYWHERE]
    coordinator = CoordinatorProcess(folder, folder / "coordinator.db", *options, wrapper=limited)
    asyncio.run(coordinator.start())
    agent = ForkedProcess(
        "agent",
        run_limited_agent,
        [fleet.board(ATTACKED), coordinator.address, fleet.agent_socket(ATTACKED)],
        fleet.logs,
    )
    until(lambda: read_url(fleet.state(ATTACKED)) is not None and fleet.answers(ATTACKED))
    write_identity(folder / "viewer", fleet.operator)
    viewer = ssl.create_default_context(cafile=str(fleet.authority / "trusted.pem"))
    viewer.check_hostname = False  # a device's certificate does not name its address
    viewer.load_cert_chain(folder / "viewer" / "certificate.pem", folder / "viewer" / "key.pem")
    yield Site(fleet, coordinator, agent, viewer)
    assert agent.stop() == 0, agent.last_words
    assert coordinator.stop() == 0


@contextmanager
def attacked(site: Site, server: str) -> Iterator[None]:
    """Within this context, a server has more connections than its process may open files."""
    port = site.ports[server]
    with ExitStack() as opened:
        connect(opened, port, IDLE)
        for each in connect(opened, port, HANDSHAKES):
            each.sendall(client_hello())
        for _ in range(UNFINISHED):
            [each] = connect(opened, port, 1)
            over_tls = opened.enter_context(site.viewer.wrap_socket(each))
            over_tls.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX-Unfinished: ")
        for _ in range(SLOW):
            [each] = connect(opened, port, 1, host="127.0.0.2", receive_bytes=4096)
            with suppress(OSError):  # it is closed at once, since the others have used up the share of their address
                over_tls = opened.enter_context(site.viewer.wrap_socket(each))
                over_tls.sendall(10 * REQUESTS[server])
        yield


@pytest.mark.parametrize("server", ["coordinator", "exporter"])
def test_agents_viewers_and_apps_are_served_during_an_attack(site: Site, server: str) -> None:
    uses: list[Callable[[], object]] = [
        site.connect_an_agent,
        site.connect_an_app,
        lambda: site.get("coordinator", "/"),
        lambda: site.get("coordinator"),
        lambda: site.get("exporter"),
    ]
    with attacked(site, server):
        for use in uses:
            use()
    assert "too many open files" not in (site.coordinator.log.read_text() + site.agent.log.read_text()).lower()


def enrolled_viewer(site: Site, folder: Path) -> ssl.SSLContext:
    """Prometheus's certificate, as `wattfleet coordinator certificate` gets it."""
    key_pem = new_key()
    request = identity_pb2.IssueCertificateRequest(
        request_pem=request_certificate(key_pem), role="viewer", name="prometheus"
    )
    answer = site.ask_as_operator("IssueCertificate", request)
    write_identity(folder, Identity(key_pem, answer.certificate_pem, answer.trusted_pem))
    context = ssl.create_default_context(cadata=answer.trusted_pem.decode())
    context.check_hostname = False
    context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
    return context


def test_a_viewer_who_is_revoked_reads_nothing_more_over_open_connections(site: Site, tmp_path: Path) -> None:
    viewer = enrolled_viewer(site, tmp_path / "prometheus")
    with ExitStack() as opened:

        def connection_to(port: int) -> http.client.HTTPSConnection:
            connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=ATTACKS_WITHIN_S, context=viewer)
            connection.connect()
            return opened.enter_context(closing(connection))

        def status(connection: http.client.HTTPSConnection) -> int:
            connection.request("GET", "/metrics")
            with connection.getresponse() as answer:
                text = answer.read()
            assert answer.status != 403 or b"the certificate of viewer prometheus was revoked" in text
            return answer.status

        shaken = {server: connection_to(port) for server, port in site.ports.items()}
        before = {server: connection_to(port) for server, port in site.ports.items()}
        assert {server: status(each) for server, each in before.items()} == {"coordinator": 200, "exporter": 200}
        site.ask_as_operator("RevokeCertificates", identity_pb2.RevokeCertificatesRequest(name_or_serial="prometheus"))
        until(lambda: status(connection_to(site.ports["exporter"])) == 403)  # the board hears of it within moments
        assert {status(each) for each in shaken.values()} == {403}


@pytest.mark.slow
async def test_3000_unfinished_handshakes_take_little_memory(tmp_path: Path) -> None:
    fleet = FleetFolder(tmp_path, [])
    options = ["--identity", str(fleet.authority), "--enrolment-address", "127.0.0.1:0", "--site-budget-w", "100"]
    coordinator = CoordinatorProcess(tmp_path, tmp_path / "coordinator.db", *options, "--http-address", ANYWHERE)
    await coordinator.start()
    process = psutil.Process(coordinator.pid)
    before = process.memory_info().rss
    with ExitStack() as opened:
        port = split_address(coordinator.addresses["http_address"])[1]
        for _ in range(3_000):
            [each] = connect(opened, port, 1)
            each.sendall(client_hello())
        assert process.memory_info().rss - before < 100e6, "without a limit it was over 900 MB"
    assert coordinator.stop() == 0
