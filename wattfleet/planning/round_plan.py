"""The plan of one round: assignments, decisions and the power of every supply."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from wattfleet.modes import PowerMode


@dataclass(frozen=True, slots=True)
class Assignment:
    """The assignment of one selected device.

    Attributes:
        device_id: the device.
        mode: the power mode it trains in.
        epoch_s: predicted median seconds per epoch.
        power_w: predicted median watts.
        power_limit_w: watts allocated to it.
        warmup_s: predicted seconds of its warm-up, once per training.
        epoch_log_sd: standard deviation of the logarithm of the predicted time.
        power_log_sd: standard deviation of the logarithm of the predicted power.
        epochs: local epochs that it trains.
        batch: samples in a batch that the prediction holds for; None if they are unknown.
        profiled_modes: number of modes that the device has measured with the workload; 0 if the prediction is a prior.
        is_length_assumed: whether the number of minibatches in the device's epoch is unknown, so that its epoch may
            take far longer. The device then has no deadline in this round.
    """

    device_id: str
    mode: PowerMode
    epoch_s: float
    power_w: float
    power_limit_w: float
    warmup_s: float
    epoch_log_sd: float = 0.0
    power_log_sd: float = 0.0
    epochs: float = 1.0
    batch: int | None = None
    profiled_modes: int = 0
    is_length_assumed: bool = False

    def training_s(self, epoch_s: float) -> float:
        """Seconds of the whole training at `epoch_s` seconds per epoch, including the predicted warm-up."""
        return self.warmup_s + self.epochs * epoch_s

    def with_limit(self, power_limit_w: float) -> Assignment:
        """The same assignment with other watts allocated to it."""
        return replace(self, power_limit_w=power_limit_w)


@dataclass(frozen=True)
class Decision:
    """Whether a device was selected, and the reason as text."""

    device_id: str
    selected: bool
    reason: str


@dataclass(frozen=True)
class SupplyUse:
    """The power that a plan allocates at one supply.

    Attributes:
        supply: name of the supply.
        budget_w: its budget in watts.
        planned_w: watts allocated to its devices, including idle ones.
    """

    supply: str
    budget_w: float
    planned_w: float


@dataclass(frozen=True)
class RoundPlan:
    """The plan of one round.

    Attributes:
        assignments: the selected devices, by id.
        decisions: one for every device that was considered, by id.
        duration_s: the makespan: seconds until the slowest selected device finishes, at the planning quantile.
        planned_w: watts allocated at all sites, including idle devices.
        site_budget_w: budget of all sites together, W.
        supplies: allocated power and budget of every supply.
        deadline_s: seconds of training after which a device stops; None without a deadline.
        first_planned: the plan before it was trimmed, without its decisions; None if it was never trimmed.
        enough_replies: number of devices that the policy wanted without over-selection; None for all.
    """

    assignments: tuple[Assignment, ...]
    decisions: tuple[Decision, ...]
    duration_s: float
    planned_w: float
    site_budget_w: float
    supplies: tuple[SupplyUse, ...] = ()
    deadline_s: float | None = None
    first_planned: RoundPlan | None = None
    enough_replies: int | None = None

    def assignment_of(self, device_id: str) -> Assignment | None:
        """The assignment of a device; None if the plan has none for it."""
        found = bisect_left(self.assignments, device_id, key=lambda each: each.device_id)
        if found == len(self.assignments) or self.assignments[found].device_id != device_id:
            return None
        return self.assignments[found]

    @property
    def original(self) -> RoundPlan:
        """The plan before any trim."""
        return self.first_planned or self

    @property
    def in_other_mode(self) -> tuple[str, ...]:
        """Ids of the devices that a trim moved to another mode."""
        now = {each.device_id: each.mode for each in self.assignments}
        return tuple(k.device_id for k in self.original.assignments if now.get(k.device_id) not in (None, k.mode))

    @property
    def stopped(self) -> tuple[str, ...]:
        """Ids of the devices that a trim stopped."""
        continuing = {each.device_id for each in self.assignments}
        return tuple(each.device_id for each in self.original.assignments if each.device_id not in continuing)
