"""Budgets read from Prometheus, and all the ways in which that can fail: a fake over real HTTP, and the real one."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from coordinator.budgets.prometheus_budget import PrometheusBudget, fetch, reading_of
from coordinator.errors import (
    AmbiguousQueryError,
    BudgetSourceError,
    NoReadingError,
    SourceFailedError,
    StaleReadingError,
    UnsuitableQueryError,
    UnusableReadingError,
)
from wattfleet.budgets import Reading, ReadingRule
from wattfleet.errors import InvalidInputError

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
    assert budget().lookback_s == 30
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
