"""Budgets from Prometheus queries, for example of a battery, solar panels or a meter."""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import ssl
import urllib.parse
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import cache
from typing import Any

import httpx

from coordinator.errors import (
    AmbiguousQueryError,
    NoReadingError,
    SourceFailedError,
    StaleReadingError,
    UnsuitableQueryError,
    UnusableReadingError,
)
from wattfleet.budgets import Reading, ReadingRule
from wattfleet.errors import InvalidInputError

_MAX_ANSWER_BYTES = 1024 * 1024
_NAMED_SERIES = 3


@dataclass(frozen=True)
class PrometheusBudget:
    """A budget that a query measures, with its fallback.

    Attributes:
        url: URL of the server, without `/api/v1/query`.
        query: PromQL that returns one series, or a scalar, in watts.
        every_s: seconds between two queries.
        rule: how long an answer stays in force, and the fallback.

    Raises:
        InvalidInputError: the URL is not one of a server, the query is empty, or it runs so rarely that each answer is
            stale before the next one.
    """

    url: str
    query: str
    every_s: float
    rule: ReadingRule

    def __post_init__(self) -> None:
        _require_server(self.url)
        if not self.query.strip():
            raise InvalidInputError("a budget's query is empty: write PromQL that returns watts")
        if not 1 <= self.every_s <= self.rule.max_age_s / 3:
            raise InvalidInputError(
                f"every_s must be from 1 s to a third of max_age_s ({self.rule.max_age_s / 3:g} s), not"
                f" {self.every_s:g} s: otherwise an answer is stale before the next one"
            )

    @property
    def lookback_s(self) -> float:
        """The largest age in seconds of the samples that Prometheus answers from.

        An answer has the time of the query's evaluation, not of its samples. Half of a reading's largest age is
        therefore left to Prometheus for looking back, and the other half for keeping the answer.
        """
        return self.rule.max_age_s / 2


async def fetch(budget: PrometheusBudget, timeout_s: float = 5.0) -> Reading:
    """Run the query once.

    Args:
        budget: the query.
        timeout_s: time limit from the lookup of the host to the end of the answer.

    Raises:
        SourceFailedError: no answer, or the answer is not from Prometheus.
        NoReadingError: the answer has no series.
        UnusableReadingError: the value is not a valid number of watts.
        StaleReadingError: the answer is too old.
        AmbiguousQueryError: the answer has several series.
        UnsuitableQueryError: Prometheus rejects the query, or it returns neither a series nor a scalar.
    """
    try:
        async with asyncio.timeout(timeout_s):
            answer = await _get(budget, timeout_s)
    except TimeoutError:
        raise SourceFailedError(f"{budget.url} did not answer within {timeout_s:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise SourceFailedError(f"{budget.url} cannot be reached: {_reason(error)}") from None
    return reading_of(answer, budget, datetime.now(timezone.utc))


def reading_of(answer: bytes, budget: PrometheusBudget, received_at: datetime) -> Reading:
    """The reading in an answer of `/api/v1/query`.

    Args:
        answer: the body, JSON.
        budget: the query.
        received_at: when it was received, with an offset.

    Raises:
        SourceFailedError: it is not from Prometheus, or Prometheus could not evaluate the query.
        NoReadingError: it has no series.
        UnusableReadingError: the value is not a valid number of watts.
        StaleReadingError: it is too old.
        AmbiguousQueryError: it has several series.
        UnsuitableQueryError: Prometheus rejects the query, or it returns neither a series nor a scalar.
    """
    try:
        parsed = json.loads(answer)
        if parsed["status"] != "success":
            raise _refusal(parsed, budget)
        kind, result = parsed["data"]["resultType"], parsed["data"]["result"]
        if kind not in ("vector", "scalar"):
            raise UnsuitableQueryError(
                f"{budget.query!r} returns a {kind}: write a query that returns one series, or a scalar"
            )
        evaluated_s, text = result if kind == "scalar" else _only(result, budget)["value"]
        evaluated_at = datetime.fromtimestamp(float(evaluated_s), timezone.utc)
        watts = float(text)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError):
        raise SourceFailedError(f"{budget.url} did not answer like a Prometheus server: {_excerpt(answer)}") from None
    if not (math.isfinite(watts) and watts >= 0):
        advice = "; if negative values are expected, write clamp_min(..., 0)" if watts < 0 else ""
        raise UnusableReadingError(f"{budget.query!r} returns {text}: watts must be finite and not negative{advice}")
    # A server's clock that is ahead must not keep an answer in force longer.
    measured_at = min(evaluated_at, received_at) - timedelta(seconds=budget.lookback_s)
    if (age_s := (received_at - evaluated_at).total_seconds()) > budget.rule.max_age_s - budget.lookback_s:
        raise StaleReadingError(
            f"the answer of {budget.url} is {age_s:.0f} s old: compare its clock with this machine's"
        )
    return Reading(watts, measured_at)


async def _get(budget: PrometheusBudget, timeout_s: float) -> bytes:
    """The body of an answer, or of an error that Prometheus reports.

    Raises:
        SourceFailedError: something on the way to Prometheus reports an error.
        UnusableReadingError: the answer is too large.
        httpx.HTTPError: there is no answer.
    """
    parameters = {
        "query": budget.query,
        "timeout": f"{timeout_s:g}s",
        "lookback_delta": f"{budget.lookback_s:.3f}",
    }
    url = f"{budget.url.rstrip('/')}/api/v1/query"
    # No compression, so that the size of an answer is bounded while it is read. `fetch` bounds the time.
    client = httpx.AsyncClient(
        verify=_tls_context(), timeout=None, follow_redirects=True, headers={"Accept-Encoding": "identity"}
    )
    async with client, client.stream("GET", url, params=parameters) as response:
        body = b""
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > _MAX_ANSWER_BYTES:
                raise UnusableReadingError(f"{budget.query!r} returns more than 1 MiB: does it select many series?")
    # Prometheus explains its own errors in JSON.
    if response.is_error and "json" not in response.headers.get("Content-Type", ""):
        raise SourceFailedError(f"{budget.url} answered HTTP {response.status_code}: {_excerpt(body)}")
    return body


@cache
def _tls_context() -> ssl.SSLContext:
    """The system's trusted certificates, which take some milliseconds to load."""
    return ssl.create_default_context()


def _reason(error: BaseException) -> str:
    """The message of the first error in a chain: the later ones only say that the connection failed."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    if of_each_address := getattr(error, "exceptions", ()):  # of an ExceptionGroup, which Python 3.10 lacks
        return _reason(of_each_address[0])
    if isinstance(error, OSError) and error.errno and not isinstance(error, (socket.gaierror, ssl.SSLError)):
        return os.strerror(error.errno)
    return str(error)


def _only(result: list[dict[str, Any]], budget: PrometheusBudget) -> dict[str, Any]:
    """The one series of an answer."""
    if not result:
        raise NoReadingError(
            f"{budget.query!r} returns no series with a sample in the last {budget.lookback_s:g} s at {budget.url}"
        )
    if len(result) > 1:
        named = ", ".join(_series(one["metric"]) for one in result[:_NAMED_SERIES])
        more = f" and {len(result) - _NAMED_SERIES} more" if len(result) > _NAMED_SERIES else ""
        raise AmbiguousQueryError(
            f"{budget.query!r} returns {len(result)} series, {named}{more}: select one, or write sum(...)"
        )
    return result[0]


def _series(labels: dict[str, str]) -> str:
    name = labels.get("__name__", "")
    return name + "{" + ",".join(f'{key}="{value}"' for key, value in labels.items() if key != "__name__") + "}"


def _refusal(parsed: dict[str, Any], budget: PrometheusBudget) -> SourceFailedError | UnsuitableQueryError:
    """The error that Prometheus reports; bad data stays an error until the query is changed."""
    message = str(parsed["error"])[:200]
    if parsed["errorType"] == "bad_data":
        return UnsuitableQueryError(f"{budget.url} rejects {budget.query!r}: {message}")
    return SourceFailedError(f"{budget.url} cannot evaluate {budget.query!r}: {message}")


def _excerpt(body: bytes) -> str:
    return repr(body[:80].decode("utf-8", "replace")) if body else "nothing"


def _require_server(url: str) -> None:
    """Make sure that a URL is that of a server.

    Raises:
        InvalidInputError: it is not.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and not (parts.username or parts.query)
        good = (
            good
            and not parts.fragment
            and (parts.port is None or parts.port > 0)
            and url.isascii()
            and url.isprintable()
        )
    except ValueError:
        good = False
    if not good:
        # Do not repeat the URL: it may contain a password.
        raise InvalidInputError(
            "the url must be that of a Prometheus server, such as http://127.0.0.1:9090, without user and query"
        )
