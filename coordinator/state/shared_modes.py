"""The measured modes that devices of one kind learn from each other."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from wattfleet.modes import Measurement
from wattfleet_proto.session_limits import MAX_UNITS

_MOST_GROUPS = 256
"""Workloads of one kind of board whose measurements are kept; the one that was used longest ago goes first."""

Measured = tuple[Measurement, ...]


class Kind(NamedTuple):
    """What devices must have in common to learn from each other.

    Attributes:
        board: the kind of board.
        provenance: where their measurements come from.
    """

    board: str
    provenance: str


class SharedModes:
    """The first measured modes of a few devices of each kind, by workload.

    Nothing of it is stored: agents report their modes again in each session.

    Args:
        most: modes of each device that are kept; 0 keeps none.

    Attributes:
        most: the same.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._groups: OrderedDict[tuple[Kind, str], dict[str, Measured]] = OrderedDict()

    def report(self, device_id: str, kind: Kind, workload: str, measured: Measured) -> bool:
        """Take what a device has measured of a workload so far.

        Returns:
            Whether this changes what other devices may learn.
        """
        measured = measured[: self.most]
        if not measured:
            return self.forget(device_id, kind, workload)
        units = self._groups.setdefault((kind, workload), {})
        self._groups.move_to_end((kind, workload))
        if units.get(device_id) == measured:
            return False
        units[device_id] = measured
        if len(units) > MAX_UNITS + 1:  # a device does not learn from itself
            # Of equally many, the newer goes: what others have learned from stays.
            least = min(reversed(units), key=lambda each: len(units[each]))
            del units[least]
        if len(self._groups) > _MOST_GROUPS:
            self._groups.popitem(last=False)
        return device_id in units

    def forget(self, device_id: str, kind: Kind, workload: str) -> bool:
        """Drop what a device has measured of a workload; returns whether there was anything."""
        return self._groups.get((kind, workload), {}).pop(device_id, None) is not None

    def of_others(self, device_id: str, kind: Kind, workload: str) -> Sequence[Measured]:
        """What other devices of a kind have measured of a workload, those with the most modes first."""
        units = self._groups.get((kind, workload), {})
        others = [measured for other, measured in units.items() if other != device_id]
        return sorted(others, key=len, reverse=True)[:MAX_UNITS]
