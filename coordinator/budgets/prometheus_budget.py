"""Budgets that a Prometheus query measures: a battery, the sun, a meter."""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

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

TIMEOUT_S = 5.0
"""Seconds that one query may take, from its connection to the end of its answer."""
_MAX_ANSWER_BYTES = 1024 * 1024
_NAMED_SERIES = 3


@dataclass(frozen=True)
class PrometheusBudget:
    """Watts that a query measures, and what is in force without them.

    Attributes:
        url: of the server, without `/api/v1/query`.
        query: PromQL that answers one series, or a scalar, in watts.
        every_s: seconds between two queries.
        rule: how long an answer is in force, and the fallback.

    Raises:
        InvalidInputError: the URL is not one of a server, there is no query, or it is asked so rarely that each answer
            would be stale before the next.
    """

    url: str
    query: str
    every_s: float
    rule: ReadingRule

    def __post_init__(self) -> None:
        _require_server(self.url)
        if not self.query.strip():
            raise InvalidInputError("a budget's query is empty: write PromQL that answers watts")
        if not 1 <= self.every_s <= self.rule.max_age_s / 3:
            raise InvalidInputError(
                f"every_s must be from 1 s to a third of max_age_s ({self.rule.max_age_s / 3:g} s), not"
                f" {self.every_s:g} s: else answers are stale before the next comes"
            )

    @property
    def lookback_s(self) -> float:
        """How old the samples may be that Prometheus answers from.

        The answer says when the query was evaluated, not when its samples were taken. Half of the age that a reading
        may have is therefore Prometheus', to look back, and the other half is left to keep the answer.
        """
        return self.rule.max_age_s / 2


async def fetch(budget: PrometheusBudget) -> Reading:
    """Ask Prometheus once; it answers or fails within about `TIMEOUT_S`.

    Raises:
        SourceFailedError: no answer, or none that is Prometheus'.
        NoReadingError: the answer has no series.
        UnusableReadingError: the value is no watts.
        StaleReadingError: the answer is too old.
        AmbiguousQueryError: the answer has many series.
        UnsuitableQueryError: Prometheus refuses the query, or it answers neither series nor a scalar.
    """
    try:
        # Beside the timeout inside, which the look-up of the host's name does not know.
        answer = await asyncio.wait_for(asyncio.to_thread(_get, budget), TIMEOUT_S + 1)
    except asyncio.TimeoutError:
        raise _unanswered(budget) from None
    return reading_of(answer, budget, datetime.now(timezone.utc))


def reading_of(answer: bytes, budget: PrometheusBudget, received_at: datetime) -> Reading:
    """The reading in an answer of `/api/v1/query`.

    Args:
        answer: the body, JSON.
        budget: what was asked.
        received_at: when it came, with an offset.

    Raises:
        SourceFailedError: it is not Prometheus', or Prometheus could not evaluate the query.
        NoReadingError: it has no series.
        UnusableReadingError: the value is no watts.
        StaleReadingError: it is too old.
        AmbiguousQueryError: it has many series.
        UnsuitableQueryError: Prometheus refuses the query, or it answers neither series nor a scalar.
    """
    try:
        parsed = json.loads(answer)
        if parsed["status"] != "success":
            raise _refusal(parsed, budget)
        kind, result = parsed["data"]["resultType"], parsed["data"]["result"]
        if kind not in ("vector", "scalar"):
            raise UnsuitableQueryError(
                f"{budget.query!r} answers a {kind}: write a query that answers one series, or a scalar"
            )
        evaluated_s, text = result if kind == "scalar" else _only(result, budget)["value"]
        evaluated_at = datetime.fromtimestamp(float(evaluated_s), timezone.utc)
        watts = float(text)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError):
        raise SourceFailedError(f"{budget.url} does not answer as Prometheus does: {_excerpt(answer)}") from None
    if not (math.isfinite(watts) and watts >= 0):
        advice = "; where that is meant, write clamp_min(..., 0)" if watts < 0 else ""
        raise UnusableReadingError(f"{budget.query!r} answers {text}: watts are finite and not negative{advice}")
    # A server's clock that is ahead must not keep an answer in force longer: it was evaluated before it came.
    measured_at = min(evaluated_at, received_at) - timedelta(seconds=budget.lookback_s)
    if (age_s := (received_at - evaluated_at).total_seconds()) > budget.rule.max_age_s - budget.lookback_s:
        raise StaleReadingError(f"{budget.url} answers for {age_s:.0f} s ago: do its clock and this machine's agree?")
    return Reading(watts, measured_at)


def _get(budget: PrometheusBudget) -> bytes:
    """The body of an answer, also of one that is an error of Prometheus' own."""
    parameters = {
        "query": budget.query,
        "timeout": f"{TIMEOUT_S:g}s",
        "lookback_delta": f"{budget.lookback_s:.3f}",
    }
    url = f"{budget.url.rstrip('/')}/api/v1/query?{urllib.parse.urlencode(parameters)}"
    deadline_s = time.monotonic() + TIMEOUT_S
    try:
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
                return _body(response, budget, deadline_s)
        except urllib.error.HTTPError as error:
            with error:
                body = _body(error, budget, deadline_s)
            # What Prometheus refuses it explains in JSON; other errors are of something on the way to it.
            if "json" in error.headers.get("Content-Type", ""):
                return body
            raise SourceFailedError(f"{budget.url} answers HTTP {error.code}: {_excerpt(body)}") from None
    except TimeoutError:
        raise _unanswered(budget) from None
    except (OSError, http.client.HTTPException) as error:
        # While it connects, urllib wraps what went wrong.
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(cause, TimeoutError):
            raise _unanswered(budget) from None
        raise SourceFailedError(f"{budget.url} cannot be reached: {cause}") from None


def _body(response: Any, budget: PrometheusBudget, deadline_s: float) -> bytes:
    """Read a body within the time and the size that an answer may have."""
    body = b""
    # One receive at a time: the socket's own timeout starts anew with each byte that comes.
    while chunk := response.read1(64 * 1024):
        body += chunk
        if len(body) > _MAX_ANSWER_BYTES:
            raise UnusableReadingError(f"{budget.query!r} answers more than 1 MiB: does it select many series?")
        if time.monotonic() > deadline_s:
            raise _unanswered(budget)
    return body


def _only(result: list[dict[str, Any]], budget: PrometheusBudget) -> dict[str, Any]:
    """The one series of an answer."""
    if not result:
        raise NoReadingError(
            f"{budget.query!r} answers no series with a sample in the last {budget.lookback_s:g} s at {budget.url}"
        )
    if len(result) > 1:
        named = ", ".join(_series(one["metric"]) for one in result[:_NAMED_SERIES])
        more = f" and {len(result) - _NAMED_SERIES} more" if len(result) > _NAMED_SERIES else ""
        raise AmbiguousQueryError(
            f"{budget.query!r} answers {len(result)} series, {named}{more}: select one, or write sum(...)"
        )
    return result[0]


def _series(labels: dict[str, str]) -> str:
    name = labels.get("__name__", "")
    return name + "{" + ",".join(f'{key}="{value}"' for key, value in labels.items() if key != "__name__") + "}"


def _refusal(parsed: dict[str, Any], budget: PrometheusBudget) -> SourceFailedError | UnsuitableQueryError:
    """The error for an answer that is an error of Prometheus'; one of bad data stays until the query is changed."""
    said = str(parsed["error"])[:200]
    if parsed["errorType"] == "bad_data":
        return UnsuitableQueryError(f"{budget.url} refuses {budget.query!r}: {said}")
    return SourceFailedError(f"{budget.url} cannot evaluate {budget.query!r}: {said}")


def _unanswered(budget: PrometheusBudget) -> SourceFailedError:
    return SourceFailedError(f"{budget.url} does not answer within {TIMEOUT_S:g} s")


def _excerpt(body: bytes) -> str:
    return repr(body[:80].decode("utf-8", "replace")) if body else "nothing"


def _require_server(url: str) -> None:
    """Make sure that a URL is one of a server.

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
        # Not repeated here: it may hold a password.
        raise InvalidInputError(
            "the url is none of a Prometheus server: write it as http://127.0.0.1:9090, without user or query"
        )
