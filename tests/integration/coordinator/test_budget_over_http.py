"""A budget's source over real HTTP, and all the ways in which it can be unreachable."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import urllib.parse
from collections.abc import Iterator
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

import pytest

from coordinator.budgets.prometheus_budget import NameLookups, PrometheusBudget, fetch
from coordinator.errors import SourceFailedError, UnsuitableQueryError, UnusableReadingError
from wattfleet.budgets import ReadingRule


def budget(url: str, query: str = "sum(surplus_watts)") -> PrometheusBudget:
    return PrometheusBudget(url, query, 15, ReadingRule(max_age_s=60, fallback_w=40))


def measured(watts: str) -> bytes:
    """A current response with one series."""
    now_s = datetime.now(timezone.utc).timestamp()
    series = {"metric": {"__name__": "surplus_watts"}, "value": [now_s, watts]}
    return json.dumps({"status": "success", "data": {"resultType": "vector", "result": [series]}}).encode()


class StandIn(ThreadingHTTPServer):
    """Answers as Prometheus does, with a response set by the test."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), StandInHandler)
        self.status = 200
        self.content_type = "application/json"
        self.body = b""
        self.drip = False
        self.redirects_to = ""
        self.asked: list[str] = []
        self.hosts: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class StandInHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
        assert isinstance(self.server, StandIn)
        self.server.asked.append(self.path)
        self.server.hosts.append(self.headers["Host"])
        self.send_response(self.server.status)
        self.send_header("Content-Type", self.server.content_type)
        if self.server.redirects_to:
            self.send_header("Location", self.server.redirects_to)
        self.end_headers()
        try:
            while self.server.drip:
                self.wfile.write(b" ")
                time.sleep(0.05)
            self.wfile.write(self.server.body)
        except OSError:
            pass  # the client has disconnected, as it should

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with StandIn() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.drip = False
        server.shutdown()
        thread.join()


async def test_the_query_is_asked_as_it_is_written_with_the_age_of_its_samples(stand_in: StandIn) -> None:
    stand_in.body = measured("120")
    query = 'sum(surplus_watts{roof=~"a|b"}) - 20 > 0 # & = ü'
    assert (await fetch(budget(f"{stand_in.url}/behind/", query))).watts == 120
    asked = urllib.parse.urlsplit(stand_in.asked[0])
    assert asked.path == "/behind/api/v1/query"
    assert urllib.parse.parse_qs(asked.query) == {"query": [query], "timeout": ["5s"], "lookback_delta": ["30.000"]}


async def test_an_error_of_prometheus_is_told_in_its_words(stand_in: StandIn) -> None:
    stand_in.status = 400
    stand_in.body = json.dumps({"status": "error", "errorType": "bad_data", "error": "parse error: no"}).encode()
    with pytest.raises(UnsuitableQueryError, match="rejects 'sum.*parse error: no"):
        await fetch(budget(stand_in.url))


@pytest.mark.parametrize("status", [401, 404, 500, 503])
async def test_an_error_of_something_else_is_told_by_its_number(stand_in: StandIn, status: int) -> None:
    stand_in.status, stand_in.content_type, stand_in.body = status, "text/plain", b"not here"
    with pytest.raises(SourceFailedError, match=f"answered HTTP {status}: 'not here'"):
        await fetch(budget(stand_in.url))


async def test_an_answer_without_end_is_cut_off(stand_in: StandIn) -> None:
    stand_in.body = b" " * (2 * 1024 * 1024)
    with pytest.raises(UnusableReadingError, match="returns more than 1 MiB: does it select many series"):
        await fetch(budget(stand_in.url))


async def test_an_answer_that_drips_is_given_up_in_time(stand_in: StandIn) -> None:
    stand_in.drip = True
    with pytest.raises(SourceFailedError, match="did not answer within 0.3 s"):
        await fetch(budget(stand_in.url), timeout_s=0.3)


async def test_headers_that_drip_are_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Event()

    async def drip(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(b"HTTP/1.1 200 OK\r\n")
            while not writer.is_closing():
                writer.write(b"X: y\r\n")
                await writer.drain()
                await asyncio.sleep(0.02)
        except OSError:
            pass
        finally:
            writer.close()
            gone.set()

    async with await asyncio.start_server(drip, "127.0.0.1", 0) as server:
        with pytest.raises(SourceFailedError, match="did not answer within 0.3 s"):
            await fetch(budget(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), timeout_s=0.3)
        while not gone.is_set():  # the fetch also closes the connection
            await asyncio.sleep(0.01)


async def test_a_redirect_is_not_followed(stand_in: StandIn) -> None:
    stand_in.status, stand_in.redirects_to = 302, f"{stand_in.url}/elsewhere"
    with pytest.raises(SourceFailedError, match=r"answered HTTP 302, a redirect.*use the address that it leads to"):
        await fetch(budget(stand_in.url))
    assert len(stand_in.asked) == 1


async def test_a_name_that_is_never_resolved_holds_one_thread_and_no_planning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers, asked = Event(), []

    def hang(host: str, *_: object, **__: object) -> list[Any]:
        asked.append(host)
        answers.wait(60)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    names = NameLookups()
    try:
        for _ in range(40):  # more than the threads of the event loop's own executor
            with pytest.raises(SourceFailedError, match="did not answer within 0.01 s"):
                await fetch(budget("http://prometheus.example:9090"), timeout_s=0.01, names=names)
        assert len(asked) == 1
        async with asyncio.timeout(30):
            assert await asyncio.to_thread(lambda: "planned") == "planned"
    finally:
        answers.set()


async def test_a_source_with_a_name_is_tried_at_each_of_its_addresses(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0)) for host in ("127.0.0.2", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    stand_in.body = measured("120")
    assert (await fetch(budget(f"http://prometheus.example:{stand_in.server_port}"))).watts == 120
    assert stand_in.hosts == [f"prometheus.example:{stand_in.server_port}"]


async def test_a_server_that_accepts_and_says_nothing_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(SourceFailedError, match="did not answer within 0.2 s"):
            await fetch(budget(f"http://127.0.0.1:{silent.getsockname()[1]}"), timeout_s=0.2)


@pytest.mark.parametrize("said", [b"", b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{}"])
async def test_a_server_that_breaks_off_or_speaks_no_http_is_told(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as odd:

        def serve_once() -> None:
            connection, _ = odd.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(said)

        thread = Thread(target=serve_once)
        thread.start()
        with pytest.raises(SourceFailedError):
            await fetch(budget(f"http://127.0.0.1:{odd.getsockname()[1]}"))
        thread.join()


async def test_no_server_at_all_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(SourceFailedError, match=f"http://127.0.0.1:{port} cannot be reached: .*refused"):
        await fetch(budget(f"http://127.0.0.1:{port}"))
