"""What the newest round of each device set aside, what its newest training needed, and what whole rounds came to."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from coordinator.state.records import ObservedTraining, RoundRecord
from wattfleet.planning import Assignment


@dataclass(frozen=True)
class ObservedRound:
    """A round of which every device was observed.

    Attributes:
        run_id: Flower's run.
        number: from 1.
        site_w: observed watts, idling devices included.
        allowed_w: watts of the site then.
        duration_s: observed seconds of the slowest device.
    """

    run_id: str
    number: int
    site_w: float
    allowed_w: float
    duration_s: float


@dataclass(frozen=True)
class EvaluatedRound:
    """A round after which the strategy reported an accuracy.

    Attributes:
        run_id: Flower's run.
        number: from 1.
        accuracy: as it was reported.
    """

    run_id: str
    number: int
    accuracy: float


class LatestResults:
    """Kept apart from rounds, so that nobody has to walk through those of a large fleet, which are not all at hand.

    Attributes:
        assignments: by device id; of a device that a trim has ended, what it had been assigned.
        observations: by device id.
        observed_round: the newest round that was observed whole.
        evaluated_round: the newest round that was evaluated.
    """

    def __init__(self) -> None:
        """No round yet."""
        self.assignments: dict[str, Assignment] = {}
        self.observations: dict[str, ObservedTraining] = {}
        self.observed_round: ObservedRound | None = None
        self.evaluated_round: EvaluatedRound | None = None

    def assigned(self, assignments: Sequence[Assignment]) -> None:
        """A round was planned, or trimmed."""
        self.assignments.update({assignment.device_id: assignment for assignment in assignments})

    def observed(self, record: RoundRecord, observations: Iterable[ObservedTraining]) -> None:
        """Devices reported what their trainings in a round needed, which are among its observations."""
        self.observations.update({observed.device_id: observed for observed in observations})
        site_w, duration_s = record.observed_site_w, record.observed_duration_s
        if site_w is not None and duration_s is not None and _is_newer(record, self.observed_round):
            allowed_w = record.plan.site_budget_w
            self.observed_round = ObservedRound(record.run_id, record.number, site_w, allowed_w, duration_s)

    def evaluated(self, record: RoundRecord) -> None:
        """The strategy reported metrics of a round."""
        if "accuracy" in record.metrics and _is_newer(record, self.evaluated_round):
            self.evaluated_round = EvaluatedRound(record.run_id, record.number, record.metrics["accuracy"])

    def copy(self) -> LatestResults:
        """One that goes its own way from here."""
        copied = copy.copy(self)
        copied.assignments, copied.observations = self.assignments.copy(), self.observations.copy()
        return copied


def _is_newer(record: RoundRecord, known: ObservedRound | EvaluatedRound | None) -> bool:
    """Whether a round is no older than what is known; of another run it counts as newer."""
    return known is None or known.run_id != record.run_id or record.number >= known.number
