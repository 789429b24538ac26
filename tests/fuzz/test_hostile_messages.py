"""The fuzzers' own messages: they can be made from every seed, and use the values that they are given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tests.fuzz import test_fuzz_agent_session as agent_session
from tests.fuzz import test_fuzz_agent_socket as agent_socket
from tests.fuzz import test_fuzz_duty_service as duty_service
from tests.fuzz.coordinator_requests import known_values, valid_calls
from tests.fuzz.hostile_messages import HostileMessages, Known, fits
from tests.fuzz.hostile_values import Hostile
from wattfleet.prediction import Artefact

SEEDS = 100

Requests = Mapping[str, Sequence[Sequence[Message]]]


@pytest.fixture(params=["coordinator", "agent's socket", "duty service", "agent's session"])
def fuzzed(request: pytest.FixtureRequest, artefact: Artefact) -> tuple[Requests, Known]:
    """Valid messages of a target, and the values that it knows."""
    if request.param == "coordinator":
        return valid_calls(artefact), known_values(artefact)
    if request.param == "agent's socket":
        return {agent_socket.METHOD.path: agent_socket.trainings("7/1")}, agent_socket.known_values("7/1")
    if request.param == "duty service":
        return duty_service.VALID, {}
    return {"answers": [agent_session.SESSION_ANSWERS], "references": [agent_session.REFERENCE_ANSWERS]}, (
        agent_session.KNOWN
    )


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
