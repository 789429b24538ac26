"""Each device's latest assignment and observation, and the latest rounds that were observed or evaluated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.state.records import ObservedTraining, RoundRecord
from wattfleet.planning import Assignment


@dataclass(frozen=True)
class ObservedRound:
    """A round with an observation of every device.

    Attributes:
        run_id: Flower's run.
        number: from 1.
        site_w: observed watts, idling devices included.
        planned_w: watts that the round's plan reserved, idling devices included.
        allowed_w: the site's budget at that time, in watts.
        duration_s: observed seconds of the slowest device.
        predicted_s: seconds of the slowest device according to the round's plan.
    """

    run_id: str
    number: int
    site_w: float
    planned_w: float
    allowed_w: float
    duration_s: float
    predicted_s: float


@dataclass(frozen=True)
class EvaluatedRound:
    """A round for which the strategy reported an accuracy.

    Attributes:
        run_id: Flower's run.
        number: from 1.
        accuracy: as reported.
    """

    run_id: str
    number: int
    accuracy: float


class LatestResults:
    """The latest results, so that metrics need not read all rounds, some of which are not cached.

    Attributes:
        assignments: by device id; for a device that a trim has stopped, its assignment before the trim.
        observations: by device id.
        predictions: for the trainings in `observations`, by device id.
        assigned_in: the run of each assignment, by device id.
        observed_in: the run of each observation, by device id.
        observed_numbers: the round of each observation, by device id.
        observed_round: the newest round with all observations.
        evaluated_round: the newest evaluated round.
    """

    def __init__(self) -> None:
        """Start without any round."""
        self.assignments: dict[str, Assignment] = {}
        self.observations: dict[str, ObservedTraining] = {}
        self.predictions: dict[str, Assignment] = {}
        self.assigned_in: dict[str, str] = {}
        self.observed_in: dict[str, str] = {}
        self.observed_numbers: dict[str, int] = {}
        self.observed_round: ObservedRound | None = None
        self.evaluated_round: EvaluatedRound | None = None

    def assigned(self, record: RoundRecord) -> None:
        """Record a round that was planned or trimmed."""
        for assignment in record.plan.assignments:
            self.assignments[assignment.device_id] = assignment
            self.assigned_in[assignment.device_id] = record.run_id

    def observed(self, record: RoundRecord, observations: Iterable[ObservedTraining]) -> None:
        """Record new observations in a round; its record includes them already."""
        # A device that a trim has stopped is only in the first plan.
        planned = {each.device_id: each for each in (*record.plan.original.assignments, *record.plan.assignments)}
        for observed in observations:
            self.observations[observed.device_id] = observed
            self.predictions[observed.device_id] = planned[observed.device_id]
            self.observed_in[observed.device_id] = record.run_id
            self.observed_numbers[observed.device_id] = record.number
        site_w, duration_s = record.observed_site_w, record.observed_duration_s
        if site_w is not None and duration_s is not None and _is_newer(record, self.observed_round):
            plan = record.plan
            self.observed_round = ObservedRound(
                record.run_id, record.number, site_w, plan.planned_w, plan.site_budget_w, duration_s, plan.duration_s
            )

    def evaluated(self, record: RoundRecord) -> None:
        """Record a round's metrics."""
        if "accuracy" in record.metrics and _is_newer(record, self.evaluated_round):
            self.evaluated_round = EvaluatedRound(record.run_id, record.number, record.metrics["accuracy"])

    def forget(self, device_ids: Iterable[str]) -> None:
        """Remove the results of the given devices."""
        for device_id in device_ids:
            for known in (self.assignments, self.observations, self.predictions):
                known.pop(device_id, None)
            for place in (self.assigned_in, self.observed_in, self.observed_numbers):
                place.pop(device_id, None)


def _is_newer(record: RoundRecord, known: ObservedRound | EvaluatedRound | None) -> bool:
    """Whether a round is at least as new as the known one; a round of another run counts as newer."""
    return known is None or known.run_id != record.run_id or record.number >= known.number
