"""Whether a coordinator answers, and the errors of one that does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from wattfleet.errors import WattfleetError

UNREACHABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
"""Statuses of a call that may have reached no coordinator. A coordinator without a ready device answers with the first
one, too; `answers` tells the two apart."""


class CoordinatorUnreachableError(WattfleetError):
    """No coordinator answers at an address."""


def answers(method: Callable[..., Any], request: Any, timeout_s: float, wait_for_ready: bool = False) -> bool:
    """Check whether a coordinator answers, be it with an error.

    Args:
        method: a stub's method that needs no ready device.
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
