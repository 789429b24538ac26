"""The fuzzers' own calls: they end with the status of the service, and leave nothing behind on their connection."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from tests.fakes.coordinator_in_process import on_loop
from tests.fuzz import remote_calls
from tests.fuzz.remote_calls import HostileCall, Method

METHOD = Method("/tests.Service/Stream", None, takes_stream=True)


@contextmanager
def service(stream: Any) -> Iterator[grpc.Channel]:
    """A channel to a service that has one method, and accepts one call at a time per connection."""
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.max_concurrent_streams", 1)])
    handlers = {"Stream": grpc.stream_stream_rpc_method_handler(stream)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("tests.Service", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    server.stop(None)


def refuse_early(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
    """Answer a few times, and refuse the rest of the messages."""
    next(requests)
    yield from (b"a", b"b", b"c")
    context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no")


def test_calls_that_a_service_ends_early_do_not_stop_later_ones() -> None:
    async def statuses(channel: grpc.Channel) -> AsyncIterator[grpc.StatusCode]:
        for number in range(150):
            yield await HostileCall(METHOD, [b"1"] * 8, goes_away=number % 3 == 0).ended_with(channel)

    async def every_status(channel: grpc.Channel) -> list[grpc.StatusCode]:
        return [status async for status in statuses(channel)]

    with service(refuse_early) as channel:
        found = on_loop(every_status(channel)).result()
    assert found[::3] == [grpc.StatusCode.CANCELLED] * 50
    # The server may not have noticed yet that the client has gone, and takes one call at a time.
    assert set(found[1::3]) <= {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE}
    assert found[2::3] == [grpc.StatusCode.INVALID_ARGUMENT] * 50


def test_a_service_that_does_not_answer_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_calls, "ANSWER_S", 0.1)

    def never_answer(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        gone = threading.Event()
        context.add_callback(gone.set)
        gone.wait()
        yield b"too late"

    with service(never_answer) as channel, pytest.raises(AssertionError, match="no answer within 0.1 s"):
        on_loop(HostileCall(METHOD, [b"1"], goes_away=False).ended_with(channel)).result()


def test_a_service_that_fails_is_a_failure() -> None:
    def fail(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        context.abort(grpc.StatusCode.UNKNOWN, "a traceback")
        return iter(())

    with service(fail) as channel, pytest.raises(AssertionError, match="UNKNOWN: a traceback"):
        on_loop(HostileCall(METHOD, [b"1"], goes_away=False).ended_with(channel)).result()
