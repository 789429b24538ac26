"""The coordinator's planning service, as Flower's server uses it: who is away is told from who refuses."""

from __future__ import annotations

from typing import Any

import grpc

from coordinator.flower.errors import CoordinatorAwayError, RefusedError
from wattfleet_proto.v1 import planning_pb2, planning_pb2_grpc

_ANSWERS_WITHIN_S = 30.0
# One that starts or restarts beside Flower is waited for; one that was away is only tried, so that rounds go on.
_REACHED_WITHIN_S = 15.0
_REACHED_AGAIN_WITHIN_S = 2.0

# By itself gRPC tries every two minutes only, after a while: a coordinator that is back would be missed by some rounds.
_SOON_BACK = (("grpc.initial_reconnect_backoff_ms", 500), ("grpc.max_reconnect_backoff_ms", 1000))

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
            channel = grpc.insecure_channel(coordinator, options=_SOON_BACK)
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
        untold, self._untold = self._untold, []
        for method, request in untold:
            self.tell(method, request)

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

    def tell(self, method: str, request: Any) -> str:
        """Report something that the training does not depend on; kept for later while the coordinator is away.

        Returns:
            Why it was refused; empty where it was not.
        """
        if not self.away:
            try:
                self._call(method, request, _REACHED_WITHIN_S)
            except RefusedError as refused:
                if refused.code not in _AWAY:
                    return str(refused)
                self.away = True
        if self.away:
            self._untold.append((method, request))
        return ""

    def _call(self, method: str, request: Any, within_s: float, wait_for_ready: bool = True) -> Any:
        try:
            return getattr(self._stub, method)(request, timeout=within_s, wait_for_ready=wait_for_ready)
        except grpc.RpcError as error:
            text = f"the coordinator at {self.name}: {error.code().name}: {error.details()}"
            raise RefusedError(text, error.code()) from None
