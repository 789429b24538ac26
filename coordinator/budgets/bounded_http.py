"""HTTP requests to a budget's source that cannot hold up the coordinator, whatever the source or the resolver does.

A request has one deadline from the lookup of the name to the end of the answer. It follows no redirect, reads a limited
number of bytes, and uses no thread of the event loop's executor, in which rounds are planned.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import httpx

from wattfleet_io.tasks import with_timeout

_LONGEST_REASON = 200


class RequestFailedError(Exception):
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
        RequestFailedError: there is no answer.
        OversizedAnswerError: the answer exceeds the limit.
    """
    try:
        return await with_timeout(deadline_s, _get(httpx.URL(url), parameters, deadline_s, max_bytes, names))
    except asyncio.TimeoutError:
        raise RequestFailedError(f"did not answer within {deadline_s:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
        raise RequestFailedError(f"cannot be reached: {_reason(error)[:_LONGEST_REASON]}") from None


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
