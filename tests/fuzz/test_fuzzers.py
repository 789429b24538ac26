"""The fuzzers' own parts: campaigns, messages and remote calls."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tests.fakes.coordinator_in_process import on_loop
from tests.fuzz import campaign as campaigns
from tests.fuzz import remote_calls
from tests.fuzz import test_fuzz_agent as agents
from tests.fuzz.campaign import FIRST_SEED, Campaign
from tests.fuzz.coordinator_requests import known_values, valid_calls
from tests.fuzz.hostile_input import Hostile, HostileMessages, Known, fits
from tests.fuzz.remote_calls import HostileCall, Method
from wattfleet.core.prediction import Artefact

# --- Test campaign ----------------------------------------------------------------------------------------------------
# A campaign counts its inputs, and fails if they are too few.


def inputs_of(monkeypatch: pytest.MonkeyPatch, each_takes_s: float, at_least: int = 1) -> Campaign:
    """A campaign of 20 s in virtual time, whose inputs take this long."""
    now_s = [100.0]
    monkeypatch.setattr(campaigns, "FUZZ_S", 20.0)
    monkeypatch.setattr(campaigns, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    campaign = Campaign()
    for _ in campaign.inputs(at_least):
        now_s[0] += each_takes_s
    return campaign


def test_inputs_are_made_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    campaign = inputs_of(monkeypatch, each_takes_s=0.5)
    assert (campaign.count, campaign.took_s, campaign.seed) == (40, 20.0, FIRST_SEED + 39)


def test_there_are_at_least_as_many_inputs_as_required(monkeypatch: pytest.MonkeyPatch) -> None:
    assert inputs_of(monkeypatch, each_takes_s=1.0, at_least=25).count == 25


def test_too_few_inputs_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="only 5 inputs in 20 s"):
        inputs_of(monkeypatch, each_takes_s=4.0)


# --- Test hostile messages --------------------------------------------------------------------------------------------
# The fuzzers' own messages: they can be made from every seed, and use the values that they are given.

SEEDS = 25

Requests = Mapping[str, Sequence[Sequence[Message]]]


@pytest.fixture(params=["coordinator", "agent's socket", "duty service", "agent's session"])
def fuzzed(request: pytest.FixtureRequest, artefact: Artefact) -> tuple[Requests, Known]:
    """Valid messages of a target, and the values that it knows."""
    if request.param == "coordinator":
        return valid_calls(artefact), known_values(artefact)
    if request.param == "agent's socket":
        return {agents.TRAIN.path: agents.trainings("7/1")}, agents.known_values("7/1")
    if request.param == "duty service":
        return agents.VALID_DUTY_REQUESTS, {}
    return {"answers": [agents.SESSION_ANSWERS], "references": [agents.REFERENCE_ANSWERS]}, (agents.KNOWN)


def test_a_message_can_be_made_from_every_seed(fuzzed: tuple[Requests, Known]) -> None:
    requests, known = fuzzed
    for calls in requests.values():
        every = [message for messages in calls for message in messages]
        for seed in range(SEEDS):
            made = HostileMessages(Hostile(seed), known)
            made.serialized(every[0].DESCRIPTOR, every)
            made.random(every[0].DESCRIPTOR)


def test_every_known_value_fits_a_field_of_its_name(fuzzed: tuple[Requests, Known]) -> None:
    requests, known = fuzzed
    fields = [field for calls in requests.values() for field in _fields_of(calls[0][0].DESCRIPTOR, set())]
    unused = {
        (name, value)
        for name, values in known.items()
        for value in values
        if not any(field.name == name and fits(field, value) for field in fields)
    }
    assert not unused


def _fields_of(kind: object, seen: set[str]) -> Iterator[FieldDescriptor]:
    """The fields of a message and of all messages in it."""
    seen.add(kind.full_name)  # type: ignore[attr-defined]  # the stubs differ between kinds of descriptors
    for field in kind.fields:  # type: ignore[attr-defined]
        yield field
        if field.message_type is not None and field.message_type.full_name not in seen:
            yield from _fields_of(field.message_type, seen)


# --- Test remote calls ------------------------------------------------------------------------------------------------
# The fuzzers' own calls: they end with the status of the service, and leave nothing behind on their connection.

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
    others = [status for number, status in enumerate(found) if number % 3]
    assert set(others) <= {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE}
    assert others.count(grpc.StatusCode.INVALID_ARGUMENT) > 50


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
