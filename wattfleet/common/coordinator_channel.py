"""Checks whether a coordinator answers, and defines the errors if it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from wattfleet.core.errors import WattfleetError

UNREACHABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
"""Statuses of a call that may not have reached a coordinator.

A coordinator without a ready device also answers with the first one; `answers` distinguishes the two cases.
"""


class CoordinatorUnreachableError(WattfleetError):
    """No coordinator answers at an address."""


def answers(method: Callable[..., Any], request: Any, timeout_s: float, wait_for_ready: bool = False) -> bool:
    """Return whether a coordinator answers, even if with an error.

    Args:
        method: a stub's method that does not need a ready device.
        request: the method's request.
        timeout_s: how long to wait for the answer, seconds.
        wait_for_ready: whether to wait for a coordinator that is starting.
    """
    try:
        method(request, timeout=timeout_s, wait_for_ready=wait_for_ready)
    except grpc.RpcError as error:
        status: Any = error
        return status.code() not in UNREACHABLE
    return True
