"""Counters of rounds since the coordinator started; they include rounds that end between two scrapes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable

from coordinator.histograms import Histogram
from coordinator.state.records import DeviceResult, ObservedTraining, RoundRecord

RATIO_LIMITS = (0.5, 0.67, 0.8, 0.9, 0.95, 0.98, 1.0, 1.02, 1.05, 1.1, 1.25, 1.5, 2.0, 3.0)
"""Bucket limits of the ratio of observed to predicted values."""

DEVIATION_LIMITS = (0.25, 0.5, 1.0, 1.645, 1.96, 2.576, 4.0, 8.0)
"""Bucket limits of deviations, in predicted standard deviations; a 90 % interval ends at 1.645, a 95 % one at 1.96."""

ROUND_LIMITS_S = (1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1_800.0, 3_600.0, 10_800.0)
ROUND_LIMITS_W = (10.0, 30.0, 100.0, 300.0, 1_000.0, 3_000.0, 10_000.0, 30_000.0, 100_000.0)
ROUND_LIMITS_J = (1e2, 1e3, 3e3, 1e4, 3e4, 1e5, 3e5, 1e6, 1e7, 1e8)


class RoundStatistics:
    """Counters and histograms of one fleet's rounds; they are not stored.

    Attributes:
        planned: the number of planned rounds.
        ended: the number of rounds by how they ended: `finished`, or `abandoned` by their Flower server.
        over_budget: the number of rounds that drew more than the site's budget at the time.
        participations: the number of devices' parts in planned and ended rounds, by outcome.
        ratios: observed divided by predicted values of trainings, by quantity: `time` or `power`.
        deviations: deviations of the same trainings, in standard deviations of the prediction.
        round_s: seconds of completely observed rounds, `predicted` and `observed`.
        round_w: watts of the site in completely observed rounds, `planned` and `observed`.
        round_j: joules of the trainings of completely observed rounds.
        device_j: observed joules of trainings, by device id.
        run_j: observed joules of trainings, by the id of a run that has not ended.
    """

    def __init__(self) -> None:
        """Start without any round."""
        self.planned = 0
        self.ended: Counter[str] = Counter(finished=0, abandoned=0)
        self.over_budget = 0
        self.participations: Counter[str] = Counter(
            dict.fromkeys(("selected", "not_selected", "completed", "partial", "failed", "late", "stopped"), 0)
        )
        self.ratios = {quantity: Histogram(RATIO_LIMITS) for quantity in ("time", "power")}
        self.deviations = {quantity: Histogram(DEVIATION_LIMITS) for quantity in ("time", "power")}
        self.round_s = {kind: Histogram(ROUND_LIMITS_S) for kind in ("predicted", "observed")}
        self.round_w = {kind: Histogram(ROUND_LIMITS_W) for kind in ("planned", "observed")}
        self.round_j = Histogram(ROUND_LIMITS_J)
        self.device_j: dict[str, float] = {}
        self.run_j: dict[str, float] = {}

    def round_planned(self, record: RoundRecord) -> None:
        """Count a planned round."""
        self.planned += 1
        selected = len(record.plan.assignments)
        self.participations["selected"] += selected
        self.participations["not_selected"] += len(record.plan.decisions) - selected

    def devices_stopped(self, before: RoundRecord, after: RoundRecord) -> None:
        """Count the devices that a trim has stopped."""
        self.participations["stopped"] += len(before.plan.assignments) - len(after.plan.assignments)

    def round_finished(self, results: Iterable[DeviceResult]) -> None:
        """Count a round that its Flower server has finished, and the outcomes of its devices."""
        self.ended["finished"] += 1
        self.participations.update(map(_outcome, results))

    def round_abandoned(self) -> None:
        """Count a round that its Flower server never finished."""
        self.ended["abandoned"] += 1

    def observed(self, record: RoundRecord, seen: ObservedTraining) -> None:
        """Count a new observation; the round's record includes it already."""
        planned = record.plan.assignment_of(seen.device_id) or record.plan.original.assignment_of(seen.device_id)
        if planned is None:
            return
        # Beside a duty, the seconds depend on the requests; with an assumed epoch length, no time is predicted.
        if not (seen.beside_duty or planned.is_length_assumed):
            self._compare("time", planned.epoch_s, planned.epoch_log_sd, seen.epoch_s)
        self._compare("power", planned.power_w, planned.power_log_sd, seen.power_w)
        energy_j = seen.energy_j(planned)
        self.device_j[seen.device_id] = self.device_j.get(seen.device_id, 0.0) + energy_j
        self.run_j[record.run_id] = self.run_j.get(record.run_id, 0.0) + energy_j
        self._round_observed(record)

    def _compare(self, quantity: str, predicted: float, log_sd: float, observed: float) -> None:
        if predicted <= 0:
            return
        self.ratios[quantity].add(observed / predicted)
        if log_sd > 0:
            self.deviations[quantity].add(abs(math.log(observed / predicted)) / log_sd)

    def _round_observed(self, record: RoundRecord) -> None:
        """Count a round with its last observation."""
        site_w, duration_s, training_j = record.observed_site_w, record.observed_duration_s, record.training_j
        if site_w is None or duration_s is None or training_j is None:
            return
        self.round_s["predicted"].add(record.plan.duration_s)
        self.round_s["observed"].add(duration_s)
        self.round_w["planned"].add(record.plan.planned_w)
        self.round_w["observed"].add(site_w)
        self.over_budget += site_w > record.plan.site_budget_w
        self.round_j.add(training_j)

    def runs_finished(self, run_ids: Collection[str]) -> None:
        """Remove the figures of runs that have ended."""
        for run_id in run_ids:
            self.run_j.pop(run_id, None)

    def forget(self, device_ids: Iterable[str]) -> None:
        """Remove the figures of the given devices."""
        for device_id in device_ids:
            self.device_j.pop(device_id, None)


def _outcome(result: DeviceResult) -> str:
    if result.failure:
        return "failed"
    if result.late:
        return "late"
    return "completed" if result.share == 1 else "partial"
