"""What the fleet knows about one device: declared once, for the view service, the event log and the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from coordinator.state.agents import DeviceRules
from coordinator.state.fleet import Fleet
from coordinator.state.records import DeviceOverrides, DeviceRecord, ObservedTraining
from coordinator.state.rounds.grants import DeviceGrant
from coordinator.state.workload_fronts import UsualLengths, WorkloadFront
from wattfleet.core.duties import KeptDuty
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.planning import Assignment, PredictionError
from wattfleet_proto.device_state import BoardSample, DeviceState


class DeviceView:
    """One device of a fleet, read from its state when a property is used.

    A property with the name of a field of the message `DeviceView` (`v1/view.proto`) becomes this field, and with it a
    key of JSON and a column of the exported table. So does an attribute of the device's record, rules, overrides and
    grant. None is what is unknown.

    Attributes:
        record: as its agent reports it.
        known: its front for the workload; None if it has none.
    """

    def __init__(
        self, fleet: Fleet, record: DeviceRecord, workload: str = "", lengths: UsualLengths | None = None
    ) -> None:
        """View one device.

        Args:
            fleet: the fleet.
            record: the device.
            workload: name of the workload whose predictions are viewed; empty for that of the latest front.
            lengths: the assumed epoch lengths of the fleet's devices; None to compute them when they are needed.
        """
        self.record = record
        self.known: WorkloadFront | None = record.front_for(workload) if workload else record.latest_front
        self._fleet = fleet
        self._asked_for = workload
        self._lengths = lengths

    @property
    def sources(self) -> tuple[object, ...]:
        """What has an attribute for each field of the message, the first that counts first."""
        return self, self.record, self.rules, self.overrides, self.grant

    # --- as its agent reports it --------------------------------------------------------------------------------

    @property
    def profiled_modes(self) -> int:
        """Number of modes measured of the workload that was asked for, or of the latest one."""
        if self.known is not None and self._asked_for:
            return self.known.profiled_modes
        return self.record.profiled_modes

    @property
    def sample(self) -> BoardSample | None:
        """The latest readings of its board's sensors; None while it is offline."""
        is_offline = self.record.state is DeviceState.OFFLINE
        return None if is_offline else self._fleet.samples.of(self.record.device_id)

    @property
    def duty(self) -> KeptDuty | None:
        """How it keeps its duty; None if it has none."""
        return self._fleet.duties.of(self.record.device_id)

    # --- predictions --------------------------------------------------------------------------------------------

    @property
    def workload(self) -> str | None:
        """Name of the workload that the predictions are for."""
        return self._asked_for or (None if self.known is None else self.known.name) or None

    @property
    def reference_digest(self) -> str | None:
        """Of the reference behind its front."""
        return None if self.known is None else self.known.reference_digest or None

    @property
    def fastest_epoch_s(self) -> float | None:
        """As `fastest_epoch_of` the workload."""
        return None if self.known is None else self.fastest_epoch_of(self.known)

    @property
    def epoch_length_assumed(self) -> bool:
        """Whether the fastest epoch assumes a number of minibatches."""
        return self.known is not None and self.known.is_length_assumed

    def fastest_epoch_of(self, known: WorkloadFront) -> float | None:
        """Seconds of a one-epoch training in the fastest mode within the device's own limit; None if no mode fits."""
        lengths = self._lengths or self._fleet.agents.usual_lengths()
        front, limit_w = lengths.planned(known), self.rules.limit_w
        allowed = np.maximum(front.planned_w, self.record.idle_w or 0.0) <= (np.inf if limit_w is None else limit_w)
        return float(front.one_epoch_s[allowed].min()) if allowed.any() else None

    @property
    def left_out(self) -> str | None:
        """Why its own reports keep it out of rounds; None if they do not."""
        return self._fleet.agents.claims.exclusion_reason(self.record, self._asked_for or None)

    @property
    def trust(self) -> float | None:
        """As `Claims.trust_of`."""
        return self._fleet.agents.claims.trust_of(self.record.device_id, self._asked_for or None)

    @property
    def errors(self) -> Sequence[PredictionError]:
        """How far its latest trainings were from its predictions, oldest first."""
        return self._fleet.agents.claims.errors_of(self.record.device_id, self._asked_for or None)

    # --- as its operator has placed it --------------------------------------------------------------------------

    @cached_property
    def rules(self) -> DeviceRules:
        """The site file's rules for it."""
        return self._fleet.operator.rules_of(self.record.device_id)

    @cached_property
    def overrides(self) -> DeviceOverrides:
        """What the operator has set for it by command."""
        return self._fleet.operator.overrides_of(self.record.device_id)

    @property
    def supply(self) -> str | None:
        """The supply that it is behind; None if the site file does not place it."""
        try:
            return self._fleet.operator.supply_of(self.record.device_id)
        except InvalidInputError:
            return None

    @property
    def site(self) -> str | None:
        """The site that its supply belongs to."""
        supply = self.supply
        return None if supply is None else self._fleet.operator.allowance.supplies.path(supply)[-1]

    @property
    def site_tags(self) -> list[str]:
        """Tags stated in the site file."""
        return sorted(self.rules.tags)

    @property
    def operator_tags(self) -> list[str]:
        """Tags set by the operator's commands."""
        return sorted(self.overrides.tags)

    # --- its grant ----------------------------------------------------------------------------------------------

    @cached_property
    def grant(self) -> DeviceGrant | None:
        """Its newest grant; None if it may only idle."""
        grant = self._fleet.rounds.grants.of(self.record.device_id)
        return None if grant is None or grant.is_over else grant

    @property
    def granted_plan_id(self) -> str | None:
        """The plan of its grant."""
        return None if self.grant is None else self.grant.plan_id or None

    # --- its last trainings -------------------------------------------------------------------------------------

    @cached_property
    def observed(self) -> ObservedTraining | None:
        """Its last observed training."""
        return self._fleet.rounds.latest_results.observations.get(self.record.device_id)

    @cached_property
    def predicted(self) -> Assignment | None:
        """The assignment of its last observed training."""
        return self._fleet.rounds.latest_results.predictions.get(self.record.device_id)

    @property
    def observed_w(self) -> float | None:
        """Watts of its last observed training."""
        return None if self.observed is None else self.observed.power_w

    @property
    def observed_limit_w(self) -> float | None:
        """Watts that the plan allowed this training."""
        return None if self.observed is None or self.predicted is None else self.predicted.power_limit_w

    @property
    def observed_run_id(self) -> str | None:
        """The run of this training."""
        return self._fleet.rounds.latest_results.observed_in.get(self.record.device_id)

    @property
    def observed_round(self) -> int | None:
        """The round of this training."""
        return self._fleet.rounds.latest_results.observed_numbers.get(self.record.device_id)

    @property
    def is_observed_run_live(self) -> bool:
        """Whether that run goes on."""
        return self._is_live(self.observed_run_id)

    @property
    def budget_w(self) -> float | None:
        """Watts planned for it in its newest round; None once the round's run has ended."""
        newest, device_id = self._fleet.rounds.latest_results, self.record.device_id
        assignment, is_live = newest.assignments.get(device_id), self._is_live(newest.assigned_in.get(device_id))
        return None if assignment is None or not is_live else assignment.power_limit_w

    @property
    def training_j(self) -> float | None:
        """Observed joules of its trainings since the coordinator started."""
        return self._fleet.rounds.statistics.device_j.get(self.record.device_id)

    def _is_live(self, run_id: str | None) -> bool:
        run = None if run_id is None else self._fleet.flower.runs.get(run_id)
        return run is not None and not run.finished
