"""The coordinator's view of the fleet, as a simulation reads it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from coordinator.cli.client import CoordinatorClient
from wattfleet_proto.v1 import view_pb2
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
    """What a simulation reads from the coordinator; errors are those of `CoordinatorClient`."""

    def __init__(self, address: str) -> None:
        """Connect to host:port at the first request."""
        self._client = CoordinatorClient(address, stream_timeout_s=_TIMEOUT_S)

    def __enter__(self) -> CoordinatorView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.__exit__(kind, error, trace)

    def devices(self) -> list[view_pb2.DeviceView]:
        """Return all devices with their fronts, by id."""
        return list(self._client.devices(with_fronts=True))

    def newest_run(self) -> RunSeen:
        """Return the newest run and its rounds."""
        runs = self._client.runs()
        return RunSeen(runs[-1], list(self._client.rounds(runs[-1].run_id))) if runs else RunSeen()
