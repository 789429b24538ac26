"""The GPU's frequency."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from edge_agent.devices.jetson.knob_files import (
    KnobNames,
    Step,
    differences,
    not_lowered,
    range_increases,
    range_reductions,
    table_of,
    value_of,
    within,
)
from edge_agent.devices.tree import Tree
from wattfleet.errors import InvalidInputError

_NODE_NAMES = ("gpu", "ga10b", "gv11b")
_FULL_LOAD = 1000


class Gpu:
    """A GPU and its frequencies, Hz.

    Args:
        tree: the board's files.

    Raises:
        InvalidInputError: there is no GPU, or the kernel lists no frequencies.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.folder = _folder(tree)
        self.table_hz = table_of(tree, f"{self.folder}/available_frequencies")
        self._limits = f"{self.folder}/min_freq", f"{self.folder}/max_freq"

    def frequency_hz(self) -> int:
        """Return the highest frequency of the table that the GPU's current limit allows, Hz.

        Raises:
            ModeNotAppliedError: the kernel does not report it.
        """
        return within(self.table_hz, value_of(self._tree, self._limits[1]))

    def use_share(self) -> float | None:
        """Return the share of time in which it is busy, 0 to 1; None if the kernel does not report it."""
        try:
            return int(self._tree.read(f"{self.folder}/device/load")) / _FULL_LOAD
        except (OSError, ValueError):
            return None

    def reductions(self, limits_hz: tuple[int, int]) -> Iterator[Step]:
        """Yield the steps to a frequency range that do not raise a limit."""
        return range_reductions(self._tree, self._limits, limits_hz)

    def increases(self, limits_hz: tuple[int, int]) -> Iterator[Step]:
        """Yield the remaining steps to a frequency range."""
        return range_increases(self._tree, self._limits, limits_hz)

    def not_lowered(self, limits_hz: tuple[int, int]) -> list[str]:
        """Describe which limits are still higher than these."""
        return not_lowered(self._tree, zip(self._limits, limits_hz, strict=True))

    def differences(self, limits_hz: tuple[int, int]) -> list[str]:
        """Describe how the current settings differ from a frequency range."""
        return differences(self._tree, zip(self._limits, limits_hz, strict=True))

    def knobs(self) -> dict[str, str]:
        """Return the current values of all settings that may be changed."""
        lowest, highest = (value_of(self._tree, path) for path in self._limits)
        return {"gpu/min_hz": str(lowest), "gpu/max_hz": str(highest)}

    def written_files(self) -> list[str]:
        """Return the files that are written."""
        return list(self._limits)

    def knob_names(self) -> KnobNames:
        """Return the names in `knobs`."""
        return KnobNames(required={"gpu/min_hz", "gpu/max_hz"})

    def saved_limits(self, knobs: Mapping[str, int]) -> tuple[int, int]:
        """Return the frequency range that `knobs` returned, Hz."""
        return knobs["gpu/min_hz"], knobs["gpu/max_hz"]


def _folder(tree: Tree) -> str:
    for folder in tree.glob("/sys/class/devfreq/*"):
        try:
            if tree.read(f"{folder}/device/of_node/name") in _NODE_NAMES:
                return folder
        except OSError:
            continue
    raise InvalidInputError("/sys/class/devfreq: no GPU among its nodes; check that NVIDIA's kernel driver is loaded")
