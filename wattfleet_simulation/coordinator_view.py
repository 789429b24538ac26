"""Reads the state of devices and runs from the coordinator of a simulation."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from coordinator.cli.client import CoordinatorClient
from wattfleet_identity.endpoint import Endpoint
from wattfleet_proto.v1 import view_pb2

_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class RunSeen:
    """A run and its rounds so far.

    Attributes:
        run: id, strategy and state of the run; the id is empty if the run has not started.
        rounds: its rounds, in order.
    """

    run: view_pb2.RunView = field(default_factory=view_pb2.RunView)
    rounds: Sequence[view_pb2.RoundView] = ()


class CoordinatorView:
    """Reads devices and runs from the coordinator; raises the errors of `CoordinatorClient`."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Connect at the first request.

        Args:
            endpoint: the coordinator, and how to connect to it as an operator or a viewer.

        Raises:
            InvalidInputError: the identity is damaged, or plaintext would leave this machine although it must not.
        """
        self._client = CoordinatorClient(endpoint, stream_timeout_s=_TIMEOUT_S)

    def __enter__(self) -> CoordinatorView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.__exit__(kind, error, trace)

    def devices(self, workload: str = "") -> list[view_pb2.DeviceView]:
        """Return all devices with their fronts of a workload, by id; empty: each device's latest front."""
        return list(self._client.devices(with_fronts=True, workload=workload))

    def run(self, run_id: str) -> RunSeen:
        """Return a run and its rounds with their times; an empty run if its ServerApp has not announced it yet."""
        for run in self._client.runs(with_times=True):
            if run.run_id == run_id:
                return RunSeen(run, list(self._client.rounds(run_id, with_times=True)))
        return RunSeen()

    def errors(self, run_ids: Container[str]) -> list[str]:
        """Return the errors of the given runs that have failed."""
        return [run.error for run in self._client.runs() if run.run_id in run_ids and run.error]
