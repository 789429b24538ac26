"""The measured modes that devices learn from each other: those of their kind, and of other kinds of board."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from wattfleet.modes import MeasuredUnit, Measurement
from wattfleet_proto.session_limits import MAX_OTHER_KINDS, MAX_UNITS

_MOST_GROUPS = 256
"""The most workloads per kind of board whose measurements are kept."""

Measured = tuple[Measurement, ...]


class Kind(NamedTuple):
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
        self._groups: dict[tuple[Kind, str], dict[str, Measured]] = {}

    def report(self, device_id: str, kind: Kind, workload: str, measured: Measured) -> bool:
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

    def is_kept(self, device_id: str, kind: Kind) -> bool:
        """Whether modes of a device are kept."""
        return any(device_id in units for (of, _), units in self._groups.items() if of == kind)

    def of_others(self, device_id: str, kind: Kind, workload: str) -> Sequence[MeasuredUnit]:
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
