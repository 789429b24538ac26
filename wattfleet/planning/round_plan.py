"""A round's plan, as the rest of the house reads it."""

from __future__ import annotations

from dataclasses import dataclass

from wattfleet.modes import PowerMode


@dataclass(frozen=True)
class Assignment:
    """One chosen device's part in a round.

    Attributes:
        device_id: the device.
        mode: the power mode it trains in.
        epoch_s: predicted median seconds per epoch.
        power_w: predicted median watts.
        power_limit_w: watts set aside for it.
        warmup_s: predicted seconds that its training takes beyond its epochs, once.
    """

    device_id: str
    mode: PowerMode
    epoch_s: float
    power_w: float
    power_limit_w: float
    warmup_s: float


@dataclass(frozen=True)
class Decision:
    """Why a device was or was not chosen, in words."""

    device_id: str
    selected: bool
    reason: str


@dataclass(frozen=True)
class SupplyUse:
    """What a plan sets aside at one supply.

    Attributes:
        supply: its name.
        budget_w: watts that it allows.
        planned_w: watts set aside behind it, idling devices included.
    """

    supply: str
    budget_w: float
    planned_w: float


@dataclass(frozen=True)
class RoundPlan:
    """The plan of one round.

    Attributes:
        assignments: the chosen devices, by id.
        decisions: one for every device that was looked at, by id.
        duration_s: seconds by which the slowest chosen device is done, at the quantile that is planned with.
        planned_w: watts set aside at all sites, idling devices included.
        site_budget_w: watts that all sites allow.
        supplies: the same for every supply.
        deadline_s: seconds of training after which a device stops; None where it trains to its end.
        first_planned: the plan before it was trimmed, without its decisions; None where it never was.
    """

    assignments: tuple[Assignment, ...]
    decisions: tuple[Decision, ...]
    duration_s: float
    planned_w: float
    site_budget_w: float
    supplies: tuple[SupplyUse, ...] = ()
    deadline_s: float | None = None
    first_planned: RoundPlan | None = None

    @property
    def at_first(self) -> RoundPlan:
        """The plan before any trim."""
        return self.first_planned or self

    @property
    def in_other_mode(self) -> tuple[str, ...]:
        """Devices that a trim gave another mode, by id."""
        now = {each.device_id: each.mode for each in self.assignments}
        return tuple(k.device_id for k in self.at_first.assignments if now.get(k.device_id) not in (None, k.mode))

    @property
    def stopped(self) -> tuple[str, ...]:
        """Devices that a trim stopped, by id."""
        going_on = {each.device_id for each in self.assignments}
        return tuple(each.device_id for each in self.at_first.assignments if each.device_id not in going_on)
