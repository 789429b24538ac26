"""A client of the coordinator's planning service, for Flower's server.

It tells an unreachable coordinator from one that refuses, and keeps reports until the coordinator takes them.
"""

from __future__ import annotations

from contextlib import suppress
from logging import WARNING
from typing import Any

import grpc
from flwr.common.logger import log

from wattfleet_flower.server.errors import CoordinatorUnreachableError, RefusedError
from wattfleet_io.console import plain_text
from wattfleet_io.coordinator_channel import UNREACHABLE, open_channel
from wattfleet_proto.message_sizes import MAX_MESSAGE_BYTES
from wattfleet_proto.v1 import planning_pb2, planning_pb2_grpc

_ANSWER_TIMEOUT_S = 30.0
# A coordinator that starts beside Flower gets the longer time. Later attempts must not delay rounds.
_CONNECT_TIMEOUT_S = 15.0
_RECONNECT_TIMEOUT_S = 2.0


class PlanningClient:
    """Calls the planning service; remembers whether it answers, and which reports are still to be sent."""

    def __init__(self, coordinator: str | Any) -> None:
        """Use one coordinator.

        Args:
            coordinator: its host:port, or a stub of its PlanningService.
        """
        self.name = coordinator if isinstance(coordinator, str) else "its stub"
        if isinstance(coordinator, str):
            coordinator = planning_pb2_grpc.PlanningServiceStub(open_channel(coordinator))
        self._stub = coordinator
        self._pending: list[tuple[str, Any]] = []
        self.is_unreachable = False

    def connect(self) -> None:
        """Make sure that the coordinator answers, and send pending reports.

        Raises:
            CoordinatorUnreachableError: it does not answer.
            RefusedError: another service answers.
        """
        timeout_s = _RECONNECT_TIMEOUT_S if self.is_unreachable else _CONNECT_TIMEOUT_S
        try:
            self._call("ResolveNodes", planning_pb2.ResolveNodesRequest(), timeout_s)
        except RefusedError as refused:
            if refused.code not in UNREACHABLE:
                raise
            self.is_unreachable = True
            raise CoordinatorUnreachableError(str(refused)) from None
        self.is_unreachable = False
        with suppress(RefusedError):
            self._send_pending()

    def call(self, method: str, request: Any) -> Any:
        """Call a method and return its response.

        Raises:
            CoordinatorUnreachableError: the coordinator does not answer.
            RefusedError: the coordinator answered with an error.
        """
        try:
            return self._call(method, request, _ANSWER_TIMEOUT_S, wait_for_ready=False)
        except RefusedError as refused:
            if refused.code in UNREACHABLE:
                # A coordinator without a ready device answers with the same status.
                self.connect()
            raise

    def report(self, method: str, request: Any) -> None:
        """Send a report that the training does not depend on, or keep it until the coordinator can take it.

        Raises:
            RefusedError: the coordinator will never take it.
        """
        if not self.is_unreachable:
            try:
                self._send_pending()
                self._call(method, request, _CONNECT_TIMEOUT_S)
                return
            except RefusedError as refused:
                if not _is_retryable(refused, request):
                    raise
                self.is_unreachable = refused.code in UNREACHABLE
        self._pending.append((method, request))

    @property
    def pending_reports(self) -> int:
        """How many reports are still to be sent."""
        return len(self._pending)

    def send_pending(self) -> None:
        """Send the pending reports in their order.

        Raises:
            CoordinatorUnreachableError: the coordinator does not answer.
            RefusedError: the coordinator cannot take a report now.
        """
        if self.is_unreachable and self._pending:
            self.connect()
        try:
            self._send_pending()
        except RefusedError as refused:
            if refused.code in UNREACHABLE:
                self.connect()
            raise

    def _send_pending(self) -> None:
        while self._pending:
            method, request = self._pending[0]
            try:
                self._call(method, request, _CONNECT_TIMEOUT_S)
            except RefusedError as refused:
                if _is_retryable(refused, request):
                    raise
                log(WARNING, "the coordinator rejected %s: %s", method, refused)
            del self._pending[0]

    def _call(self, method: str, request: Any, timeout_s: float, wait_for_ready: bool = True) -> Any:
        try:
            return getattr(self._stub, method)(request, timeout=timeout_s, wait_for_ready=wait_for_ready)
        except grpc.RpcError as error:
            details = plain_text(error.details() or "")
            text = f"the coordinator at {self.name}: {error.code().name}: {details}"
            raise RefusedError(text, error.code()) from None


def _is_retryable(refused: RefusedError, request: Any) -> bool:
    """Whether the coordinator may take the request later, when it is back or its disk has room again."""
    is_full = refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED and request.ByteSize() <= MAX_MESSAGE_BYTES
    return is_full or refused.code in UNREACHABLE
