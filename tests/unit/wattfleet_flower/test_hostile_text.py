"""Text from a coordinator or a node in Flower's log: always plain text, whatever was sent."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from flwr.app import Error

from wattfleet_flower.server.errors import RefusedError
from wattfleet_flower.server.planning_client import PlanningClient
from wattfleet_flower.server.replies import describe_error
from wattfleet_io.clock import VirtualClock

ESCAPES = "\x1b[2J\x1b]0;title\x07\x9b31m\u202e"


class HostileError(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.INVALID_ARGUMENT

    def details(self) -> str:
        return f"{ESCAPES}no\nsecond line"


class HostileStub:
    def PlanRound(self, *_: Any, **__: Any) -> Any:  # noqa: N802 - named by the protocol
        raise HostileError


def test_a_refusal_of_the_coordinator_is_plain_text() -> None:
    with pytest.raises(RefusedError) as refused:
        PlanningClient(HostileStub(), VirtualClock()).call("PlanRound", None)
    assert str(refused.value).endswith("no second line") and str(refused.value).isprintable()


@pytest.mark.parametrize("code", range(10))
def test_the_error_of_a_node_is_plain_text(code: int) -> None:
    assert describe_error(Error(code, f"Traceback\n{ESCAPES}ValueError: no")).isprintable()
