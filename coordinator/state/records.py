"""Records of devices, Flower's nodes, runs and rounds: immutable, and stored as they are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from coordinator.errors import UnknownRecordError
from coordinator.state.identity_records import IdentityRecord
from coordinator.state.workload_fronts import UNNAMED, WorkloadFront, front_for
from wattfleet.core.budgets import Override, PeriodBudget
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import Workload
from wattfleet.core.planning import Assignment, Participation, RoundPlan, plausible_examples, plausible_loss
from wattfleet_proto.device_state import DeviceState
from wattfleet_proto.limits import MAX_DETAIL_CHARACTERS

# --- Stored grants ----------------------------------------------------------------------------------------------------
# What a store keeps about grants, so that a restarted coordinator does not free watts too early.


@dataclass(frozen=True)
class GivenUpTraining:
    """A device whose grant continues after its round or run has ended.

    Attributes:
        device_id: the device.
        plan_id: the plan of the grant; None once the grant is over.
        limit_w: watts of a grant to measure, which belongs to no round; None if the plan of a round states them.
    """

    device_id: str
    plan_id: str | None
    limit_w: float | None = None


@dataclass(frozen=True)
class GrantLifetime:
    """The longest lifetime that a device may still rely on.

    Attributes:
        lifetime_s: in seconds.
    """

    lifetime_s: float


@dataclass(frozen=True)
class StoredGrants:
    """What an earlier coordinator has stored.

    Attributes:
        lifetime_s: the longest lifetime that a device may still rely on, in seconds; 0 if none is stored.
        given_up: the trainings that continue after their round or run, and those that measure, by device id.
    """

    lifetime_s: float = 0.0
    given_up: Mapping[str, GivenUpTraining] = field(default_factory=dict)


NOTHING_STORED = StoredGrants()


class UnstoredGrants:
    """What has to be stored about grants with the next records.

    Attributes:
        lifetime_s: the longest lifetime that a device may still rely on, in seconds.
    """

    def __init__(self, stored: StoredGrants, own_lifetime_s: float) -> None:
        """Start with what is stored.

        Args:
            stored: what an earlier process stored.
            own_lifetime_s: the lifetime of this process's grants.
        """
        self.lifetime_s = max(own_lifetime_s, stored.lifetime_s)
        self._own_lifetime_s = own_lifetime_s
        self._given_up = dict(stored.given_up)
        self._waiting: list[GivenUpTraining | GrantLifetime] = []

    def take(self) -> list[GivenUpTraining | GrantLifetime]:
        """Return the records to store, and mark them as stored."""
        taken, self._waiting = self._waiting, []
        return taken

    def note(self, device_ids: Iterable[str], leftover: Callable[[str], GivenUpTraining | None]) -> None:
        """Schedule storing which trainings may outlast their round or run, which a restart may not load.

        Args:
            device_ids: the devices of the round or run, or more.
            leftover: returns a device's training that nobody waits for; None if there is none.
        """
        for device_id in device_ids:
            training = leftover(device_id)
            if training is not None and self._given_up.get(device_id) != training:
                self._given_up[device_id] = training
                self._waiting.append(training)

    def check(self, leftover: Callable[[str], GivenUpTraining | None]) -> None:
        """Schedule storing which trainings are over.

        Args:
            leftover: as above.
        """
        for device_id, stored in list(self._given_up.items()):
            training = leftover(device_id)
            if training is None or training.plan_id != stored.plan_id:
                del self._given_up[device_id]
                self._waiting.append(GivenUpTraining(device_id, None))

    def earlier_lapsed(self) -> None:
        """Schedule storing the own lifetime: every grant of an earlier process has lapsed or was renewed since."""
        if self.lifetime_s != self._own_lifetime_s:
            self.lifetime_s = self._own_lifetime_s
            self._waiting.append(GrantLifetime(self.lifetime_s))


# --- Event records ----------------------------------------------------------------------------------------------------
# Records of what happened in the fleet: immutable, and stored as they are.

EVENTS_KEEP = timedelta(days=90)
MAX_EVENTS = 100_000


@dataclass(frozen=True)
class EventRecord:
    """One event.

    Attributes:
        event_id: a random id.
        at: when it happened.
        kind: what it is about: one of `coordinator.display.words.EVENT_KINDS`.
        text: what happened, for people.
        needs_attention: whether somebody should look at it.
        device_id: the device that it concerns; empty if it concerns no single one.
        run_id: the run that it concerns; empty if it concerns none.
        round: the run's round; 0 if it concerns none.
        supply: the supply whose budget changed, or that the device is behind; empty if there is none.
        caller: who caused it, such as an operator; empty if nobody did.
    """

    event_id: str
    at: datetime
    kind: str
    text: str
    needs_attention: bool = False
    device_id: str = ""
    run_id: str = ""
    round: int = 0
    supply: str = ""
    caller: str = ""


@dataclass(frozen=True)
class EventFilter:
    """Which events to read.

    Attributes:
        kinds: of these kinds; empty for all.
        device_id: of this device; empty for all.
        run_id: of this run; empty for all.
        supplies: at these supplies; None for all.
        since: leaves out earlier ones; None for none.
        limit: the most events, the newest ones.
    """

    kinds: Collection[str] = ()
    device_id: str = ""
    run_id: str = ""
    supplies: Collection[str] | None = None
    since: datetime | None = None
    limit: int = MAX_EVENTS


@dataclass(frozen=True)
class ExpiredEvents:
    """Which events to delete.

    Attributes:
        now: the time.
        keep: older events are deleted.
        max_events: how many are kept at most, the newest ones.
    """

    now: datetime
    keep: timedelta = EVENTS_KEEP
    max_events: int = MAX_EVENTS


# --- Records ----------------------------------------------------------------------------------------------------------

LONGEST_TEXT = MAX_DETAIL_CHARACTERS
"""The most characters of a detail or an error that are kept, since all devices and runs have one."""


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """One device.

    Attributes:
        device_id: its name.
        board: kind of board.
        provenance: simulated, replayed, hardware or stated.
        mode_count: size of its mode space.
        state: what it is doing.
        profiled_modes: the number of measured modes.
        detail: what it is doing or what is wrong, for display.
        fronts: its predicted fronts, one for each workload, the latest reported last.
        idle_w: watts while parked; None until reported.
    """

    device_id: str
    board: str
    provenance: str
    mode_count: int
    state: DeviceState = DeviceState.ENROLLED
    profiled_modes: int = 0
    detail: str = ""
    fronts: tuple[WorkloadFront, ...] = ()
    idle_w: float | None = None

    def __post_init__(self) -> None:
        # Ten thousand devices share few kinds of board: intern the strings.
        for name in ("board", "provenance"):
            object.__setattr__(self, name, sys.intern(getattr(self, name)))

    @property
    def latest_front(self) -> WorkloadFront | None:
        """The front that was reported last; None if there is none."""
        return self.fronts[-1] if self.fronts else None

    def front_for(self, workload: str) -> WorkloadFront | None:
        """The front for a workload; None if there is none."""
        return front_for(self.fronts, workload)

    @property
    def max_planned_w(self) -> float:
        """The most watts that the device draws in training, over the workloads of all its fronts; 0 without a front."""
        return max((each.front.max_planned_w for each in self.fronts), default=0.0)


@dataclass(frozen=True)
class NodeRecord:
    """One of Flower's nodes.

    Attributes:
        node_id: Flower's id, of 64 bits.
        device_id: the device behind it, whose agent may connect later.
        pairing_problem: why it cannot train on the device, with the remedy; empty if the node reached the device's
            agent, None if this was not checked.
    """

    node_id: int
    device_id: str
    pairing_problem: str | None = None


@dataclass(frozen=True)
class DeviceOverrides:
    """What the operator has set for one device by command, in addition to the site file.

    Attributes:
        device_id: the device.
        tags: words that rules use to select devices.
        drained: the device is excluded from new rounds.
        trusted_after: the newest plan when the device was last included again; earlier contradictions do not count.
            Empty if it was never included again.
        supply: the supply that the device's invite assigned; empty to leave it to the site file.
    """

    device_id: str
    tags: frozenset[str] = frozenset()
    drained: bool = False
    trusted_after: str = ""
    supply: str = ""


@dataclass(frozen=True)
class SupplyOverride:
    """The budget that the operator has set for one supply.

    Attributes:
        supply: its name.
        override: the watts; None if the override was cleared.
    """

    supply: str
    override: Override | None


@dataclass(frozen=True)
class SupplyEnergyBudget:
    """The energy budget that the operator has set for one supply.

    Attributes:
        supply: its name.
        budget: the joules of each period; None if the budget was removed.
    """

    supply: str
    budget: PeriodBudget | None


@dataclass(frozen=True)
class BatteryCharge:
    """The charge that the operator has stated for a battery.

    Attributes:
        holder: what has the battery: `supply/` or `device/` and a name.
        share: of its capacity, 0 to 1.
        measured_at: when it was stated.
    """

    holder: str
    share: float
    measured_at: datetime


@dataclass(frozen=True)
class PublishedReference:
    """A reference predictor that was published while the coordinator was running.

    Attributes:
        digest: sha256 of the manifest, hexadecimal.
        manifest: its manifest.
        weights: its weights.
    """

    digest: str
    manifest: bytes = field(repr=False)
    weights: bytes = field(repr=False)


@dataclass(frozen=True)
class RemovedReference:
    """A published reference predictor that was removed.

    Attributes:
        digest: sha256 of its manifest, hexadecimal.
    """

    digest: str


@dataclass(frozen=True)
class PinnedReferences:
    """The reference predictors that agents transfer from.

    Attributes:
        digests: digests of published predictors; empty for the one that the coordinator was started with.
    """

    digests: tuple[str, ...]


@dataclass(frozen=True)
class ObservedTraining:
    """The observed time and power of one device's training in a round.

    Attributes:
        device_id: the device.
        epoch_s: seconds per epoch.
        power_w: mean watts while training.
        beside_duty: the device answered requests meanwhile. The observed seconds then depend on how many arrived.
    """

    device_id: str
    epoch_s: float
    power_w: float
    beside_duty: bool = False

    def __post_init__(self) -> None:
        if not (0 < self.epoch_s < float("inf") and 0 < self.power_w < float("inf")):
            raise InvalidInputError(
                f"{self.device_id}: observed seconds and watts must be finite and above 0,"
                f" not {self.epoch_s} and {self.power_w}"
            )

    def training_s(self, planned: Assignment) -> float:
        """Seconds of the whole training; the warm-up is not observed, so its prediction is used."""
        return planned.training_s(self.epoch_s)

    def energy_j(self, planned: Assignment) -> float:
        """Joules of the whole training, assuming the observed watts also during its warm-up."""
        return self.power_w * self.training_s(planned)


@dataclass(frozen=True)
class RoundObservation:
    """One device's observation in a round: the part of the round's record that changes when it is reported.

    Attributes:
        plan_id: the round's plan.
        observed: the observation.
    """

    plan_id: str
    observed: ObservedTraining


@dataclass(frozen=True)
class TrainingEnergy:
    """The energy of one device's training in a run with an energy budget.

    Attributes:
        plan_id: the round's plan.
        device_id: the device.
        energy_j: joules above idle that the board has drawn; 0 if the training certainly never began.
        set_aside_j: joules that were set aside for it, which this report replaces.
    """

    plan_id: str
    device_id: str
    energy_j: float
    set_aside_j: float


@dataclass(frozen=True)
class CountedEnergy:
    """What the trainings of one round count for the energy budgets and the battery of a supply, or for a battery.

    Attributes:
        plan_id: the round's plan.
        holder: `supply/` or `device/` and a name: devices behind this supply, but not behind those below it.
        planned_at: when the round was planned, which decides to which day, week or month it belongs.
        ends_at: when all its trainings must have ended.
        set_aside_j: joules above idle of the trainings that have not reported.
        spent_j: joules above idle that the others have reported.
        reported_at: when the last one of them has reported; None if none has.
    """

    plan_id: str
    holder: str
    planned_at: datetime
    ends_at: datetime
    set_aside_j: float
    spent_j: float
    reported_at: datetime | None = None


@dataclass(frozen=True)
class ContainedEnergy:
    """A `CountedEnergy` of a device that counts no more, since a newer reading of its battery contains it.

    Attributes:
        plan_id: the round's plan.
        holder: `device/` and the device's id.
    """

    plan_id: str
    holder: str


@dataclass(frozen=True)
class DeviceResult:
    """The result of one device's part in a round, as the Flower server saw it.

    Attributes:
        device_id: the device.
        failure: why there was no usable reply; empty if there was one.
        num_examples: its weight in the aggregation, for the work that was done; None if it is unknown.
        loss: mean training loss; None if the app reports none.
        share: fraction of the assigned work that was done, 0 to 1.
        late: the round ended without waiting for the training, whose update a later round uses. This is no failure.
    """

    device_id: str
    failure: str = ""
    num_examples: float | None = None
    loss: float | None = None
    share: float = 1.0
    late: bool = False

    def __post_init__(self) -> None:
        if self.num_examples is not None and not 0 <= self.num_examples < float("inf"):
            raise InvalidInputError(
                f"{self.device_id}: the number of examples must be 0 or more and finite, not {self.num_examples}"
            )
        if self.loss is not None and not abs(self.loss) < float("inf"):
            raise InvalidInputError(f"{self.device_id}: a loss must be finite or left out, not {self.loss}")
        if not 0 <= self.share <= 1:
            raise InvalidInputError(f"{self.device_id}: the share of its work must be 0 to 1, not {self.share}")


class _WithResults:
    """The lists that planned and unplanned rounds derive from the results of their devices."""

    results: tuple[DeviceResult, ...]

    @property
    def failed(self) -> tuple[str, ...]:
        """Devices that sent no usable reply."""
        return tuple(result.device_id for result in self.results if result.failure)

    @property
    def late(self) -> tuple[str, ...]:
        """Devices that were still training when the round ended without waiting for them."""
        return tuple(result.device_id for result in self.results if result.late)


@dataclass(frozen=True)
class RoundRecord(_WithResults):
    """One planned round.

    Attributes:
        plan_id: its id.
        run_id: Flower's run.
        number: from 1.
        epochs: the most local epochs of a chosen device.
        plan: the plan.
        nodes: Flower's node id of every chosen device.
        idle_w: total idle watts of all devices that were not chosen.
        observations: by device id.
        results: results of the chosen devices that were sent a training; empty until the round is finished.
        metrics: what the strategy reported for the round, such as accuracy.
        wall_s: duration at the Flower server in seconds; None while the round runs.
        energies: what trainings have drawn, by device id; empty in a run without an energy budget.
    """

    plan_id: str
    run_id: str
    number: int
    epochs: float
    plan: RoundPlan
    nodes: dict[str, int]
    idle_w: float
    observations: dict[str, ObservedTraining] = field(default_factory=dict)
    results: tuple[DeviceResult, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    wall_s: float | None = None
    energies: dict[str, TrainingEnergy] = field(default_factory=dict)

    @property
    def set_aside_j(self) -> float | None:
        """Joules above idle that were set aside for the trainings; None in a run without an energy budget."""
        return self.plan.set_aside_j

    @property
    def _is_observed(self) -> bool:
        """Whether every chosen device was observed; False if a trim stopped all of them."""
        chosen = self.plan.assignments
        # The lengths first: this is asked after each observation, of rounds with thousands of devices.
        enough = 0 < len(chosen) <= len(self.observations)
        return enough and all(each.device_id in self.observations for each in chosen)

    @property
    def observed_site_w(self) -> float | None:
        """Observed watts of the chosen and the idling devices; None until every chosen device was observed."""
        if not self._is_observed:
            return None
        return self.idle_w + sum(observed.power_w for observed in self.observations.values())

    @property
    def observed_s(self) -> float | None:
        """Observed seconds of the slowest chosen device; None until every chosen device was observed."""
        if not self._is_observed:
            return None
        return max(self.observations[each.device_id].training_s(each) for each in self.plan.assignments)

    @property
    def training_j(self) -> float | None:
        """Joules of the trainings that were observed, without idling devices; None until one was observed.

        They include late trainings and those of devices that a trim has stopped.
        """
        if not self.observations:
            return None
        return sum(seen.energy_j(self.planned(device_id)) for device_id, seen in self.observations.items())

    def planned(self, device_id: str) -> Assignment:
        """Return a device's assignment: the newest, or the first one if a trim has stopped the device.

        Raises:
            UnknownRecordError: the plan never had the device.
        """
        found = self.plan.assignment_of(device_id) or self.plan.original.assignment_of(device_id)
        if found is None:
            raise UnknownRecordError(f"{device_id} is not part of plan {self.plan_id}")
        return found


@dataclass(frozen=True)
class UnplannedRound(_WithResults):
    """A round that trained without a plan and a budget, because its Flower server could not reach the coordinator.

    Attributes:
        run_id: Flower's run.
        number: from 1.
        began_at: when it began, as its Flower server reported afterwards.
        wall_s: duration at the Flower server in seconds.
        results: results of the nodes that were sent a training; an unknown device is named `node N`.
        metrics: what the strategy reported for the round, such as accuracy.
    """

    run_id: str
    number: int
    began_at: datetime
    wall_s: float
    results: tuple[DeviceResult, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def ended_at(self) -> datetime:
        """When it ended."""
        return self.began_at + timedelta(seconds=self.wall_s)


@dataclass(frozen=True)
class RunRecord:
    """One Flower run.

    Attributes:
        run_id: Flower's id.
        strategy: name of the wrapped strategy.
        rounds: number of requested rounds.
        initial_metrics: metrics before the first round.
        error: why it ended early; empty while it runs and after it completed.
        finished: whether it has ended.
        owner: hash of the app's credentials; empty if the run has no owner.
        workload: its workload.
        name: what people call it; no two runs have the same. By default its id.
        labels: words of the app's author, by which people find it.
        needs_all: whether its strategy needs the update of every device. Its plans select all that the budgets allow,
            whatever the policy.
        energy_budget_j: joules above idle that its trainings may draw; None without an energy budget.
        surveys_j: of these, what counts for its surveys: what was set aside for their trainings, or less as reported.
    """

    run_id: str
    strategy: str
    rounds: int
    initial_metrics: dict[str, float] = field(default_factory=dict)
    error: str = ""
    finished: bool = False
    owner: str = ""
    workload: Workload = UNNAMED
    name: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    needs_all: bool = False
    energy_budget_j: float | None = None
    surveys_j: float = 0.0

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", self.run_id)


@dataclass(frozen=True)
class ForgottenDevice:
    """A device that was removed, with its overrides and node bindings; it may enrol again.

    Attributes:
        device_id: its name.
    """

    device_id: str


OperatorRecord = (
    DeviceOverrides | SupplyOverride | PublishedReference | RemovedReference | PinnedReferences | ForgottenDevice
)
"""Any record that the operator changes by command."""

GrantRecord = GivenUpTraining | GrantLifetime
"""Any stored record about grants, apart from their plans."""

StoredRecord = (
    DeviceRecord
    | NodeRecord
    | RunRecord
    | RoundRecord
    | RoundObservation
    | TrainingEnergy
    | CountedEnergy
    | ContainedEnergy
    | SupplyEnergyBudget
    | BatteryCharge
    | UnplannedRound
    | OperatorRecord
    | GrantRecord
    | IdentityRecord
    | EventRecord
    | ExpiredEvents
)
"""Any record to store; it replaces the stored record with the same key."""


def parts_of(results: Iterable[DeviceResult]) -> dict[str, Participation]:
    """Convert the devices' results in a round to the form that policies need."""
    return {
        each.device_id: Participation(
            # A store may contain implausible values.
            bool(each.failure),
            plausible_examples(each.num_examples),
            plausible_loss(each.loss),
            each.late,
        )
        for each in results
    }


def plan_id_of(run_id: str, number: int) -> str:
    """The id of a round's plan."""
    return f"{run_id}/{number}"


def run_of(plan_id: str) -> str:
    """The run that a plan belongs to."""
    return plan_id.rpartition("/")[0]
