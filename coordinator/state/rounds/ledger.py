"""All rounds, and what changes with them: the cache, grants, latest results and statistics."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from coordinator.errors import UnknownRecordError
from coordinator.state.records import (
    DeviceResult,
    ObservedTraining,
    RoundObservation,
    RoundRecord,
    run_of,
)
from coordinator.state.rounds.cache import RoundCache
from coordinator.state.rounds.grants import Grants
from coordinator.state.rounds.latest_results import LatestResults
from coordinator.state.rounds.round_statistics import RoundStatistics
from wattfleet.errors import InvalidInputError


class RoundLedger:
    """The rounds of all runs. Each change goes through a method here and returns the record to store.

    Attributes:
        cache: rounds in memory; a missing round must be restored before it is passed to a method here.
        grants: what devices may draw beyond idle power.
        latest_results: each device's latest assignment and observation.
        statistics: counts over the rounds of this process.
        since_s: when each awaited round was planned, or else when this process began, by plan id; in seconds of the
            planner's clock.
    """

    def __init__(
        self,
        rounds: Sequence[RoundRecord] = (),
        archived: Collection[str] = (),
        grants: Grants | None = None,
    ) -> None:
        """Start from what a store holds.

        Args:
            rounds: known rounds, oldest first.
            archived: ids of the runs that have rounds only in the store.
            grants: the grants that follow from these rounds.
        """
        self.cache = RoundCache(rounds, archived)
        self.grants = grants or Grants()
        self.latest_results = LatestResults()
        self.statistics = RoundStatistics()
        self.since_s: dict[str, float] = {}
        for record in rounds:
            self.latest_results.assigned(record)
            self.latest_results.observed(record, record.observations.values())
            self.latest_results.evaluated(record)

    @property
    def records(self) -> Mapping[str, RoundRecord]:
        """The cached rounds by plan id; the newest round is the last one."""
        return self.cache.rounds

    def get(self, plan_id: str) -> RoundRecord:
        """Get one round.

        Raises:
            UnknownRecordError: the plan does not exist.
        """
        if plan_id not in self.records:
            raise UnknownRecordError(f"unknown plan {plan_id!r}")
        self.cache.touch(plan_id)
        return self.records[plan_id]

    def in_flight(self) -> list[RoundRecord]:
        """The rounds that devices are still committed to."""
        return [self.records[plan_id] for plan_id in self.grants.plans_in_flight()]

    def awaited(self) -> list[RoundRecord]:
        """The rounds that Flower servers may wait for: those in flight, and those whose devices are done."""
        unfinished = {each for each in self.since_s if each in self.records and self.records[each].wall_s is None}
        return [self.records[plan_id] for plan_id in self.grants.plans_in_flight() | unfinished]

    def evictable(self) -> list[str]:
        """The ids of rounds that may be evicted from the cache once they are stored."""
        return self.cache.evictable({record.plan_id for record in self.awaited()})

    # --- changes ------------------------------------------------------------------------------------------------

    def add(self, record: RoundRecord) -> RoundRecord:
        """Add a planned round, and grant its watts to its devices."""
        self.grants.commit(record)
        self.latest_results.assigned(record)
        self.statistics.round_planned(record)
        return self.cache.put(record)

    def replace_plan(self, record: RoundRecord, changed_devices: Sequence[str]) -> None:
        """Replace a round in flight by its trimmed version.

        Args:
            record: the round with its trimmed plan.
            changed_devices: devices whose assignment changed, or that the plan no longer contains.
        """
        self.grants.reassign(record, changed_devices)
        self.latest_results.assigned(record)
        self.statistics.devices_stopped(self.get(record.plan_id), record)
        self.cache.put(record)

    def observe(self, plan_id: str, observed: ObservedTraining) -> RoundObservation:
        """Add a device's observation of its training; a repeated report changes nothing.

        Raises:
            UnknownRecordError: the plan does not exist, or the device is not part of it.
        """
        record = self.get(plan_id)
        if observed.device_id not in record.nodes:
            raise UnknownRecordError(f"{observed.device_id} is not part of plan {plan_id}")
        known = record.observations.get(observed.device_id)
        if known is not None:
            return RoundObservation(plan_id, known)
        self.grants.observed(observed.device_id, plan_id)
        observations = {**record.observations, observed.device_id: observed}
        record = self.cache.put(replace(record, observations=observations))
        self.latest_results.observed(record, [observed])
        self.statistics.observed(record, observed)
        return RoundObservation(plan_id, observed)

    def finish(self, plan_id: str, results: Sequence[DeviceResult], wall_s: float) -> RoundRecord:
        """Finish a round, because the Flower server waits for no more replies.

        The training of a late device continues, and its watts stay granted.

        Raises:
            UnknownRecordError: the plan does not exist, or a device is not part of it.
            InvalidInputError: the duration is negative or not finite.
        """
        record = self.get(plan_id)
        if not 0 <= wall_s < math.inf:
            raise InvalidInputError(f"a round's duration must be 0 s or more and finite, not {wall_s}")
        for result in results:
            if result.device_id not in record.nodes:
                raise UnknownRecordError(f"{result.device_id} is not part of plan {plan_id}")
        if record.wall_s is None:  # a repeated report counts once
            self.statistics.round_finished(results)
        record = self.cache.put(replace(record, results=tuple(results), wall_s=wall_s))
        self.grants.end_round(record)
        self.cache.round_finished(record)
        return record

    def abandon(self, plan_id: str) -> None:
        """Stop waiting for a round's devices, because its Flower server was silent for too long.

        Devices that still train keep their watts until they report that they are done or their grants have lapsed.

        Raises:
            UnknownRecordError: the plan does not exist.
        """
        record = self.get(plan_id)
        if record.wall_s is None:
            self.statistics.round_abandoned()
        self.since_s.pop(plan_id, None)
        self.grants.give_up_round(record)

    def report_metrics(self, plan_id: str, metrics: Mapping[str, float]) -> RoundRecord:
        """Add the metrics that the strategy evaluated after a round.

        Raises:
            UnknownRecordError: the plan does not exist.
        """
        record = self.get(plan_id)
        record = self.cache.put(replace(record, metrics={**record.metrics, **metrics}))
        self.latest_results.evaluated(record)
        return record

    def forget(self, device_ids: Collection[str]) -> None:
        """Remove what is known about the given devices, except for their part in rounds."""
        self.grants.forget(device_ids)
        self.latest_results.forget(device_ids)
        self.statistics.forget(device_ids)

    def runs_finished(self, run_ids: Collection[str]) -> None:
        """Release the devices of finished runs."""
        self.grants.give_up_runs(run_ids)
        self._drop_times(run_ids)
        self.statistics.runs_finished(run_ids)
        for run_id in run_ids:
            self.cache.run_finished(run_id)

    def remove_runs(self, run_ids: Collection[str]) -> None:
        """Remove the rounds of runs that were deleted from the store."""
        self.cache.remove_runs(run_ids)
        self.grants.remove_runs(run_ids)
        self._drop_times(run_ids)

    def _drop_times(self, run_ids: Collection[str]) -> None:
        """Stop waiting for the rounds of some runs."""
        self.since_s = {plan_id: since_s for plan_id, since_s in self.since_s.items() if run_of(plan_id) not in run_ids}
