"""What batteries and the energy budgets of supplies leave for rounds: their charges, and what rounds have drawn."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from fnmatch import fnmatchcase

from coordinator.errors import UnknownRecordError
from coordinator.state.operator import OperatorSettings
from coordinator.state.records import BatteryCharge, ContainedEnergy, CountedEnergy, RoundRecord, TrainingEnergy
from wattfleet.core.budgets import (
    Battery,
    Charge,
    DatedHarvest,
    EnergyAccount,
    MeasuredHarvest,
    PeriodBudget,
    Supplies,
)
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.planning import (
    BatteryLevel,
    BatteryStore,
    EnergyStore,
    EnergyStores,
    PeriodStore,
    battery_stores,
    left_j,
)

KEPT = timedelta(days=63)
"""How long it is known what a round has drawn: longer than a month and the longest training."""

_SURELY_OVER = timedelta(days=1)
"""A reading that is so much newer than the end of a training contains it, however clocks have jumped."""

_SOON_S = 3600.0
"""Seconds of a round for which the operator is told what a battery leaves."""

_ROUNDING = 1e-9
"""Relative tolerance for sums of joules, which are not exact in binary."""

OF_SUPPLY, OF_DEVICE = "supply/", "device/"
"""The beginnings of the names of holders: what a round draws counts for a supply, and for a device with a battery."""

CHARGE, HARVEST = "charge", "harvest"
"""What is read of a battery."""


@dataclass(frozen=True)
class PlacedBattery:
    """A battery of the site file.

    Attributes:
        name: its name in the site file.
        battery: what it is.
        source: where its charge comes from: query, file, agent or operator.
        supply: the supply that it belongs to; empty if each of some devices has such a battery.
        devices: patterns of the ids of these devices.
    """

    name: str
    battery: Battery
    source: str
    supply: str = ""
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class BatteryState:
    """A battery as operators see it.

    Attributes:
        placed: the battery.
        holder: the supply or the device that has it.
        charge: its newest reading; None without any.
        level: its estimated energy now.
        left_j: joules that trainings of the next hour may draw.
        problem: why its charge or harvest is not known; empty if all is well.
    """

    placed: PlacedBattery
    holder: str
    charge: Charge | None
    level: BatteryLevel
    left_j: float
    problem: str


class SharedEnergy:
    """The batteries of devices and supplies, and the energy budgets of supplies.

    Attributes:
        budgets: the energy budgets of supplies, by supply.
        problems: why the newest charge or harvest of a holder could not be read, by holder and one of these words.
    """

    def __init__(
        self,
        supplies: Supplies,
        operator: OperatorSettings,
        now: Callable[[], datetime],
        batteries: Sequence[PlacedBattery] = (),
        budgets: Mapping[str, PeriodBudget] | None = None,
        counted: Sequence[CountedEnergy] = (),
        charges: Mapping[str, Charge] | None = None,
    ) -> None:
        """Start from what a store holds.

        Args:
            supplies: the site's supplies.
            operator: knows the supply that each device is behind.
            now: returns the date and time, with a UTC offset.
            batteries: the batteries of the site file.
            budgets: the energy budgets, by supply; those of missing supplies are ignored.
            counted: what rounds have drawn and set aside.
            charges: the charges that the operator has stated, by holder.
        """
        self.budgets = {name: each for name, each in (budgets or {}).items() if name in supplies.names}
        self.problems: dict[tuple[str, str], str] = {}
        self._supplies, self._operator, self._now = supplies, operator, now
        self._of_supply = {each.supply: each for each in batteries if each.supply}
        self._of_devices = tuple(each for each in batteries if not each.supply)
        self._counted: dict[str, dict[str, CountedEnergy]] = {}  # by holder and plan
        for each in counted:
            self._counted.setdefault(each.holder, {})[each.plan_id] = each
        self._contained: list[ContainedEnergy] = []
        stated = charges or {}
        self._charges = {holder: charge for holder, charge in stated.items() if self._is_stated(holder)}
        self._harvests: dict[str, MeasuredHarvest] = {}

    @property
    def now(self) -> datetime:
        """The date and time."""
        return self._now()

    @property
    def is_empty(self) -> bool:
        """Whether nothing limits the energy of any device."""
        return not (self.budgets or self._of_supply or self._of_devices)

    def battery_of(self, device_id: str) -> PlacedBattery | None:
        """The battery of a device; None if it has none of its own."""
        for placed in self._of_devices:
            if any(fnmatchcase(device_id, pattern) for pattern in placed.devices):
                return placed
        return None

    def is_limited(self, device_id: str) -> bool:
        """Whether a battery or an energy budget limits a device."""
        return not self.is_empty and bool(self._holders(device_id))

    def _holders(self, device_id: str) -> list[str]:
        """The holders that what a device draws counts for."""
        try:
            supply = self._operator.supply_of(device_id)
        except InvalidInputError:  # the site file no longer places it
            return []
        limited = any(name in self.budgets or name in self._of_supply for name in self._supplies.path(supply))
        found = [OF_SUPPLY + supply] if limited else []
        return found if self.battery_of(device_id) is None else [*found, OF_DEVICE + device_id]

    # --- charges ------------------------------------------------------------------------------------------------

    def placed_at(self, holder: str) -> PlacedBattery | None:
        """The battery of a holder; None if there is none."""
        if holder.startswith(OF_SUPPLY):
            return self._of_supply.get(holder.removeprefix(OF_SUPPLY))
        return self.battery_of(holder.removeprefix(OF_DEVICE))

    def _is_stated(self, holder: str) -> bool:
        placed = self.placed_at(holder)
        return placed is not None and placed.source == "operator"

    def report_charge(self, holder: str, charge: Charge) -> None:
        """Record a battery's newest charge."""
        self._charges[holder] = charge

    def report_harvest(self, holder: str, harvest: MeasuredHarvest) -> None:
        """Record what charges a battery."""
        self._harvests[holder] = harvest

    def state_charge(self, name: str, share: float) -> BatteryCharge:
        """Record the charge that the operator states for a battery; returns the record to store.

        Args:
            name: the device or supply that has the battery.
            share: of its capacity, 0 to 1.

        Raises:
            UnknownRecordError: it has no battery.
            InvalidInputError: its charge is read from elsewhere.
            ImplausibleError: the share is not 0 to 1.
        """
        holder = (OF_SUPPLY if name in self._supplies.names else OF_DEVICE) + name
        placed = self.placed_at(holder)
        if placed is None:
            raise UnknownRecordError(f"{name!r} has no battery: see [batteries] in the site file")
        if placed.source != "operator":
            raise InvalidInputError(
                f"the charge of {name} comes from its {placed.source}: write charge = {{ operator = true }} in"
                f" [batteries.{placed.name}] of the site file to state it by command"
            )
        charge = Charge(share, self._now())
        self.report_charge(holder, charge)
        return BatteryCharge(holder, charge.share, charge.measured_at)

    # --- budgets ------------------------------------------------------------------------------------------------

    def set_budget(self, supply: str, budget: PeriodBudget | None) -> None:
        """Set or remove the energy budget of a supply. What was drawn in the period before counts as far as known.

        Raises:
            UnknownRecordError: the supply does not exist.
        """
        if supply not in self._supplies.names:
            raise UnknownRecordError(f"the site has no supply {supply!r}; it has {', '.join(self._supplies.names)}")
        if budget is None:
            self.budgets.pop(supply, None)
        else:
            self.budgets[supply] = budget

    def account(self, supply: str) -> EnergyAccount | None:
        """What is left of a supply's energy budget in this period; None without a budget."""
        budget = self.budgets.get(supply)
        if budget is None:
            return None
        now, behind = self._now(), {OF_SUPPLY + name for name in self._supplies.behind(supply)}
        begin, end = budget.begin(now), budget.end(now)
        of_holders = (list(self._counted.get(holder, {}).values()) for holder in behind)  # metrics read it, too
        rows = [each for of_holder in of_holders for each in of_holder if begin <= each.planned_at < end]
        return EnergyAccount(
            budget.budget_j, sum(each.spent_j for each in rows), sum(each.set_aside_j for each in rows)
        )

    # --- rounds -------------------------------------------------------------------------------------------------

    def planned(self, record: RoundRecord) -> None:
        """Set aside the joules of a round. Devices with limited energy take part in no survey."""
        if self.is_empty:
            return
        now, plan_id = self._now(), record.plan_id
        for each in record.plan.assignments:
            if each.longest_s is None:
                continue
            for holder in self._holders(each.device_id):
                of_holder = self._counted.setdefault(holder, {})
                if plan_id not in of_holder:
                    self._forget_old(holder, now)
                before = of_holder.get(plan_id) or CountedEnergy(plan_id, holder, now, now, 0.0, 0.0)
                of_holder[plan_id] = replace(
                    before,
                    set_aside_j=before.set_aside_j + each.set_aside_j,
                    ends_at=max(before.ends_at, now + timedelta(seconds=each.longest_s)),
                )

    def reported(self, training: TrainingEnergy) -> list[CountedEnergy]:
        """Replace what was set aside for a training by what it has drawn; returns the records to store."""
        changed = []
        for holder in self._holders(training.device_id):
            before = self._counted.get(holder, {}).get(training.plan_id)
            if before is None:
                continue
            after = replace(
                before,
                set_aside_j=max(0.0, before.set_aside_j - training.set_aside_j),
                spent_j=before.spent_j + training.energy_j,
                reported_at=self._now(),
            )
            self._counted[holder][training.plan_id] = after
            changed.append(after)
        return changed

    def of_plan(self, plan_id: str) -> list[CountedEnergy]:
        """The records to store with a round's plan."""
        return [each[plan_id] for each in self._counted.values() if plan_id in each]

    def take_contained(self) -> list[ContainedEnergy]:
        """The records to store of rounds that batteries' readings contain by now; each is returned once."""
        taken, self._contained = self._contained, []
        return taken

    def _forget_old(self, holder: str, now: datetime) -> None:
        """Forget rounds that count no more: no period contains them, and a device's battery was read since."""
        read_at = (
            None if holder.startswith(OF_SUPPLY) or holder not in self._charges else self._charges[holder].measured_at
        )
        of_holder = self._counted[holder]
        for each in list(of_holder.values()):
            is_contained = read_at is not None and read_at - each.ends_at > _SURELY_OVER
            if is_contained:
                self._contained.append(ContainedEnergy(each.plan_id, holder))
            if is_contained or now - each.planned_at > KEPT:
                del of_holder[each.plan_id]

    def has(self, needed_j: Mapping[str, float], idle_w: Mapping[str, float], in_flight: Collection[str]) -> bool:
        """Whether the stores still suffice for trainings that were planned shortly before.

        Args:
            needed_j: joules that are set aside, by device id.
            idle_w: as in `stores`.
            in_flight: as in `stores`.
        """
        stores = self.stores(needed_j, idle_w, in_flight)
        for device_id, joules in needed_j.items():
            if (own := stores.devices.get(device_id)) is not None and joules > _allowed_j(own):
                return False
        for supply, limits in stores.supplies.items():
            behind = set(self._supplies.behind(supply))
            total_j = sum(
                joules for device_id, joules in needed_j.items() if self._operator.supply_of(device_id) in behind
            )
            if any(total_j > _allowed_j(each) for each in limits):
                return False
        return True

    def stores(
        self, device_ids: Collection[str], idle_w: Mapping[str, float], in_flight: Collection[str]
    ) -> EnergyStores:
        """What limits the energy of a round that is planned now.

        Args:
            device_ids: the devices that may train.
            idle_w: watts of every device while it idles, by device id.
            in_flight: ids of the plans by which devices may still train.
        """
        now = self._now()
        supplies: dict[str, list[EnergyStore]] = {name: [] for name in self._supplies.names}
        for name, budget in self.budgets.items():
            account = self.account(name)
            assert account is not None, "it has a budget"
            what = f"the energy budget of {name} per {budget.per.value}"
            supplies[name].append(PeriodStore(what, account.left_j, budget.budget_j, budget.end(now)))
        found = {holder: store for holder, _, store in self._batteries(device_ids, idle_w, in_flight)}
        for holder, store in found.items():
            if holder.startswith(OF_SUPPLY):
                supplies[holder.removeprefix(OF_SUPPLY)].append(store)
        own = {holder.removeprefix(OF_DEVICE): each for holder, each in found.items() if holder.startswith(OF_DEVICE)}
        limits = {name: tuple(each) for name, each in supplies.items() if each}
        return EnergyStores(limits, own, dict(self._paths(idle_w)))

    def _batteries(
        self, device_ids: Iterable[str], idle_w: Mapping[str, float], in_flight: Collection[str]
    ) -> Iterator[tuple[str, BatteryLevel, BatteryStore]]:
        """The batteries of supplies, and then those of some devices: the holder of each, and what it leaves."""
        holders = [OF_SUPPLY + name for name in self._of_supply]
        holders += [OF_DEVICE + each for each in device_ids if self._of_devices and self.battery_of(each) is not None]
        levels = list(self._levels(holders, idle_w, in_flight))
        return zip(holders, levels, battery_stores(levels, self._now()), strict=True)

    def _levels(
        self, holders: Sequence[str], idle_w: Mapping[str, float], in_flight: Collection[str]
    ) -> Iterator[BatteryLevel]:
        now, idle_of = self._now(), self._idle_behind(idle_w)
        for holder in holders:
            placed = self.placed_at(holder)
            assert placed is not None, "it has a battery"
            charge, name = self._charges.get(holder), holder.partition("/")[2]
            is_own = holder.startswith(OF_DEVICE)
            idle = idle_w.get(name, 0.0) if is_own else idle_of[name]
            holding = [holder] if is_own else [OF_SUPPLY + below for below in self._supplies.behind(name)]
            rows = (each for below in holding for each in list(self._counted.get(below, {}).values()))
            drawn_j = sum(_unseen_j(each, charge, each.plan_id in in_flight) for each in rows)
            harvest = self._harvests.get(holder)
            estimate = placed.battery.estimate(charge, now, idle, drawn_j, harvest)
            text = "its battery" if is_own else f"the battery of {name}"
            yield BatteryLevel(text, placed.battery, estimate.energy_j, idle, harvest, estimate.problem)

    def _idle_behind(self, idle_w: Mapping[str, float]) -> dict[str, float]:
        """The idle watts of all devices behind each supply with a battery."""
        total = dict.fromkeys(self._of_supply, 0.0)
        if not total:
            return total
        for device_id, path in self._paths(idle_w):
            for name in path:
                if name in total:
                    total[name] += idle_w[device_id]
        return total

    def _paths(self, device_ids: Iterable[str]) -> Iterator[tuple[str, Sequence[str]]]:
        """Devices, each with the supplies that feed it; not those that the site file no longer places."""
        for device_id in device_ids:
            with suppress(InvalidInputError):
                yield device_id, self._supplies.path(self._operator.supply_of(device_id))

    def battery_states(self, idle_w: Mapping[str, float], in_flight: Collection[str]) -> list[BatteryState]:
        """All batteries as operators see them: those of supplies, and then those of known devices."""
        found = []
        for holder, level, store in self._batteries(sorted(idle_w), idle_w, in_flight):
            placed = self.placed_at(holder)
            assert placed is not None, "it has a battery"
            unread = [
                f"its {what} cannot be read: {why}"
                for what in (CHARGE, HARVEST)
                if (why := self.problems.get((holder, what)))
            ]
            harvest = placed.battery.harvest
            if isinstance(harvest, DatedHarvest) and self.now >= harvest.ends:
                unread.append("the table of its harvest has ended: write new rows, and restart the coordinator")
            problem = "; ".join(filter(None, (level.problem, *unread)))
            spare_j = left_j(store, _SOON_S)
            found.append(BatteryState(placed, holder, self._charges.get(holder), level, spare_j, problem))
        return found


def _allowed_j(store: EnergyStore) -> float:
    """The joules that planned trainings may draw from a store.

    Of a battery, slightly more than it leaves: between a plan and its check, idle devices draw some.
    """
    joules = left_j(store, 0.0)
    return joules * (1 + _ROUNDING) if isinstance(store, PeriodStore) else joules * 1.01 + 1.0


def _unseen_j(counted: CountedEnergy, charge: Charge | None, is_in_flight: bool) -> float:
    """The joules of a round that a battery's newest reading does not contain yet, with those that are set aside."""
    if charge is None:
        return counted.set_aside_j + counted.spent_j
    is_open = is_in_flight or charge.measured_at <= counted.ends_at
    set_aside_j = counted.set_aside_j if is_open else 0.0
    is_new = charge.measured_at <= (counted.reported_at or counted.planned_at)
    return set_aside_j + (counted.spent_j if is_new else 0.0)
