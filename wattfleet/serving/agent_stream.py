"""A stream to the device's agent that reconnects by itself; without an agent, nothing waits for one."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import grpc

from wattfleet.common.console import plain_text
from wattfleet.core.errors import InvalidInputError, WattfleetError

_log = logging.getLogger(__name__)


# --- Errors -----------------------------------------------------------------------------------------------------------
# The errors that a request may get instead of an answer, in addition to the model's own errors.


class RequestRefusedError(InvalidInputError):
    """The request's shape differs from that of earlier ones, or too many requests are already waiting."""


class ServerClosedError(WattfleetError):
    """The server was closed before the request was answered."""


# --- Agent stream -----------------------------------------------------------------------------------------------------

Request = TypeVar("Request")


_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.2, 5.0


class AgentStream(Generic[Request]):
    """A stream to the agent in a background thread; close it at the end.

    Args:
        socket: path of the agent's unix socket.
        open_stream: opens a stream of requests on a channel, and returns the responses.
        greeting: the first messages of every stream.
        receive: called with every response, in the background thread.
        lost: called in the background thread when a stream has ended.
        without: what happens without an agent, for the log.
    """

    def __init__(
        self,
        socket: str,
        open_stream: Callable[[grpc.Channel, Iterator[Request]], Iterable[Any]],
        greeting: Callable[[], list[Request]],
        receive: Callable[[Any], None],
        lost: Callable[[], None],
        without: str,
    ) -> None:
        self._socket = socket
        self._open_stream = open_stream
        self._greeting = greeting
        self._receive = receive
        self._lost = lost
        self._without = without
        self._lock = threading.Lock()
        self._requests: SimpleQueue[Request | None] | None = None
        self._closed = threading.Event()
        self._has_warned = False
        self._channel: grpc.Channel | None = None
        self._begin()
        self._thread = threading.Thread(target=self._run, name="stream to the agent", daemon=True)
        self._thread.start()

    def send(self, request: Request) -> bool:
        """Send a message; while there is no stream, do nothing and return False."""
        with self._lock:
            if self._requests is None:
                return False
            self._requests.put(request)
            return True

    @property
    def is_open(self) -> bool:
        """Whether there is a stream, or the first one is being opened."""
        return self._requests is not None

    def reopen(self) -> None:
        """End the current stream, whose agent does not answer, and open another one."""
        self._end()
        channel = self._channel
        if channel is not None:
            channel.close()

    def close(self) -> None:
        """End the stream permanently."""
        self._closed.set()
        self._end()
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)

    def _begin(self) -> SimpleQueue[Request | None]:
        requests: SimpleQueue[Request | None] = SimpleQueue()
        for message in self._greeting():
            requests.put(message)
        with self._lock:
            self._requests = requests
        return requests

    def _end(self) -> None:
        with self._lock:
            requests, self._requests = self._requests, None
        if requests is not None:
            requests.put(None)

    def _run(self) -> None:
        pause_s, requests = _FIRST_PAUSE_S, self._requests
        while not self._closed.is_set():
            if requests is None:
                requests = self._begin()
            has_answered = self._serve(requests)
            self._end()
            requests = None
            self._lost()
            pause_s = _FIRST_PAUSE_S if has_answered else min(_MAX_PAUSE_S, 2 * pause_s)
            self._closed.wait(random.uniform(pause_s / 2, pause_s))

    def _serve(self, requests: SimpleQueue[Request | None]) -> bool:
        """Serve one stream until it ends, and return whether the agent has answered."""
        has_answered = False
        with grpc.insecure_channel(f"unix:{self._socket}") as channel:
            self._channel = channel
            try:
                for response in self._open_stream(channel, iter(requests.get, None)):
                    if not has_answered and self._has_warned:
                        _log.info("the agent at %s can be reached again", self._socket)
                        self._has_warned = False
                    has_answered = True
                    self._receive(response)
                problem = "it ended the stream"
            except grpc.RpcError as error:
                problem = "it cannot be reached"
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    problem = f"{error.code().name}: {plain_text(error.details() or '')}"
            finally:
                self._channel = None
                requests.put(None)
        if not self._closed.is_set() and not self._has_warned:
            self._has_warned = True
            _log.warning("no agent at %s (%s): %s", self._socket, problem, self._without)
        return has_answered
