"""What batteries and the energy budgets of supplies leave for a round, and when they will leave more.

A battery keeps its reserve if it holds, at every moment, at least its *need*: the reserve, and what its idle devices
draw from then on until its harvest covers them. A round may spend what the battery holds above its need, at the moment
of the round at which this is least: a full battery holds less above its need at dusk than at noon.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Protocol

import numpy as np

from wattfleet.core.budgets import STEP_S, Battery, Harvest
from wattfleet.core.planning.curves import Headroom, Indices, Mask, Offer, Values

_LOOKAHEAD_STEPS = 96
"""Half hours from now in which a battery may become full enough."""

_STEPS_OF_A_DAY = 48

_CLOSE = 1e-9


def half_hours(within_s: Values | float) -> Indices:
    """The places in `EnergyStore.lefts_j` for some seconds."""
    steps = np.ceil(np.asarray(within_s, dtype=np.float64) / STEP_S)
    return np.minimum(steps, _LOOKAHEAD_STEPS).astype(np.intp)


def left_j(store: EnergyStore, within_s: float) -> float:
    """The joules above idle that trainings may draw together within some seconds from now."""
    return float(store.lefts_j[half_hours(within_s)])


class EnergyStore(Protocol):
    """Something that holds a limited number of joules for trainings."""

    @property
    def name(self) -> str:
        """What it is, for reasons, such as "its battery"."""
        ...

    @property
    def is_known(self) -> bool:
        """Whether its joules are known, now and later; otherwise a reading or a forecast may bring more."""
        ...

    @property
    def lefts_j(self) -> Values:
        """`[t]` joules above idle that trainings may draw together within no, one and more half hours; 0 or more."""
        ...

    def again(self, needed_j: float, within_s: float) -> datetime | None:
        """When so many joules will be left for trainings that last so long; None if that is not foreseen."""
        ...


@dataclass(frozen=True)
class PeriodStore:
    """The energy budget of a supply for a day, a week or a month.

    Attributes:
        name: for reasons.
        rest_j: joules that are left in this period.
        budget_j: joules of the next period.
        ends: when the next period begins.
        is_known: always.
    """

    name: str
    rest_j: float
    budget_j: float
    ends: datetime
    is_known: bool = True

    @property
    def lefts_j(self) -> Values:
        """What is left in this period: a training counts in the period in which it is planned."""
        return np.full(_LOOKAHEAD_STEPS + 1, max(0.0, self.rest_j))

    def again(self, needed_j: float, within_s: float) -> datetime | None:
        """The beginning of the next period, unless its budget is too small as well."""
        return self.ends if needed_j <= self.budget_j else None


@dataclass(frozen=True)
class BatteryLevel:
    """What is known of a battery now.

    Attributes:
        name: for reasons.
        battery: the battery.
        energy_j: joules that it holds.
        idle_w: watts of all its devices while they idle.
        harvest: what charges it; None for that of the battery.
        problem: why its energy is estimated low; empty if it is not.
    """

    name: str
    battery: Battery
    energy_j: float
    idle_w: float
    harvest: Harvest | None = None
    problem: str = ""


@dataclass(frozen=True)
class BatteryStore:
    """What a battery leaves for trainings.

    Attributes:
        name: for reasons.
        now: the time, with a UTC offset.
        spare_j: `[t]` joules above its need now, and after each of the next half hours without any training.
        is_known: whether its charge was read in time, and its harvest is foreseen and does not fill it day by day.
    """

    name: str
    now: datetime
    spare_j: Values
    is_known: bool = True

    @property
    def lefts_j(self) -> Values:
        """The least joules above its need at any moment until then."""
        return np.minimum.accumulate(np.maximum(self.spare_j, 0.0))

    def again(self, needed_j: float, within_s: float) -> datetime | None:
        """The first half hour from which so many joules are left for so long; None if there is none in two days."""
        # A training that begins in two days is judged as if each later day were like the second.
        following = self.spare_j[-_STEPS_OF_A_DAY:]
        spare_j = np.concatenate([self.spare_j, following, following])
        lefts_j = np.lib.stride_tricks.sliding_window_view(spare_j, int(half_hours(within_s)) + 1).min(axis=1)
        enough = np.flatnonzero(lefts_j[: _LOOKAHEAD_STEPS + 1] >= needed_j)
        if not len(enough):
            return None
        # On the half hour, so that the same reason keeps the same text for a while.
        at_s = self.now.timestamp() + float(enough[0]) * STEP_S
        return datetime.fromtimestamp(np.ceil(at_s / STEP_S) * STEP_S, timezone.utc)


def battery_stores(levels: Sequence[BatteryLevel], now: datetime) -> list[BatteryStore]:
    """What batteries leave for trainings, in the same order.

    Args:
        levels: the batteries.
        now: the time, with a UTC offset.
    """
    found: dict[int, BatteryStore] = {}
    alike: dict[tuple[int, int], list[int]] = {}
    for k, level in enumerate(levels):
        # Batteries of one kind are followed together: a fleet may have thousands.
        alike.setdefault((id(level.battery), id(level.harvest)), []).append(k)
    for places in alike.values():
        battery, harvest = levels[places[0]].battery, levels[places[0]].harvest
        idle_w = np.array([levels[k].idle_w for k in places])
        held_j = np.array([levels[k].energy_j for k in places])
        source = harvest or battery.harvest
        ends, followed = source.ends, timedelta(seconds=_LOOKAHEAD_STEPS * STEP_S)
        is_foreseen = ends is None or ends >= now + followed
        for k, spare_j in zip(places, _spare_j(battery, source, held_j, idle_w, now), strict=True):
            name = levels[k].name + (f" ({levels[k].problem})" if levels[k].problem else "")
            fills = spare_j[-1] > spare_j[-1 - _STEPS_OF_A_DAY]
            found[k] = BatteryStore(name, now, spare_j, is_foreseen and not fills and not levels[k].problem)
    return [found[k] for k in range(len(levels))]


def _spare_j(battery: Battery, harvest: Harvest, held_j: Values, idle_w: Values, now: datetime) -> Values:
    """`[n, t]` joules of batteries of one kind above their need, now and after each half hour without a training."""
    parked = int(np.ceil(battery.parked_s / STEP_S))
    harvest_w = np.array(harvest.least_w(now, STEP_S, _LOOKAHEAD_STEPS + parked))
    net_j = (harvest_w[None, :] - idle_w[:, None]) * STEP_S
    kept = battery.kept_share(STEP_S)
    level_j = np.empty((len(held_j), _LOOKAHEAD_STEPS + 1))
    level_j[:, 0] = held_j
    for step in range(_LOOKAHEAD_STEPS):
        level_j[:, step + 1] = np.clip(level_j[:, step] * kept + net_j[:, step], 0.0, battery.capacity_j)
    need_j = np.full_like(level_j, battery.reserve_j)
    for step in reversed(range(parked)):
        need_j = np.maximum(battery.reserve_j, (need_j - net_j[:, step : step + _LOOKAHEAD_STEPS + 1]) / kept)
    # A battery that is too small for a night would not keep its reserve, however full it is.
    spare_j: Values = np.where(need_j > battery.capacity_j, -battery.capacity_j, level_j - need_j)
    return spare_j


# --- Room of a round --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EnergyStores:
    """All stores of energy that limit a round.

    Attributes:
        supplies: the stores of each supply, which all devices behind it share.
        devices: the store of each device that has its own.
        paths: the supplies that feed each known device, also of devices that are busy or offline now.
    """

    supplies: Mapping[str, Sequence[EnergyStore]] = field(default_factory=dict)
    devices: Mapping[str, EnergyStore] = field(default_factory=dict)
    paths: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def limits(self, device_id: str, path: Sequence[str]) -> bool:
        """Whether any store limits a device.

        Args:
            device_id: the device.
            path: the supplies that feed it.
        """
        return device_id in self.devices or any(self.supplies.get(name) for name in path)

    def room(self, offers: Sequence[Offer], headroom: Headroom, supplies: Sequence[str]) -> StoreRoom:
        """What they leave for some devices.

        Args:
            offers: the devices.
            headroom: which supplies feed them.
            supplies: names of the supplies, by index.
        """
        plenty = np.full(_LOOKAHEAD_STEPS + 1, np.inf)
        shared_j = [np.minimum.reduce([plenty, *(s.lefts_j for s in self.supplies.get(name, ()))]) for name in supplies]
        own = (self.devices.get(offer.device_id) for offer in offers)
        own_j = np.array([plenty if each is None else each.lefts_j for each in own]).reshape(-1, len(plenty))
        return StoreRoom(self, np.array(shared_j), headroom.supply_at, own_j)

    def along(self, device_id: str, path: Sequence[str]) -> list[EnergyStore]:
        """The stores that limit a device: its own first, then those of its supplies, outwards."""
        own = self.devices.get(device_id)
        shared = [store for name in path for store in self.supplies.get(name, ())]
        return shared if own is None else [own, *shared]


@dataclass(frozen=True)
class StoreRoom:
    """The joules above idle that the stores leave for the trainings of a round.

    Attributes:
        stores: the stores.
        shared_j: `[s, t]` joules of each supply, as `EnergyStore.lefts_j`; infinite without a store.
        supply_at: `[levels, n]` the supplies that feed the devices, as in `Headroom`.
        own_j: `[n, t]` joules of the devices' own batteries; infinite without one.
    """

    stores: EnergyStores
    shared_j: Values
    supply_at: Indices
    own_j: Values

    def suffices(self, owner: Indices, costs_j: Values, longest_s: Values) -> Mask:
        """`[m]` whether the energy suffices for trainings, each alone.

        Args:
            owner: `[m]` the devices.
            costs_j: `[m]` joules that are set aside.
            longest_s: `[m]` their longest durations.
        """
        at = half_hours(longest_s)
        level = self.supply_at[:, owner]
        shared_j = np.where(level >= 0, self.shared_j[level, at], np.inf).min(axis=0)
        return np.asarray(costs_j <= np.minimum(self.own_j[owner, at], shared_j))

    def holds(self, set_aside_j: Values, chosen: Indices, within_s: float) -> bool:
        """Whether some devices can train together.

        Args:
            set_aside_j: `[n]` joules of each device's training.
            chosen: `[k]` the devices that train.
            within_s: seconds within which their trainings end.
        """
        at = half_hours(within_s)
        if (set_aside_j[chosen] > self.own_j[chosen, at]).any():
            return False
        shared = Headroom(self.shared_j[:, at], self.supply_at)
        return bool((shared.drawn_w(set_aside_j, chosen) <= shared.spare_w * (1 + _CLOSE)).all())

    def largest_set(self, set_aside_j: Values, priority: Mask, within_s: float) -> Indices:
        """The most devices that can train together, those with priority first.

        Args:
            set_aside_j: `[n]` joules of each device's training; infinite for devices that do not train.
            priority: `[n]` devices that come first.
            within_s: seconds within which their trainings end.
        """
        at = half_hours(within_s)
        shared = Headroom(self.shared_j[:, at], self.supply_at)
        return shared.largest_set(np.where(set_aside_j <= self.own_j[:, at], set_aside_j, np.inf), priority)

    def again(self, device_id: str, path: Sequence[str], needed_j: float, within_s: float) -> datetime | None:
        """When all stores of a device will have enough for its training; None if that is not foreseen.

        Args:
            device_id: the device.
            path: the supplies that feed it.
            needed_j: joules that are set aside for its training.
            within_s: its longest duration.
        """
        times = [each.again(needed_j, within_s) for each in self._short(device_id, path, needed_j, within_s)]
        known = [time for time in times if time is not None]
        return max(known) if known and len(known) == len(times) else None

    def is_hopeless(self, device_id: str, path: Sequence[str], needed_j: float, within_s: float) -> bool:
        """Whether a device will never have enough for its training; arguments as in `again`."""
        short = self._short(device_id, path, needed_j, within_s)
        return any(each.is_known and each.again(needed_j, within_s) is None for each in short)

    def shortage(self, device_id: str, path: Sequence[str], needed_j: float, within_s: float) -> str:
        """Why a device cannot train, and when it may again; arguments as in `again`."""
        short = self._short(device_id, path, needed_j, within_s)
        if not short:
            needed, _ = _need_and_spare(needed_j, 0.0)
            return f"too little energy: its training needs up to {needed}, and other devices take what is left"
        named = min(short, key=lambda each: left_j(each, within_s))
        needed, spare = _need_and_spare(needed_j, left_j(named, within_s))
        again = self.again(device_id, path, needed_j, within_s)
        when = (
            "no time is foreseen when it has enough"
            if again is None
            else f"it may train again from about {again.astimezone(timezone.utc):%Y-%m-%d %H:%M} UTC"
        )
        return f"too little energy: its training needs up to {needed}, {named.name} has {spare} to spare; {when}"

    def _short(self, device_id: str, path: Sequence[str], needed_j: float, within_s: float) -> list[EnergyStore]:
        """The stores of a device that have too little for its training."""
        along = self.stores.along(device_id, path)
        return [each for each in along if left_j(each, within_s) * (1 + _CLOSE) < needed_j]


def _need_and_spare(needed_j: float, spare_j: float) -> tuple[str, str]:
    """The texts of a need and of what is left, in the same unit, rounded so that neither looks better than it is."""
    unit_j, unit, digits = (1.0, "J", 0) if needed_j < 1e3 else (1e3, "kJ", 1) if needed_j < 1e6 else (1e6, "MJ", 2)
    shown = 10**digits / unit_j
    needed, spare = math.ceil(needed_j * shown) / 10**digits, math.floor(spare_j * shown) / 10**digits
    return f"{needed:,.{digits}f} {unit}", f"{spare:,.{digits}f} {unit}"
