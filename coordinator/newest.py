"""What the newest round of each device set aside, and what its newest training needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coordinator.records import ObservedTraining
from wattfleet.planning.round_plan import Assignment


class Newest:
    """Looked up by device, so that nobody has to walk through the rounds of a large fleet.

    Attributes:
        assignments: by device id; of a device that a trim has ended, what it had been assigned.
        observations: by device id.
    """

    def __init__(self) -> None:
        """No round yet."""
        self.assignments: dict[str, Assignment] = {}
        self.observations: dict[str, ObservedTraining] = {}

    def assigned(self, assignments: Sequence[Assignment]) -> None:
        """A round was planned, or trimmed."""
        self.assignments.update({assignment.device_id: assignment for assignment in assignments})

    def observed(self, observations: Iterable[ObservedTraining]) -> None:
        """Devices reported what their trainings needed."""
        self.observations.update({observed.device_id: observed for observed in observations})

    def copy(self) -> Newest:
        """One that goes its own way from here."""
        copied = Newest()
        copied.assigned(list(self.assignments.values()))
        copied.observed(self.observations.values())
        return copied
