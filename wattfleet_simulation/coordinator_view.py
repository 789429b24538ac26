"""What the coordinator knows, asked over its own service."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import grpc

from wattfleet_proto.v1 import view_pb2, view_pb2_grpc
from wattfleet_simulation.processes import PartFailedError

_TIMEOUT_S = 30.0


def require_trained(rounds: Iterable[view_pb2.RoundView]) -> None:
    """Make sure that in every round some device's training succeeded; Flower completes a run without one, too.

    Raises:
        PartFailedError: in one round none did.
    """
    for one in rounds:
        if not one.observations:
            raise PartFailedError(f"round {one.round}: no device's training succeeded; the SuperNodes' logs say why")


@dataclass(frozen=True)
class RunSeen:
    """A run as far as it has come.

    Attributes:
        run: what is known of it; of no id where none ever started.
        rounds: its rounds, in their order.
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
