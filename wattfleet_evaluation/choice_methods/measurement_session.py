"""A measurement session: the modes that a choice method may measure, and those measured so far."""

from __future__ import annotations

from collections.abc import Callable

from wattfleet.errors import InvalidInputError
from wattfleet.modes import Measurement, ModeArray, PowerMode, Profile, array_to_modes

Measure = Callable[[PowerMode], Measurement]


class MeasurementSession:
    """Measures modes of a device or a corpus, each at most once, up to a limit.

    Args:
        modes: `[n, 4]` modes that can be measured and chosen.
        measure: measures one of them.
        limit: maximum number of modes to measure.

    Raises:
        InvalidInputError: there are no modes, or the limit is negative.
    """

    def __init__(self, modes: ModeArray, measure: Measure, limit: int) -> None:
        if not len(modes) or limit < 0:
            raise InvalidInputError(
                f"a measurement session needs at least 1 mode and a limit of 0 or more, not {len(modes)} and {limit}"
            )
        self.modes = modes
        self.limit = min(limit, len(modes))
        self._measure = measure
        self._known = frozenset(array_to_modes(modes))
        self._measurements: dict[PowerMode, Measurement] = {}

    @property
    def measured(self) -> int:
        """Number of modes measured so far."""
        return len(self._measurements)

    @property
    def remaining(self) -> int:
        """Number of modes that may still be measured."""
        return self.limit - self.measured

    def measure(self, mode: PowerMode) -> Measurement:
        """Measure a mode. A mode that was measured before is looked up and does not count again.

        Raises:
            InvalidInputError: the mode is not available, or the limit is reached.
        """
        if mode not in self._measurements:
            if mode not in self._known:
                raise InvalidInputError(f"{mode.label()} is not one of the modes that can be measured")
            if not self.remaining:
                raise InvalidInputError(f"the limit of {self.limit} measured modes is reached")
            self._measurements[mode] = self._measure(mode)
        return self._measurements[mode]

    def measure_all(self, modes: ModeArray) -> None:
        """Measure `[k, 4]` modes in the given order."""
        for mode in array_to_modes(modes):
            self.measure(mode)

    def profile(self) -> Profile:
        """The measurements made so far."""
        return Profile.of(self._measurements.values())
