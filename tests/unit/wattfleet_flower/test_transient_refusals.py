"""Which errors of a coordinator end a run, and after which ones the same request is repeated."""

from __future__ import annotations

import grpc
import pytest

from wattfleet_flower.server.errors import RefusedError


@pytest.mark.parametrize("code", ["CANCELLED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"])
def test_a_coordinator_that_stops_or_is_busy_ends_no_run(code: str) -> None:
    assert RefusedError("away", grpc.StatusCode[code]).is_transient


@pytest.mark.parametrize("code", ["INVALID_ARGUMENT", "PERMISSION_DENIED", "UNKNOWN"])
def test_a_request_that_can_never_succeed_ends_the_run(code: str) -> None:
    assert not RefusedError("wrong", grpc.StatusCode[code]).is_transient
