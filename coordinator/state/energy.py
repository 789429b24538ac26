"""The energy budgets of runs: what was set aside for their trainings, and what these have reported."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from coordinator.state.measuring import MeasuringPlan
from coordinator.state.records import RoundRecord, RunRecord, TrainingEnergy
from wattfleet.core.budgets import EnergyAccount
from wattfleet.core.choosing import MAX_POWER_W
from wattfleet.core.errors import ImplausibleError
from wattfleet.core.planning import Assignment, EnergyLimit
from wattfleet_proto.limits import LONGEST_FACTOR

_LONGEST_S = 366 * 24 * 3600.0
"""A training that was reported to last longer is refused as a mistake."""

_SURVEY_SHARE = 0.2
"""Share of a run's energy budget that all of its surveys together may take."""

_SURVEY_EXTRA_S = 30.0
"""Seconds beyond its measurements in which a survey's training begins and ends."""


class EnergyAccounts:
    """The account of every run with an energy budget.

    Nothing here reads a clock. A round's joules are set aside when its plan is put in force, and stored with it, before
    any device may train. A report replaces what was set aside for one training, and is stored with the report. So
    neither a restart nor a jump of the date changes what is left.
    """

    def __init__(self, accounts: Mapping[str, EnergyAccount] | None = None) -> None:
        """Start from what a store holds, by run."""
        self._accounts = dict(accounts or {})
        self._surveys_j: dict[tuple[str, str], float] = {}  # what counts as spent until it is reported

    def of(self, run_id: str) -> EnergyAccount | None:
        """A run's account; None if the run has no energy budget."""
        return self._accounts.get(run_id)

    def left(self, run: RunRecord, number: int) -> EnergyLimit | None:
        """What a run has left before a round; None if the run has no energy budget.

        Args:
            run: the run.
            number: the round's number.
        """
        account = self.of(run.run_id)
        if account is None:
            return None
        return EnergyLimit(
            account.left_j,
            max(1, run.rounds - number + 1) if run.rounds else 0,
            account.spent_j + account.set_aside_j,
        )

    def started(self, run: RunRecord) -> None:
        """Open the account of a run, or change its budget if the run is started again."""
        if run.energy_budget_j is None:
            return
        before = self.of(run.run_id) or EnergyAccount(run.energy_budget_j)
        self._accounts[run.run_id] = EnergyAccount(run.energy_budget_j, before.spent_j, before.set_aside_j)

    def planned(self, record: RoundRecord) -> None:
        """Set aside the joules of a round.

        Raises:
            EnergySpentError: so many are not left.
        """
        account = self.of(record.run_id)
        if account is not None and record.set_aside_j is not None:
            self._accounts[record.run_id] = account.set_aside(record.set_aside_j)

    def reported(self, run_id: str, training: TrainingEnergy) -> None:
        """Replace what was set aside for a training by what it has drawn."""
        if (account := self.of(run_id)) is not None:
            self._accounts[run_id] = account.reported(training.set_aside_j, training.energy_j)

    def affordable(
        self, run: RunRecord, survey_s: float, plan: MeasuringPlan, idle_w: Mapping[str, float]
    ) -> MeasuringPlan:
        """The part of a survey that a run's energy suffices for, with the seconds after which its trainings end.

        An app requests a survey several times, so what earlier requests have taken counts.

        Args:
            run: the run.
            survey_s: seconds in which devices begin measurements.
            plan: the devices that should measure.
            idle_w: their watts while idle.
        """
        account = self.of(run.run_id)
        if account is None:
            return plan
        longest_s = LONGEST_FACTOR * survey_s + _SURVEY_EXTRA_S
        kept, left_j = [], min(_SURVEY_SHARE * account.budget_j - run.surveys_j, account.left_j)
        for each in plan.assignments:
            counted = replace(each, idle_w=idle_w[each.device_id], longest_s=longest_s)
            if counted.set_aside_j <= left_j:
                kept.append(counted)
                left_j -= counted.set_aside_j
        chosen = {each.device_id: plan.measuring[each.device_id] for each in kept}
        return replace(plan, assignments=kept, measuring=chosen)

    def surveyed(self, run: RunRecord, plan_id: str, assignments: Sequence[Assignment]) -> RunRecord:
        """Count the trainings of a survey as spent, until they report less; returns the run to store."""
        account = self.of(run.run_id)
        if account is None:
            return run
        for each in assignments:
            self._surveys_j[plan_id, each.device_id] = each.set_aside_j
        return self._counted(run, sum(each.set_aside_j for each in assignments))

    def survey_reported(
        self, run: RunRecord, plan_id: str, device_id: str, energy_j: float, lasted_s: float, idle_w: float
    ) -> RunRecord | None:
        """Replace what counts for a training of a survey by what it has drawn; None if that is known or was forgotten.

        Raises:
            ImplausibleError: no training can draw so much.
        """
        above_j = _above_idle_j(device_id, energy_j, lasted_s, idle_w)
        set_aside_j = self._surveys_j.pop((plan_id, device_id), None)
        return None if set_aside_j is None or self.of(run.run_id) is None else self._counted(run, above_j - set_aside_j)

    def _counted(self, run: RunRecord, more_j: float) -> RunRecord:
        account = self._accounts[run.run_id]
        self._accounts[run.run_id] = replace(account, spent_j=max(0.0, account.spent_j + more_j))
        return replace(run, surveys_j=max(0.0, run.surveys_j + more_j))

    def remove_runs(self, run_ids: Collection[str]) -> None:
        """Remove runs that were deleted from the store."""
        for run_id in run_ids:
            self._accounts.pop(run_id, None)


def energy_of(record: RoundRecord, device_id: str, energy_j: float, lasted_s: float) -> TrainingEnergy | None:
    """The energy above idle that a device reports for its training in a round; None if none was set aside for it.

    Args:
        record: the round.
        device_id: the device.
        energy_j: joules that the board has drawn, its idle power included.
        lasted_s: seconds from the change to the training's mode until the board was parked.

    Raises:
        ImplausibleError: no training can draw so much.
    """
    planned = record.plan.original.assignment_of(device_id)
    if planned is None or planned.longest_s is None:
        return None
    above_j = _above_idle_j(device_id, energy_j, lasted_s, planned.idle_w)
    return TrainingEnergy(record.plan_id, device_id, above_j, planned.set_aside_j)


def _above_idle_j(device_id: str, energy_j: float, lasted_s: float, idle_w: float) -> float:
    if not 0 <= lasted_s <= _LONGEST_S:
        raise ImplausibleError(
            f"{device_id}: a training must last 0 to {_LONGEST_S:,.0f} s, not {lasted_s:g} s: check its agent"
        )
    if not 0 <= energy_j <= MAX_POWER_W * lasted_s:
        raise ImplausibleError(f"{device_id}: no board draws {energy_j:g} J in {lasted_s:g} s: check its power meter")
    return max(0.0, energy_j - idle_w * lasted_s)
