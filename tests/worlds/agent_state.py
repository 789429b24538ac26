"""The state of an agent in a world: grants without an event loop, and unsent reports in memory."""

from __future__ import annotations

from collections.abc import Coroutine
from copy import deepcopy
from typing import Any

from edge_agent.session.grants import Grants, HeldGrant
from wattfleet_proto.v1 import session_pb2


class MemoryFile:
    """Keeps an outbox's reports across restarts of the agent, as its file does."""

    def __init__(self) -> None:
        self._kept: list[session_pb2.SessionRequest] = []

    def load(self) -> list[session_pb2.SessionRequest]:
        return deepcopy(self._kept)

    def store(self, requests: list[session_pb2.SessionRequest]) -> None:
        self._kept = [deepcopy(each) for each in requests if each.HasField("observation")]


class OpenGrants(Grants):
    """The agent's grants with their state machine exposed, since a world has no event loop to wait in."""

    @property
    def held(self) -> HeldGrant:
        return self._held


def at_once(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("a coroutine waits, although nothing contends with it")
