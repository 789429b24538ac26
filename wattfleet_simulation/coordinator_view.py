"""A client of the coordinator's view service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

import grpc

from wattfleet_proto.v1 import view_pb2, view_pb2_grpc

_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class RunSeen:
    """A run and its rounds so far.

    Attributes:
        run: its id, strategy and state; the id is empty if no run has started.
        rounds: its rounds, in order.
    """

    run: view_pb2.RunView = field(default_factory=view_pb2.RunView)
    rounds: Sequence[view_pb2.RoundView] = ()


class CoordinatorView:
    """A connection to the coordinator's read-only service."""

    def __init__(self, address: str) -> None:
        """Connect to host:port."""
        self._channel = grpc.insecure_channel(address)
        self._stub = view_pb2_grpc.ViewServiceStub(self._channel)

    def __enter__(self) -> CoordinatorView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def devices(self) -> list[view_pb2.DeviceView]:
        """All devices with their fronts, by id."""
        answers = self._stub.ListDevices(view_pb2.ListDevicesRequest(with_fronts=True), timeout=_TIMEOUT_S)
        return [device for answer in answers for device in answer.devices]

    def newest_run(self) -> RunSeen:
        """The newest run and its rounds."""
        runs = self._stub.ListRuns(view_pb2.ListRunsRequest(), timeout=_TIMEOUT_S).runs
        if not runs:
            return RunSeen()
        request = view_pb2.StreamRoundsRequest(run_id=runs[-1].run_id)
        return RunSeen(runs[-1], list(self._stub.StreamRounds(request, timeout=_TIMEOUT_S)))
