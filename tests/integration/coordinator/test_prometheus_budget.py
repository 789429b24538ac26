"""Budgets read from Prometheus over real HTTP, and all the ways in which that can fail."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import socket
import subprocess
import time
import urllib.parse
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from coordinator.budgets.prometheus_budget import NameLookups, PrometheusBudget, fetch, reading_of
from coordinator.errors import (
    AmbiguousQueryError,
    BudgetSourceError,
    NoReadingError,
    SourceFailedError,
    StaleReadingError,
    UnsuitableQueryError,
    UnusableReadingError,
)
from wattfleet.core.budgets import Reading, ReadingRule
from wattfleet.core.errors import InvalidInputError

# --- Prometheus budget ------------------------------------------------------------------------------------------------
# Budgets read from Prometheus, and all the ways in which that can fail: a fake over real HTTP, and the real one.


NOW = datetime(2026, 6, 1, 12, tzinfo=timezone.utc)


def budget(
    url: str = "http://127.0.0.1:9090", query: str = "sum(surplus_watts)", every_s: float = 15
) -> PrometheusBudget:
    return PrometheusBudget(url, query, every_s, ReadingRule(max_age_s=60, fallback_w=40))


def vector(*values: Any, at: datetime = NOW) -> dict[str, Any]:
    """A response with one series for each value."""
    series = [
        {"metric": {"__name__": "surplus_watts", "roof": str(k)}, "value": [at.timestamp(), value]}
        for k, value in enumerate(values)
    ]
    return {"status": "success", "data": {"resultType": "vector", "result": series}}


def answer(resulttype: str, result: Any) -> dict[str, Any]:
    return {"status": "success", "data": {"resultType": resulttype, "result": result}}


def read(body: dict[str, Any] | bytes, received_at: datetime = NOW) -> Reading:
    return reading_of(body if isinstance(body, bytes) else json.dumps(body).encode(), budget(), received_at)


# --- the content of a response -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "watts"),
    [
        (vector("120.5"), 120.5),
        (vector("0"), 0),
        (vector("1.5e2"), 150),
        (answer("scalar", [NOW.timestamp(), "80"]), 80),
        (vector("7") | {"warnings": ["results may be partial"]}, 7),
    ],
)
def test_one_series_or_a_scalar_is_a_reading(body: dict[str, Any], watts: float) -> None:
    assert read(body).watts == watts


@pytest.mark.parametrize(
    ("body", "error", "said"),
    [
        (vector(), NoReadingError, "returns no series with a sample in the last 30 s at http://127.0.0.1:9090"),
        (
            vector("1", "2"),
            AmbiguousQueryError,
            'returns 2 series, surplus_watts{roof="0"}, surplus_watts{roof="1"}: select one',
        ),
        (vector(*"12345"), AmbiguousQueryError, 'surplus_watts{roof="2"} and 2 more: select one, or write sum(...)'),
        (vector("NaN"), UnusableReadingError, "returns NaN: watts must be finite and not negative"),
        (vector("+Inf"), UnusableReadingError, "returns +Inf"),
        (vector("-0.5"), UnusableReadingError, "write clamp_min(..., 0)"),
        (answer("scalar", [NOW.timestamp(), "NaN"]), UnusableReadingError, "returns NaN"),
        (vector("many"), SourceFailedError, "did not answer like a Prometheus server"),
        (vector(None), SourceFailedError, "did not answer like a Prometheus server"),
        (answer("scalar", [1.8e18, "80"]), SourceFailedError, "did not answer like a Prometheus server"),
        (answer("vector", [{"metric": {}, "histogram": [0, {}]}]), SourceFailedError, "did not answer like"),
        (answer("matrix", []), UnsuitableQueryError, "returns a matrix: write a query that returns one series"),
        (answer("string", [0, "120"]), UnsuitableQueryError, "returns a string"),
        (
            {"status": "error", "errorType": "bad_data", "error": "parse error: unclosed left parenthesis"},
            UnsuitableQueryError,
            "rejects 'sum(surplus_watts)': parse error: unclosed left parenthesis",
        ),
        (
            {"status": "error", "errorType": "timeout", "error": "query timed out"},
            SourceFailedError,
            "cannot evaluate 'sum(surplus_watts)': query timed out",
        ),
        (b"", SourceFailedError, "did not answer like a Prometheus server: nothing"),
        (b"<html>hello", SourceFailedError, "did not answer like a Prometheus server: '<html>hello'"),
        (b"[]", SourceFailedError, "did not answer like"),
        (b'{"status": "success"}', SourceFailedError, "did not answer like"),
        (b'{"status": "success", "data": null}', SourceFailedError, "did not answer like"),
        (b'{"status": "error"}', SourceFailedError, "did not answer like"),
        (b"[" * 100_000, SourceFailedError, "did not answer like"),
        (b"\xff\xfe\xff", SourceFailedError, "did not answer like"),
        (answer("scalar", [1e300, "80"]), SourceFailedError, "did not answer like"),
        (answer("scalar", [math.nan, "80"]), SourceFailedError, "did not answer like"),
        (answer("scalar", [-62135596800, "80"]), StaleReadingError, "compare its clock"),
        (answer("scalar", [NOW.timestamp(), " " * 100_000 + "NaN"]), UnusableReadingError, "...: watts must"),
        (
            {
                "status": "success",
                "data": {
                    "resultType": "vector",
                    "result": [{"metric": {"roof": "x" * 100_000}, "value": [0, "1"]}] * 2,
                },
            },
            AmbiguousQueryError,
            "returns 2 series",
        ),
    ],
)
def test_an_answer_without_watts_is_a_typed_error(
    body: dict[str, Any] | bytes, error: type[BudgetSourceError], said: str
) -> None:
    with pytest.raises(BudgetSourceError) as failed:
        read(body)
    assert type(failed.value) is error
    assert said in str(failed.value)
    assert len(str(failed.value)) < 1_000


def test_only_errors_that_a_change_of_the_query_mends_ask_for_one() -> None:
    mended = {error for error in BudgetSourceError.__subclasses__() if error.caller_must_correct}
    assert mended == {AmbiguousQueryError, UnsuitableQueryError}


# --- its age -----------------------------------------------------------------------------------------------------


def test_prometheus_and_the_reading_each_have_half_of_the_age() -> None:
    """Samples up to 30 s old at the evaluation, kept for 30 s: none is older than the 60 s while it is in force."""
    reading = read(vector("120"))
    assert budget().number.lookback_s == 30
    assert reading.measured_at == NOW - timedelta(seconds=30)
    rule = budget().rule
    assert not rule.in_force(NOW + timedelta(seconds=30), reading).fallback
    assert rule.in_force(NOW + timedelta(seconds=30.1), reading).fallback


def test_an_old_answer_is_refused() -> None:
    read(vector("120", at=NOW - timedelta(seconds=30)))
    with pytest.raises(StaleReadingError, match="is 31 s old: compare its clock"):
        read(vector("120", at=NOW - timedelta(seconds=31)))


def test_a_server_whose_clock_is_ahead_does_not_make_an_answer_last_longer() -> None:
    assert read(vector("120", at=NOW + timedelta(hours=1))).measured_at == NOW - timedelta(seconds=30)


# --- the configuration -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:9090",
        "file:///etc/passwd",
        "ftp://127.0.0.1",
        "http://",
        "http://me:secret@127.0.0.1",
        "http://:secret@127.0.0.1",
        "http://127.0.0.1/?query=up",
        "http://127.0.0.1/#up",
        "http://127.0.0.1:99999",
        "http://[::1",
        "http://127.0.0.1/ü",
        "http://127.0.0.1/\n",
    ],
)
def test_a_url_of_no_server_is_refused_and_no_password_is_told(url: str) -> None:
    with pytest.raises(InvalidInputError, match="the url must be that of a Prometheus server") as refused:
        budget(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("every_s", [0, 0.5, -1, 20.1, math.nan, math.inf])
def test_a_query_is_asked_at_least_thrice_in_the_age_of_a_reading(every_s: float) -> None:
    with pytest.raises(InvalidInputError, match="every_s must be from 1 s to a third of max_age_s"):
        budget(every_s=every_s)


def test_an_empty_query_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="query is empty"):
        budget(query=" ")


# --- the real one ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a real Prometheus that scrapes nothing."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed (Debian's package prometheus brings it)")
    folder: Path = tmp_path_factory.mktemp("prometheus")
    (folder / "prometheus.yml").write_text("{}\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    command = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with subprocess.Popen(
        [*command, f"--web.listen-address={address}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            for _ in range(300):
                try:
                    asyncio.run(fetch(budget(f"http://{address}", "vector(1)")))
                    break
                except SourceFailedError:
                    time.sleep(0.1)
            yield f"http://{address}"
        finally:
            process.terminate()


async def test_the_real_prometheus_answers_watts(prometheus: str) -> None:
    before = datetime.now(timezone.utc)
    for query in ("vector(120.5)", "scalar(vector(120.5))", "120.5", 'label_replace(vector(120.5), "a", "ü", "", "")'):
        reading = await fetch(budget(prometheus, query))
        assert reading.watts == 120.5
        assert abs(reading.measured_at - before + timedelta(seconds=30)) < timedelta(seconds=10)


@pytest.mark.parametrize(
    ("query", "error", "said"),
    [
        ("absent_watts", NoReadingError, "returns no series"),
        ("vector(1) > 2", NoReadingError, "returns no series"),
        (
            'label_replace(vector(1), "roof", "a", "", "") or vector(2)',
            AmbiguousQueryError,
            'returns 2 series, {roof="a"}, {}',
        ),
        ("vector(0) / 0", UnusableReadingError, "returns NaN"),
        ("vector(1) / 0", UnusableReadingError, "returns +Inf"),
        ("-vector(5)", UnusableReadingError, "write clamp_min(..., 0)"),
        ("sum(", UnsuitableQueryError, "rejects 'sum('"),
        ("absent_watts[5m]", UnsuitableQueryError, "returns a matrix"),
        ('"120"', UnsuitableQueryError, "returns a string"),
    ],
)
async def test_the_real_prometheus_and_what_is_no_watts(
    prometheus: str, query: str, error: type[BudgetSourceError], said: str
) -> None:
    with pytest.raises(BudgetSourceError) as failed:
        await fetch(budget(prometheus, query))
    assert type(failed.value) is error
    assert said in str(failed.value)


# --- Budget over HTTP -------------------------------------------------------------------------------------------------
# A budget's source over real HTTP, and all the ways in which it can be unreachable.


def budget_at(url: str, query: str = "sum(surplus_watts)") -> PrometheusBudget:
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
    assert (await fetch(budget_at(f"{stand_in.url}/behind/", query))).watts == 120
    asked = urllib.parse.urlsplit(stand_in.asked[0])
    assert asked.path == "/behind/api/v1/query"
    assert urllib.parse.parse_qs(asked.query) == {"query": [query], "timeout": ["5s"], "lookback_delta": ["30.000"]}


async def test_an_error_of_prometheus_is_told_in_its_words(stand_in: StandIn) -> None:
    stand_in.status = 400
    stand_in.body = json.dumps({"status": "error", "errorType": "bad_data", "error": "parse error: no"}).encode()
    with pytest.raises(UnsuitableQueryError, match="rejects 'sum.*parse error: no"):
        await fetch(budget_at(stand_in.url))


@pytest.mark.parametrize("status", [401, 404, 500, 503])
async def test_an_error_of_something_else_is_told_by_its_number(stand_in: StandIn, status: int) -> None:
    stand_in.status, stand_in.content_type, stand_in.body = status, "text/plain", b"not here"
    with pytest.raises(SourceFailedError, match=f"answered HTTP {status}: 'not here'"):
        await fetch(budget_at(stand_in.url))


async def test_an_answer_without_end_is_cut_off(stand_in: StandIn) -> None:
    stand_in.body = b" " * (2 * 1024 * 1024)
    with pytest.raises(UnusableReadingError, match="returns more than 1 MiB: does it select many series"):
        await fetch(budget_at(stand_in.url))


async def test_an_answer_that_drips_is_given_up_in_time(stand_in: StandIn) -> None:
    stand_in.drip = True
    with pytest.raises(SourceFailedError, match="did not answer within 0.3 s"):
        await fetch(budget_at(stand_in.url), timeout_s=0.3)


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
            await fetch(budget_at(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), timeout_s=0.3)
        while not gone.is_set():  # the fetch also closes the connection
            await asyncio.sleep(0.01)


async def test_a_redirect_is_not_followed(stand_in: StandIn) -> None:
    stand_in.status, stand_in.redirects_to = 302, f"{stand_in.url}/elsewhere"
    with pytest.raises(SourceFailedError, match=r"answered HTTP 302, a redirect.*use the address that it leads to"):
        await fetch(budget_at(stand_in.url))
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
                await fetch(budget_at("http://prometheus.example:9090"), timeout_s=0.01, names=names)
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
    assert (await fetch(budget_at(f"http://prometheus.example:{stand_in.server_port}"))).watts == 120
    assert stand_in.hosts == [f"prometheus.example:{stand_in.server_port}"]


async def test_a_server_that_accepts_and_says_nothing_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(SourceFailedError, match="did not answer within 0.2 s"):
            await fetch(budget_at(f"http://127.0.0.1:{silent.getsockname()[1]}"), timeout_s=0.2)


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
            await fetch(budget_at(f"http://127.0.0.1:{odd.getsockname()[1]}"))
        thread.join()


async def test_no_server_at_all_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(SourceFailedError, match=f"http://127.0.0.1:{port} cannot be reached: .*refused"):
        await fetch(budget_at(f"http://127.0.0.1:{port}"))
