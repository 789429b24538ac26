"""Devices that measure power modes outside of rounds: which should, and with which of the watts that are left."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from coordinator.state.records import DeviceRecord
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import MeasuredUnit, Measurement
from wattfleet.core.planning import Allowance, Assignment, Offer, plan_measuring
from wattfleet_proto.limits import MAX_OTHER_KINDS, MAX_UNITS, SURVEY_MODES, MeasuringLimits

# --- Shared modes -----------------------------------------------------------------------------------------------------
# The measured modes that devices learn from each other: those of their kind, and of other kinds of board.


_MOST_GROUPS = 256
"""The most workloads per kind of board whose measurements are kept."""

Measured = tuple[Measurement, ...]


class LearningKind(NamedTuple):
    """The properties that devices must share to learn from each other.

    Attributes:
        board: the kind of board.
        provenance: where their measurements come from.
    """

    board: str
    provenance: str


class SharedModes:
    """The first measured modes of a few devices of each kind, by workload.

    They are not stored, because agents report their modes again in each session.

    Args:
        most: the most modes that are kept per device; 0 keeps none.

    Attributes:
        most: the same.
        changes: how often the kept modes have changed.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.changes = 0
        self._groups: dict[tuple[LearningKind, str], dict[str, Measured]] = {}

    def report(self, device_id: str, kind: LearningKind, workload: str, measured: Measured) -> bool:
        """Record a device's measurements of a workload so far.

        Returns:
            Whether other devices may now learn more.
        """
        measured = measured[: self.most]
        units = self._groups.get((kind, workload), {})
        known = units.get(device_id, ())
        if measured == known or (not units and len(self._groups) >= _MOST_GROUPS):
            return False
        self.changes += 1
        units.pop(device_id, None)
        if measured:
            units[device_id] = measured
            self._groups[kind, workload] = units
        if len(units) > MAX_UNITS + 1:  # a device does not learn from itself
            # With equally many modes, the newer device is dropped: the modes that others learned from stay.
            least = min(reversed(units), key=lambda each: len(units[each]))
            del units[least]
        return device_id in units and len(measured) > len(known)

    def keep(self, workloads: Collection[str]) -> None:
        """Drop all workloads except these."""
        gone = [group for group in self._groups if group[1] not in workloads]
        for group in gone:
            del self._groups[group]
        self.changes += bool(gone)

    def is_kept(self, device_id: str, kind: LearningKind) -> bool:
        """Whether modes of a device are kept."""
        return any(device_id in units for (of, _), units in self._groups.items() if of == kind)

    def of_others(self, device_id: str, kind: LearningKind, workload: str) -> Sequence[MeasuredUnit]:
        """The measurements of a workload by a few other devices of the kind, and by one of each of a few other kinds.

        Those with the most modes come first.
        """
        units = self._groups.get((kind, workload), {})
        others = [MeasuredUnit("", measured) for other, measured in units.items() if other != device_id]
        elsewhere = [
            MeasuredUnit(of.board, max(group.values(), key=len))
            for (of, name), group in self._groups.items()
            if name == workload and of != kind and of.provenance == kind.provenance
        ]
        return [*_most_modes(others, MAX_UNITS), *_most_modes(elsewhere, MAX_OTHER_KINDS)]


def _most_modes(units: Sequence[MeasuredUnit], most: int) -> list[MeasuredUnit]:
    return sorted(units, key=lambda unit: len(unit.measured), reverse=True)[:most]


# --- Measuring --------------------------------------------------------------------------------------------------------

SURVEYED_OF_KIND = 8
"""Devices of each kind of board that measure before a run's first plan. The others only report their loader's facts,
and learn from the modes that these have measured."""

_UNTIL_STOPPED_S = 24 * 3600.0


@dataclass(frozen=True)
class MeasuringPlan:
    """The devices that measure now.

    Attributes:
        assignments: mode and watts of each.
        measuring: limits of their measurements, by device id.
        waiting: number of devices that should measure, but for which no watts are left now.
        not_ready: number of devices that may soon be ready for a training.
        predicting: number of them that only lack their prediction of the workload.
    """

    assignments: Sequence[Assignment]
    measuring: Mapping[str, MeasuringLimits]
    waiting: int
    not_ready: int
    predicting: int


@dataclass(frozen=True)
class MeasuringRequest:
    """An immutable request, so that another thread can plan it while the fleet changes.

    Attributes:
        epochs: local epochs of a training that goes on to its end.
        offers: the devices that should measure.
        measuring: limits of their measurements, by device id.
        nodes: Flower's node id of every device that has one.
        allowance: watts of every supply, and what all other devices draw there.
        not_ready: number of devices that may soon be ready for a training.
        predicting: number of them that only lack their prediction of the workload.
        affordable: returns the part of a plan that the run's energy suffices for; None without an energy budget.
    """

    epochs: float
    offers: Sequence[Offer]
    measuring: Mapping[str, MeasuringLimits]
    nodes: Mapping[str, int]
    allowance: Allowance
    not_ready: int
    predicting: int
    affordable: Callable[[MeasuringPlan], MeasuringPlan] | None = None

    def planned(self) -> MeasuringPlan:
        """Choose the devices that measure now, with the watts that are left."""
        assignments = plan_measuring(self.offers, self.allowance, self.epochs)
        chosen = {each.device_id: self.measuring[each.device_id] for each in assignments}
        waiting = len(self.offers) - len(assignments)
        plan = MeasuringPlan(assignments, chosen, waiting, self.not_ready, self.predicting)
        return plan if self.affordable is None else self.affordable(plan)


def survey_of(
    offers: Sequence[Offer], devices: Mapping[str, DeviceRecord], longest_s: float, measured: Collection[str]
) -> dict[str, MeasuringLimits]:
    """The devices that do not know a workload, and what each should learn of it before the first plan.

    Args:
        offers: the devices that may take part.
        devices: all devices by id.
        longest_s: seconds after which a device begins no further measurement.
        measured: the devices that have measured modes of the workload, or measure some now, offered or not.

    Raises:
        InvalidInputError: the seconds are not finite and above 0.
    """
    if not 0 < longest_s < math.inf:
        raise InvalidInputError(f"a survey lasts a finite number of seconds above 0, not {longest_s:g}")
    found: dict[str, MeasuringLimits] = {}
    kinds = {device_id: (device.board, device.provenance) for device_id, device in devices.items()}
    measuring = Counter(kinds[device_id] for device_id in measured)
    for offer in sorted(offers, key=lambda offer: offer.device_id):
        kind = kinds[offer.device_id]
        measures = not offer.profiled_modes and measuring[kind] < SURVEYED_OF_KIND
        if measures or offer.is_length_assumed:
            found[offer.device_id] = MeasuringLimits(SURVEY_MODES if measures else 0, longest_s)
        measuring[kind] += measures
    return found


def unmeasured_of(offers: Sequence[Offer], modes: int, rounds_s: Sequence[float]) -> dict[str, MeasuringLimits]:
    """The devices that have measured fewer modes than they should, and how many remain.

    Args:
        offers: the devices that may take part.
        modes: number of modes that each device should measure.
        rounds_s: planned seconds of the run's rounds in progress. A device begins no measurement after the longest one,
            with whose end it would be stopped.
    """
    longest_s = max(rounds_s, default=_UNTIL_STOPPED_S)
    return {
        offer.device_id: MeasuringLimits(modes - offer.profiled_modes, longest_s)
        for offer in offers
        if offer.profiled_modes < modes
    }
