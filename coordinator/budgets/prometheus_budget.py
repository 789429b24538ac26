"""Budgets from Prometheus queries, for example of a battery, solar panels or a meter."""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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
from wattfleet.common.parsing import utc_from
from wattfleet.common.tasks import with_timeout
from wattfleet.core.budgets import Reading, ReadingRule
from wattfleet.core.errors import InvalidInputError

# --- Bounded HTTP -----------------------------------------------------------------------------------------------------
# HTTP requests to a budget's source that cannot hold up the coordinator, whatever the source or the resolver does.
#
# A request has one deadline from the lookup of the name to the end of the answer. It follows no redirect, reads a
# limited number of bytes, and uses no thread of the event loop's executor, in which rounds are planned.


_LONGEST_REASON = 200


class QueryFailedError(Exception):
    """A request was not answered; the text says why."""


class OversizedAnswerError(Exception):
    """An answer exceeds the limit on its size."""


@dataclass(frozen=True)
class Answer:
    """An answer to a request.

    Attributes:
        status: HTTP status.
        content_type: the header of that name; empty if there is none.
        body: the content.
    """

    status: int
    content_type: str
    body: bytes

    @property
    def is_error(self) -> bool:
        """Whether it is not a success."""
        return not 200 <= self.status < 300

    @property
    def is_redirect(self) -> bool:
        """Whether it leads to another address."""
        return 300 <= self.status < 400


class NameLookups:
    """Looks up the addresses of hosts, each host in a thread of its own and by one thread at a time.

    A lookup cannot be cancelled, and a resolver may take minutes. The threads are daemons: the process does not wait
    for them when it ends.
    """

    def __init__(self) -> None:
        self._running: dict[str, asyncio.Future[list[str]]] = {}

    async def addresses(self, host: str) -> list[str]:
        """The IP addresses of a host.

        Raises:
            OSError: the name cannot be resolved.
        """
        running = self._running.get(host)
        if running is None:
            running = self._running[host] = asyncio.get_running_loop().create_future()
            running.add_done_callback(lambda done: self._ended(host, done))
            threading.Thread(target=_look_up, args=(host, running), name=f"look up {host}", daemon=True).start()
        return await asyncio.shield(running)

    def _ended(self, host: str, done: asyncio.Future[list[str]]) -> None:
        del self._running[host]
        if not done.cancelled():
            done.exception()  # whoever asked may have given up


def _look_up(host: str, future: asyncio.Future[list[str]]) -> None:
    """The work of a lookup's thread."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        addresses, error = list(dict.fromkeys(str(address[0]) for *_, address in found)), None
    except (OSError, UnicodeError) as caught:
        addresses, error = [], caught

    def finish() -> None:
        if not future.done():
            if error is None:
                future.set_result(addresses)
            else:
                future.set_exception(error)

    with suppress(RuntimeError):  # the event loop has been closed
        future.get_loop().call_soon_threadsafe(finish)


async def get(url: str, parameters: Mapping[str, str], deadline_s: float, max_bytes: int, names: NameLookups) -> Answer:
    """Request a URL with GET.

    Args:
        url: without a query.
        parameters: the query.
        deadline_s: time limit from the lookup of the host to the end of the answer.
        max_bytes: limit on the answer's content.
        names: looks up the host.

    Raises:
        QueryFailedError: there is no answer.
        OversizedAnswerError: the answer exceeds the limit.
    """
    try:
        return await with_timeout(deadline_s, _get(httpx.URL(url), parameters, deadline_s, max_bytes, names))
    except asyncio.TimeoutError:
        raise QueryFailedError(f"did not answer within {deadline_s:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
        raise QueryFailedError(f"cannot be reached: {_reason(error)[:_LONGEST_REASON]}") from None


async def _get(
    url: httpx.URL, parameters: Mapping[str, str], deadline_s: float, max_bytes: int, names: NameLookups
) -> Answer:
    addresses = await names.addresses(url.host)
    for address in addresses[:-1]:
        # An address that does not answer leaves time for the others.
        with suppress(httpx.ConnectError, httpx.ConnectTimeout, httpx.InvalidURL):
            return await _get_from(address, url, parameters, deadline_s / len(addresses), max_bytes)
    return await _get_from(addresses[-1], url, parameters, None, max_bytes)


async def _get_from(
    address: str, url: httpx.URL, parameters: Mapping[str, str], connect_s: float | None, max_bytes: int
) -> Answer:
    """Request a URL from one address of its host."""
    # No compression, so that the size of an answer is bounded while it is read.
    headers = {"Accept-Encoding": "identity", "Host": url.netloc.decode("ascii")}
    # No proxy of the environment: it would look up the name itself.
    client = httpx.AsyncClient(
        verify=_tls_context(), timeout=httpx.Timeout(None, connect=connect_s), trust_env=False, headers=headers
    )
    at_address = url.copy_with(host=address)
    named = {"sni_hostname": url.host}  # the certificate has to be the host's
    async with client, client.stream("GET", at_address, params=parameters, extensions=named) as response:
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > max_bytes:
                raise OversizedAnswerError
        return Answer(response.status_code, response.headers.get("Content-Type", ""), bytes(body))


@cache
def _tls_context() -> ssl.SSLContext:
    """The system's trusted certificates, which take some milliseconds to load."""
    return ssl.create_default_context()


def _reason(error: BaseException) -> str:
    """The message of the first error in a chain: the later ones only say that the connection failed."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    of_each_address: Sequence[BaseException] = getattr(error, "exceptions", ())
    if of_each_address:  # of an ExceptionGroup, which Python 3.10 lacks
        return _reason(of_each_address[0])
    if isinstance(error, OSError) and error.errno and not isinstance(error, (socket.gaierror, ssl.SSLError)):
        return os.strerror(error.errno)
    return str(error)


# --- Prometheus budget ------------------------------------------------------------------------------------------------

_MAX_ANSWER_BYTES = 1024 * 1024
_NAMED_SERIES = 3
_LONGEST_TEXT = 200
"""Characters of a source's own text that a message repeats."""


@dataclass(frozen=True)
class PrometheusNumber:
    """A number that a query measures, such as the charge of a battery.

    Attributes:
        url: URL of the server, without `/api/v1/query`.
        query: PromQL that returns one series, or a scalar.
        every_s: seconds between two queries.
        max_age_s: age in seconds after which an answer is stale.
        unit: of the answer.
        at_most: the largest answer.

    Raises:
        InvalidInputError: the URL is not one of a server, the query is empty, or it runs so rarely that each answer is
            stale before the next one.
    """

    url: str
    query: str
    every_s: float
    max_age_s: float
    unit: str
    at_most: float = math.inf

    def __post_init__(self) -> None:
        _require_server(self.url)
        if not self.query.strip():
            raise InvalidInputError(f"a query is empty: write PromQL that returns {self.unit}")
        if not 1 <= self.every_s <= self.max_age_s / 3:
            raise InvalidInputError(
                f"every_s must be from 1 s to a third of max_age_s ({self.max_age_s / 3:g} s), not"
                f" {self.every_s:g} s: otherwise an answer is stale before the next one"
            )

    @property
    def lookback_s(self) -> float:
        """The largest age in seconds of the samples that Prometheus answers from.

        An answer has the time of the query's evaluation, not of its samples. Half of a reading's largest age is
        therefore left to Prometheus for looking back, and the other half for keeping the answer.
        """
        return self.max_age_s / 2


@dataclass(frozen=True)
class PrometheusBudget:
    """A budget that a query measures, with its fallback.

    Attributes:
        url: URL of the server, without `/api/v1/query`.
        query: PromQL that returns one series, or a scalar, in watts.
        every_s: seconds between two queries.
        rule: how long an answer stays in force, and the fallback.
        number: the watts that the query measures.

    Raises:
        InvalidInputError: as of a `PrometheusNumber`.
    """

    url: str
    query: str
    every_s: float
    rule: ReadingRule
    number: PrometheusNumber = field(init=False, repr=False)

    def __post_init__(self) -> None:
        number = PrometheusNumber(self.url, self.query, self.every_s, self.rule.max_age_s, "watts")
        object.__setattr__(self, "number", number)


async def fetch(budget: PrometheusBudget, timeout_s: float = 5.0, names: NameLookups | None = None) -> Reading:
    """Run a budget's query once; arguments and errors as of `fetch_number`."""
    return Reading(*await fetch_number(budget.number, timeout_s, names))


async def fetch_number(
    query: PrometheusNumber, timeout_s: float = 5.0, names: NameLookups | None = None
) -> tuple[float, datetime]:
    """Run a query once; returns its number, and the earliest possible time of its measurement.

    Args:
        query: the query.
        timeout_s: time limit from the lookup of the host to the end of the answer.
        names: looks up the host; pass the same to all calls, so that a lookup that hangs is not repeated.

    Raises:
        SourceFailedError: no answer, or the answer is not from Prometheus.
        NoReadingError: the answer has no series.
        UnusableReadingError: the value is not a valid number.
        StaleReadingError: the answer is too old.
        AmbiguousQueryError: the answer has several series.
        UnsuitableQueryError: Prometheus rejects the query, or it returns neither a series nor a scalar.
    """
    parameters = {
        "query": query.query,
        "timeout": f"{timeout_s:g}s",
        "lookback_delta": f"{query.lookback_s:.3f}",
    }
    url = f"{query.url.rstrip('/')}/api/v1/query"
    try:
        answer = await get(url, parameters, timeout_s, _MAX_ANSWER_BYTES, names or NameLookups())
    except QueryFailedError as error:
        raise SourceFailedError(f"{query.url} {error}") from None
    except OversizedAnswerError:
        raise UnusableReadingError(f"{query.query!r} returns more than 1 MiB: does it select many series?") from None
    if answer.is_redirect:
        raise SourceFailedError(
            f"{query.url} answered HTTP {answer.status}, a redirect, which is not followed: use the address that it"
            " leads to"
        )
    # Prometheus explains its own errors in JSON.
    if answer.is_error and "json" not in answer.content_type:
        raise SourceFailedError(f"{query.url} answered HTTP {answer.status}: {_excerpt(answer.body)}")
    return number_of(answer.body, query, datetime.now(timezone.utc))


def reading_of(answer: bytes, budget: PrometheusBudget, received_at: datetime) -> Reading:
    """The reading in an answer of `/api/v1/query`; arguments and errors as of `number_of`."""
    return Reading(*number_of(answer, budget.number, received_at))


def number_of(answer: bytes, query: PrometheusNumber, received_at: datetime) -> tuple[float, datetime]:
    """The number in an answer of `/api/v1/query`, and the earliest possible time of its measurement.

    Args:
        answer: the body, JSON.
        query: the query.
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
            raise _refusal(parsed, query)
        kind, result = parsed["data"]["resultType"], parsed["data"]["result"]
        if kind not in ("vector", "scalar"):
            raise UnsuitableQueryError(
                f"{query.query!r} returns a {_shortened(kind)}: write a query that returns one series, or a scalar"
            )
        evaluated_s, text = result if kind == "scalar" else _only(result, query)["value"]
        evaluated_at = utc_from(float(evaluated_s))
        number = float(text)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError):
        raise SourceFailedError(f"{query.url} did not answer like a Prometheus server: {_excerpt(answer)}") from None
    if not (math.isfinite(number) and 0 <= number <= query.at_most):
        advice = "; if negative values are expected, write clamp_min(..., 0)" if number < 0 else ""
        most = f" and at most {query.at_most:g}" if number > query.at_most else ""
        raise UnusableReadingError(
            f"{query.query!r} returns {_shortened(text)}: {query.unit} must be finite and not negative{most}{advice}"
        )
    if (age_s := (received_at - evaluated_at).total_seconds()) > query.max_age_s - query.lookback_s:
        raise StaleReadingError(
            f"the answer of {query.url} is {age_s:.0f} s old: compare its clock with this machine's"
        )
    # A server's clock that is ahead must not keep an answer in force longer.
    return number, min(evaluated_at, received_at) - timedelta(seconds=query.lookback_s)


def _only(result: list[dict[str, Any]], query: PrometheusNumber) -> dict[str, Any]:
    """The one series of an answer."""
    if not result:
        raise NoReadingError(
            f"{query.query!r} returns no series with a sample in the last {query.lookback_s:g} s at {query.url}"
        )
    if len(result) > 1:
        named = ", ".join(_shortened(_series(one["metric"])) for one in result[:_NAMED_SERIES])
        more = f" and {len(result) - _NAMED_SERIES} more" if len(result) > _NAMED_SERIES else ""
        raise AmbiguousQueryError(
            f"{query.query!r} returns {len(result)} series, {named}{more}: select one, or write sum(...)"
        )
    return result[0]


def _series(labels: dict[str, str]) -> str:
    name = labels.get("__name__", "")
    return name + "{" + ",".join(f'{key}="{value}"' for key, value in labels.items() if key != "__name__") + "}"


def _refusal(parsed: dict[str, Any], query: PrometheusNumber) -> SourceFailedError | UnsuitableQueryError:
    """The error that Prometheus reports; bad data stays an error until the query is changed."""
    message = _shortened(parsed["error"])
    if parsed["errorType"] == "bad_data":
        return UnsuitableQueryError(f"{query.url} rejects {query.query!r}: {message}")
    return SourceFailedError(f"{query.url} cannot evaluate {query.query!r}: {message}")


def _shortened(value: object) -> str:
    """A source's own text for a message: without line breaks and control characters, and not too long."""
    text = str(value)
    plain = "".join(sign if sign.isprintable() else "?" for sign in text[:_LONGEST_TEXT])
    return plain + "..." if len(text) > _LONGEST_TEXT else plain


def _excerpt(body: bytes) -> str:
    return repr(body[:80].decode("utf-8", "replace")) if body else "nothing"


def _require_server(url: str) -> None:
    """Make sure that a URL is that of a server."""
    try:
        parts = urllib.parse.urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and not ("@" in parts.netloc or parts.query)
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
