"""Devices that measure power modes outside of rounds: which should, and with which of the watts that are left."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from coordinator.state.records import DeviceRecord
from coordinator.state.rounds.device_grant import Measuring
from wattfleet.errors import InvalidInputError
from wattfleet.planning import Allowance, Assignment, Offer, plan_measuring
from wattfleet_proto.measuring_limits import SURVEY_MODES

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
    """

    assignments: Sequence[Assignment]
    measuring: Mapping[str, Measuring]
    waiting: int
    not_ready: int


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
    """

    epochs: float
    offers: Sequence[Offer]
    measuring: Mapping[str, Measuring]
    nodes: Mapping[str, int]
    allowance: Allowance
    not_ready: int

    def planned(self) -> MeasuringPlan:
        """Choose the devices that measure now, with the watts that are left."""
        assignments = plan_measuring(self.offers, self.allowance, self.epochs)
        chosen = {each.device_id: self.measuring[each.device_id] for each in assignments}
        return MeasuringPlan(assignments, chosen, len(self.offers) - len(assignments), self.not_ready)


def survey_of(
    offers: Sequence[Offer], devices: Mapping[str, DeviceRecord], longest_s: float, measured: Collection[str]
) -> dict[str, Measuring]:
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
    found: dict[str, Measuring] = {}
    kinds = {device_id: (device.board, device.provenance) for device_id, device in devices.items()}
    measuring = Counter(kinds[device_id] for device_id in measured)
    for offer in sorted(offers, key=lambda offer: offer.device_id):
        kind = kinds[offer.device_id]
        measures = not offer.profiled_modes and measuring[kind] < SURVEYED_OF_KIND
        if measures or offer.is_length_assumed:
            found[offer.device_id] = Measuring(SURVEY_MODES if measures else 0, longest_s)
        measuring[kind] += measures
    return found


def unmeasured_of(offers: Sequence[Offer], modes: int, rounds_s: Sequence[float]) -> dict[str, Measuring]:
    """The devices that have measured fewer modes than they should, and how many remain.

    Args:
        offers: the devices that may take part.
        modes: number of modes that each device should measure.
        rounds_s: planned seconds of the run's rounds in progress. A device begins no measurement after the longest one,
            with whose end it would be stopped.
    """
    longest_s = max(rounds_s, default=_UNTIL_STOPPED_S)
    return {
        offer.device_id: Measuring(modes - offer.profiled_modes, longest_s)
        for offer in offers
        if offer.profiled_modes < modes
    }
