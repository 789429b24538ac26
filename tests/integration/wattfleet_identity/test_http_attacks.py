"""The HTTP addresses of real processes: attacks on them, with few file descriptors, and viewers who are revoked."""

from __future__ import annotations

import asyncio
import http.client
import resource
import ssl
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
import psutil
import pytest

from edge_agent.exporter import read_url
from tests.fakes import lasting_agent
from tests.fakes.coordinator_process import CoordinatorProcess
from tests.fakes.fitting_here import fitting_here
from tests.fakes.http_attacks import client_hello, connect
from tests.fakes.polling import until
from tests.fakes.process_fleet import BOARD, FleetFolder, ForkedProcess
from tests.fakes.served import Agent, hello_of
from wattfleet_identity.certificates import new_key, request_certificate
from wattfleet_identity.channels import open_async_channel
from wattfleet_identity.identity_folder import Identity, read_identity, write_identity
from wattfleet_io.addresses import split_address
from wattfleet_proto.v1 import identity_pb2, identity_pb2_grpc, session_pb2_grpc

DESCRIPTORS = 128
IDLE, HANDSHAKES, UNFINISHED, SLOW = 60, 40, 30, 10
REQUESTS = {
    "page": b"GET /static/uplot/uplot.min.js HTTP/1.1\r\nHost: x\r\n\r\n",
    "metrics": b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
    "exporter": b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
}
WITHIN_S = 60.0
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
        addresses = self.coordinator.addresses
        agent_url = read_url(self.fleet.state(ATTACKED)) or ""
        return {
            "page": split_address(addresses["page_address"])[1],
            "metrics": split_address(addresses["metrics_address"])[1],
            "exporter": split_address(agent_url.removeprefix("https://").removesuffix("/metrics"))[1],
        }

    def get(self, server: str, path: str = "/metrics") -> str:
        """What a viewer reads."""
        url = f"https://127.0.0.1:{self.ports[server]}{path}"
        with urllib.request.urlopen(url, timeout=WITHIN_S, context=self.viewer) as answer:
            return str(answer.read().decode())

    def connect_an_agent(self) -> None:
        """Connect a device to the coordinator."""

        async def hello() -> None:
            identity = read_identity(self.fleet.state("another") / "identity")
            assert identity is not None
            async with asyncio.timeout(WITHIN_S), open_async_channel(self.coordinator.address, identity) as channel:
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
            grpc.channel_ready_future(channel).result(WITHIN_S)


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
    options += ["--page-address", ANYWHERE, "--metrics-address", ANYWHERE]
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


@pytest.mark.parametrize("server", ["page", "metrics", "exporter"])
def test_agents_viewers_and_apps_are_served_during_an_attack(site: Site, server: str) -> None:
    uses: list[Callable[[], object]] = [
        site.connect_an_agent,
        site.connect_an_app,
        lambda: site.get("page", "/"),
        lambda: site.get("metrics"),
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
            connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=WITHIN_S, context=viewer)
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
        assert {server: status(each) for server, each in before.items()} == {
            "page": 404, "metrics": 200, "exporter": 200,
        }  # fmt: skip
        site.ask_as_operator("RevokeCertificates", identity_pb2.RevokeCertificatesRequest(name_or_serial="prometheus"))
        until(lambda: status(connection_to(site.ports["exporter"])) == 403)  # the board hears of it within moments
        assert {status(each) for each in shaken.values()} == {403}


@pytest.mark.slow
async def test_3000_unfinished_handshakes_take_little_memory(tmp_path: Path) -> None:
    fleet = FleetFolder(tmp_path, [])
    options = ["--identity", str(fleet.authority), "--enrolment-address", "127.0.0.1:0", "--site-budget-w", "100"]
    coordinator = CoordinatorProcess(tmp_path, tmp_path / "coordinator.db", *options, "--page-address", ANYWHERE)
    await coordinator.start()
    process = psutil.Process(coordinator.pid)
    before = process.memory_info().rss
    with ExitStack() as opened:
        port = split_address(coordinator.addresses["page_address"])[1]
        for _ in range(3_000):
            [each] = connect(opened, port, 1)
            each.sendall(client_hello())
        assert process.memory_info().rss - before < 100e6, "without a limit it was over 900 MB"
    assert coordinator.stop() == 0
