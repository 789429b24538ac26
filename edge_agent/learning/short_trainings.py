"""Remembers trainings too short to measure a mode in: they are observed in their own mode instead."""

from __future__ import annotations

from edge_agent.profiling.mode_measurement import DEFAULT_SETTINGS

# Other modes may take less time, so measuring is tried again after this number of trainings of the same length.
_OBSERVED = 4


class ShortTrainings:
    """Remembers which trainings of a workload ended before a mode was measured."""

    def __init__(self) -> None:
        """Start with no short trainings."""
        self._minibatches, self._left = 0.0, 0

    def note(self, minibatches: float) -> None:
        """Note that a training with this number of minibatches ended before a mode was measured."""
        self._minibatches, self._left = minibatches, _OBSERVED

    def is_too_short(self, minibatches: float) -> bool:
        """Return whether a training of this length, in minibatches, should be observed instead."""
        if minibatches <= DEFAULT_SETTINGS.fewest_minibatches:  # the first one does not count
            return True
        if minibatches > self._minibatches or not self._left:
            return False
        self._left -= 1
        return True
