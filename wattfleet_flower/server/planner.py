"""The coordinator's planning service, as Flower's server uses it: who is away is told from who refuses."""

from __future__ import annotations

from contextlib import suppress
from logging import WARNING
from typing import Any

import grpc
from flwr.common.logger import log

from wattfleet_flower.server.errors import CoordinatorAwayError, RefusedError
from wattfleet_proto.message_sizes import MAX_ANSWER_BYTES, MAX_MESSAGE_BYTES
from wattfleet_proto.v1 import planning_pb2, planning_pb2_grpc

_ANSWERS_WITHIN_S = 30.0
# One that starts or restarts beside Flower is waited for; one that was away is only tried, so that rounds go on.
_REACHED_WITHIN_S = 15.0
_REACHED_AGAIN_WITHIN_S = 2.0

_OPTIONS = (
    # By itself gRPC tries every two minutes only, after a while: a coordinator that is back would be missed by some
    # rounds.
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
)

_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class Planner:
    """Calls the planning service; remembers whether it answers, and what could not be told it."""

    def __init__(self, coordinator: str | Any) -> None:
        """Use one coordinator.

        Args:
            coordinator: its host:port, or a stub of its PlanningService.
        """
        self.name = coordinator if isinstance(coordinator, str) else "its stub"
        if isinstance(coordinator, str):
            channel = grpc.insecure_channel(coordinator, options=_OPTIONS)
            coordinator = planning_pb2_grpc.PlanningServiceStub(channel)
        self._stub = coordinator
        self._untold: list[tuple[str, Any]] = []
        self.away = False

    def reach(self) -> None:
        """Make sure that the coordinator answers, and tell it what it missed.

        Raises:
            CoordinatorAwayError: it does not answer.
            RefusedError: something answers that is no coordinator.
        """
        within_s = _REACHED_AGAIN_WITHIN_S if self.away else _REACHED_WITHIN_S
        try:
            self._call("ResolveNodes", planning_pb2.ResolveNodesRequest(), within_s)
        except RefusedError as refused:
            if refused.code not in _AWAY:
                raise
            self.away = True
            raise CoordinatorAwayError(str(refused)) from None
        self.away = False
        with suppress(RefusedError):
            self._tell_untold()

    def ask(self, method: str, request: Any) -> Any:
        """Call a method.

        Raises:
            CoordinatorAwayError: the coordinator does not answer.
            RefusedError: it refused.
        """
        try:
            return self._call(method, request, _ANSWERS_WITHIN_S, wait_for_ready=False)
        except RefusedError as refused:
            if refused.code in _AWAY:
                # Or there: it says the same of a fleet of which no device is ready.
                self.reach()
            raise

    def tell(self, method: str, request: Any) -> None:
        """Report something that the training does not depend on; kept for later where it cannot be taken now.

        Raises:
            RefusedError: it was refused for good.
        """
        if not self.away:
            try:
                self._tell_untold()
                self._call(method, request, _REACHED_WITHIN_S)
                return
            except RefusedError as refused:
                if not _is_for_later(refused, request):
                    raise
                self.away = refused.code in _AWAY
        self._untold.append((method, request))

    @property
    def untold(self) -> int:
        """How many reports could not be taken yet."""
        return len(self._untold)

    def catch_up(self) -> None:
        """Tell what could not be taken when it was reported, in its order.

        Raises:
            CoordinatorAwayError: the coordinator does not answer.
            RefusedError: it cannot take it now.
        """
        if self.away and self._untold:
            self.reach()
        try:
            self._tell_untold()
        except RefusedError as refused:
            if refused.code in _AWAY:
                self.reach()
            raise

    def _tell_untold(self) -> None:
        while self._untold:
            method, request = self._untold[0]
            try:
                self._call(method, request, _REACHED_WITHIN_S)
            except RefusedError as refused:
                if _is_for_later(refused, request):
                    raise
                log(WARNING, "%s was not taken: %s", method, refused)
            del self._untold[0]

    def _call(self, method: str, request: Any, within_s: float, wait_for_ready: bool = True) -> Any:
        try:
            return getattr(self._stub, method)(request, timeout=within_s, wait_for_ready=wait_for_ready)
        except grpc.RpcError as error:
            text = f"the coordinator at {self.name}: {error.code().name}: {error.details()}"
            raise RefusedError(text, error.code()) from None


def _is_for_later(refused: RefusedError, request: Any) -> bool:
    """Whether what was refused may be taken later: by a coordinator that is back, or has room on its disk again."""
    is_full = refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED and request.ByteSize() <= MAX_MESSAGE_BYTES
    return is_full or refused.code in _AWAY
