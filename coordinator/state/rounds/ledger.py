"""All rounds, and what changes with them: the cache, grants, latest results and statistics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from coordinator.errors import NoDevicesError, UnknownRecordError
from coordinator.histograms import Histogram
from coordinator.state.names import require_metrics
from coordinator.state.records import (
    DeviceResult,
    ObservedTraining,
    RoundObservation,
    RoundRecord,
    TrainingEnergy,
    UnplannedRound,
    parts_of,
    plan_id_of,
    run_of,
)
from coordinator.state.rounds.grants import Grants
from wattfleet.core.errors import InfeasibleBudgetError, InvalidInputError
from wattfleet.core.planning import (
    Allowance,
    Assignment,
    Decision,
    EnergyLimit,
    EnergyStores,
    EpochChoice,
    History,
    Offer,
    Selection,
    plan_round,
)
from wattfleet.core.planning.policies import Policy

# --- Request ----------------------------------------------------------------------------------------------------------
# A request for a round's plan: everything that the plan depends on, copied from the fleet at one moment.


@dataclass(frozen=True)
class RoundRequest:
    """An immutable request, so that another thread can plan the round while the fleet changes.

    Attributes:
        run_id: Flower's run.
        number: from 1.
        epochs: local epochs of each chosen device, or those that the policy may choose.
        offers: the offers of the ready devices.
        nodes: Flower's node id of every device that has one.
        policy: the client-selection policy.
        allowance: watts of every supply, and the watts that all other devices draw there.
        history: the run's finished rounds.
        selection: the operator's rules for client selection.
        not_offered: device id -> why a ready device is not among the offers.
        energy: what is left of the run's energy budget; None for a run without one.
        stores: the batteries, and the energy budgets of supplies; None without any.
    """

    run_id: str
    number: int
    epochs: float | EpochChoice
    offers: Sequence[Offer]
    nodes: Mapping[str, int]
    policy: Policy
    allowance: Allowance
    history: History
    selection: Selection
    not_offered: Mapping[str, str] = field(default_factory=dict)
    energy: EnergyLimit | None = None
    stores: EnergyStores | None = None

    @property
    def plan_id(self) -> str:
        """The id of the requested plan."""
        return plan_id_of(self.run_id, self.number)

    def planned(self) -> RoundRecord:
        """Plan the round; with ten thousand devices this takes half a second.

        Raises:
            NoCandidatesError: none of the ready devices may be chosen.
            NoDevicesError: no device can train with the watts that are left after other runs' shares.
            InfeasibleBudgetError: the site's budget is too small for any device.
            EnergySpentError: what is left of the run's energy budget does not suffice for any device.
            InvalidInputError: the number of epochs is not above zero.
        """
        try:
            plan = plan_round(
                self.offers,
                self.policy,
                self.allowance,
                self.epochs,
                self.number,
                self.history,
                self.selection,
                self.energy,
                self.stores,
            )
        except InfeasibleBudgetError:
            if not any(self.allowance.left_w.values()):
                raise
            raise NoDevicesError("the watts are left to runs that have waited longer; try again later") from None
        if self.not_offered:
            others = (Decision(device_id, False, reason) for device_id, reason in self.not_offered.items())
            decisions = sorted((*plan.decisions, *others), key=lambda decision: decision.device_id)
            plan = replace(plan, decisions=tuple(decisions))
        chosen = {assignment.device_id for assignment in plan.assignments}
        idle_w = sum(self.allowance.elsewhere_w.values())
        idle_w += sum(offer.idle_w for offer in self.offers if offer.device_id not in chosen)
        nodes = {assignment.device_id: self.nodes[assignment.device_id] for assignment in plan.assignments}
        epochs = max(assignment.epochs for assignment in plan.assignments)
        return RoundRecord(self.plan_id, self.run_id, self.number, epochs, plan, nodes, idle_w)


# --- Latest results ---------------------------------------------------------------------------------------------------
# Each device's latest assignment and observation, and the latest rounds that were observed or evaluated.


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
        for observed in observations:
            self.observations[observed.device_id] = observed
            self.predictions[observed.device_id] = record.planned(observed.device_id)
            self.observed_in[observed.device_id] = record.run_id
            self.observed_numbers[observed.device_id] = record.number
        site_w, duration_s = record.observed_site_w, record.observed_s
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


# --- Cache ------------------------------------------------------------------------------------------------------------
# A cache of rounds in memory; all others are in the store only.

# Limits of the cache; the least recently used entries are evicted first. This many decisions are three rounds of 10,000
# devices, or three hundred rounds of 100.
_DECISIONS = 30_000
_HISTORIES = 4


class RoundCache:
    """The most recently used rounds, and the histories of the runs that were planned last.

    A round must be in the store before it is evicted, and must be restored before it is used again.

    Attributes:
        rounds: the cached rounds by plan id; the newest round is the last one.
    """

    def __init__(self, rounds: Sequence[RoundRecord] = (), archived: Collection[str] = ()) -> None:
        """Start from what a store holds.

        Args:
            rounds: oldest first.
            archived: ids of the runs that have rounds only in the store.
        """
        self.rounds = {record.plan_id: record for record in rounds}
        self._archived = set(archived)
        # Both are in order of use, least recent first.
        self._used = dict.fromkeys(self.rounds)
        self._histories: dict[str, History] = {}

    def put(self, record: RoundRecord) -> RoundRecord:
        """Cache a round that is new or has changed."""
        self.rounds[record.plan_id] = record
        self.touch(record.plan_id)
        return record

    def touch(self, plan_id: str) -> None:
        """Mark a cached round as used."""
        self._used.pop(plan_id, None)
        self._used[plan_id] = None

    def of_run(self, run_id: str) -> list[RoundRecord]:
        """The cached rounds of a run, oldest first."""
        return [record for record in self.rounds.values() if record.run_id == run_id]

    def round_finished(self, record: RoundRecord) -> None:
        """Add a finished round to its run's history, which the next plan takes into account."""
        if record.run_id in self._histories:
            history = self._histories[record.run_id]
            self._histories[record.run_id] = history.after(record.number, parts_of(record.results))

    def history(self, run_id: str) -> History:
        """The finished rounds of a run; if its history is missing, only the cached ones."""
        history = self._histories.pop(run_id, None)
        if history is None:
            self.restore_history(run_id, History())
        else:
            self._histories[run_id] = history
        return self._histories[run_id]

    # --- the store ----------------------------------------------------------------------------------------------

    def is_archived(self, run_id: str) -> bool:
        """Whether rounds of a run may be only in the store."""
        return run_id in self._archived

    def is_missing(self, plan_id: str) -> bool:
        """Whether a round may be only in the store."""
        return plan_id not in self.rounds and self.is_archived(run_of(plan_id))

    def is_history_missing(self, run_id: str) -> bool:
        """Whether the history of a run may be only in the store."""
        return run_id not in self._histories and self.is_archived(run_id)

    def restore(self, record: RoundRecord) -> None:
        """Cache a round from the store; a round that is not missing stays as it is."""
        if self.is_missing(record.plan_id):
            self.rounds = {record.plan_id: record, **self.rounds}
            self.touch(record.plan_id)

    def restore_history(self, run_id: str, history: History) -> None:
        """Cache a run's history from the store, plus the cached rounds; a cached history stays as it is."""
        if run_id in self._histories:
            return
        for record in self.of_run(run_id):
            if record.wall_s is not None:
                history = history.after(record.number, parts_of(record.results))
        self._histories[run_id] = history

    def evictable(self, in_flight: Collection[str]) -> list[str]:
        """The rounds beyond the cache's limit, which may be evicted once they are stored.

        Args:
            in_flight: plans that must stay cached, because devices are still committed to them.
        """
        newest = next(reversed(self.rounds), None)
        found, decisions = [], 0
        for plan_id in reversed(self._used):
            decisions += len(self.rounds[plan_id].plan.decisions)
            if decisions > _DECISIONS and plan_id not in in_flight and plan_id != newest:
                found.append(plan_id)
        return found

    def evict(self, plan_ids: Collection[str]) -> None:
        """Remove rounds and the least recently used histories from memory; the store keeps them."""
        for plan_id in plan_ids:
            self._archived.add(self.rounds.pop(plan_id).run_id)
            del self._used[plan_id]
        for run_id in list(self._histories)[:-_HISTORIES]:
            del self._histories[run_id]

    def run_finished(self, run_id: str) -> None:
        """Remove the history of a finished run, because it plans no more rounds."""
        self._histories.pop(run_id, None)

    def remove_runs(self, run_ids: Collection[str]) -> None:
        """Remove runs that were deleted from the store."""
        for plan_id in [record.plan_id for record in self.rounds.values() if record.run_id in run_ids]:
            del self.rounds[plan_id], self._used[plan_id]
        for run_id in run_ids:
            self._archived.discard(run_id)
            self._histories.pop(run_id, None)


# --- Round statistics -------------------------------------------------------------------------------------------------
# Counters of rounds since the coordinator started; they include rounds that end between two scrapes.

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
        planned = record.planned(seen.device_id)
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
        site_w, duration_s = record.observed_site_w, record.observed_s
        if site_w is None or duration_s is None:
            return
        self.round_s["predicted"].add(record.plan.duration_s)
        self.round_s["observed"].add(duration_s)
        self.round_w["planned"].add(record.plan.planned_w)
        self.round_w["observed"].add(site_w)
        self.over_budget += site_w > record.plan.site_budget_w
        if (training_j := record.training_j) is not None:
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


# --- Unplanned --------------------------------------------------------------------------------------------------------
# Rounds that trained without a plan: which exist, and the checks of a Flower server's report of one.

LONGEST_S = 366 * 24 * 3600.0
"""A reported round that began longer ago, or took longer, is refused as a mistake."""


class UnplannedRounds:
    """The numbers of the rounds without a plan, by run; the rounds themselves are only in the store."""

    def __init__(self, known: Iterable[tuple[str, int]] = ()) -> None:
        """Start from what a store holds.

        Args:
            known: run id and round number of each.
        """
        self._numbers: dict[str, set[int]] = {}
        for run_id, number in known:
            self._numbers.setdefault(run_id, set()).add(number)

    def __len__(self) -> int:
        """The number of rounds without a plan in all runs."""
        return sum(map(len, list(self._numbers.values())))

    def of_run(self, run_id: str) -> list[int]:
        """The numbers of a run's rounds without a plan, in order."""
        return sorted(self._numbers.get(run_id, ()))

    def is_known(self, run_id: str, number: int) -> bool:
        """Whether a round was reported and stored."""
        return number in self._numbers.get(run_id, ())

    def stored(self, record: UnplannedRound) -> None:
        """Record a round that is on disk."""
        self._numbers.setdefault(record.run_id, set()).add(record.number)

    def remove_runs(self, run_ids: Collection[str]) -> None:
        """Remove the rounds of runs that were deleted from the store."""
        for run_id in run_ids:
            self._numbers.pop(run_id, None)


def reported(
    run_id: str,
    number: int,
    now: datetime,
    began_ago_s: float,
    wall_s: float,
    results: Sequence[DeviceResult],
    metrics: Mapping[str, float],
) -> UnplannedRound:
    """Build the record of a round without a plan from its Flower server's report.

    Args:
        run_id: Flower's run.
        number: from 1.
        now: the date and time of the report.
        began_ago_s: when the round began, in seconds before the report.
        wall_s: duration at the Flower server in seconds.
        results: results of the nodes that were sent a training.
        metrics: what the strategy reported.

    Raises:
        InvalidInputError: the report is not plausible.
    """
    if number < 1:
        raise InvalidInputError(f"rounds are numbered from 1, not {number}")
    if not 0 <= began_ago_s <= LONGEST_S:
        raise InvalidInputError(
            f"a round must have begun 0 to {LONGEST_S:,.0f} s before it is reported, not {began_ago_s} s"
        )
    if not 0 <= wall_s <= LONGEST_S:
        raise InvalidInputError(f"a round's duration must be 0 to {LONGEST_S:,.0f} s, not {wall_s} s")
    require_metrics(run_id, number, metrics)
    return UnplannedRound(run_id, number, now - timedelta(seconds=began_ago_s), wall_s, tuple(results), dict(metrics))


# --- Ledger -----------------------------------------------------------------------------------------------------------


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

    def report_energy(self, training: TrainingEnergy) -> TrainingEnergy:
        """Add what a training has drawn; a repeated report changes nothing.

        Raises:
            UnknownRecordError: the plan does not exist.
        """
        record = self.get(training.plan_id)
        known = record.energies.get(training.device_id)
        if known is None:
            self.cache.put(replace(record, energies={**record.energies, training.device_id: training}))
        return known or training

    def unbegun(self, plan_id: str) -> list[TrainingEnergy]:
        """The trainings of a round that certainly drew nothing: their devices never received the grant."""
        record = self.get(plan_id)
        return [
            TrainingEnergy(plan_id, each.device_id, 0.0, each.set_aside_j)
            for each in record.plan.original.assignments
            if each.longest_s is not None
            and each.device_id not in record.energies
            and self.grants.never_began(each.device_id, plan_id)
        ]

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
