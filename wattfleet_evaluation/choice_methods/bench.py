"""What a strategy works with: modes it may measure, each once, up to a limit."""

from __future__ import annotations

from collections.abc import Callable

from wattfleet.errors import InvalidInputError
from wattfleet.modes import Measurement, ModeArray, PowerMode, Profile, array_to_modes

Measure = Callable[[PowerMode], Measurement]


class Bench:
    """A device or a corpus on which modes are measured, and what was measured so far.

    Args:
        modes: `[n, 4]` modes that can be measured and chosen.
        measure: measures one of them.
        limit: modes to measure in all, at most.

    Raises:
        InvalidInputError: no modes, or a negative limit.
    """

    def __init__(self, modes: ModeArray, measure: Measure, limit: int) -> None:
        if not len(modes) or limit < 0:
            raise InvalidInputError(f"needs at least 1 mode and a limit of at least 0, not {len(modes)} and {limit}")
        self.modes = modes
        self.limit = min(limit, len(modes))
        self._measure = measure
        self._known = frozenset(array_to_modes(modes))
        self._measurements: dict[PowerMode, Measurement] = {}

    @property
    def left(self) -> int:
        """Modes that may still be measured."""
        return self.limit - len(self._measurements)

    def measure(self, mode: PowerMode) -> Measurement:
        """Measure a mode; one that was measured before is looked up and costs nothing.

        Raises:
            InvalidInputError: there is no such mode, or the limit is reached.
        """
        if mode not in self._measurements:
            if mode not in self._known:
                raise InvalidInputError(f"{mode.label()} is none of the modes that can be measured")
            if not self.left:
                raise InvalidInputError(f"{self.limit} modes are measured, which is the limit")
            self._measurements[mode] = self._measure(mode)
        return self._measurements[mode]

    def measure_all(self, modes: ModeArray) -> None:
        """Measure `[k, 4]` modes in their order."""
        for mode in array_to_modes(modes):
            self.measure(mode)

    def profile(self) -> Profile:
        """What was measured so far."""
        return Profile.of(self._measurements.values())
