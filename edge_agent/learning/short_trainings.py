"""Trainings that are too short to measure a mode: they are observed in their own mode instead."""

from __future__ import annotations

from edge_agent.profiling.mode_measurement import DEFAULT_SETTINGS

# Other modes may take less time, so a training of the same length is tried again after so many.
_OBSERVED = 4


class ShortTrainings:
    """Remembers which trainings of a workload have ended before a mode was measured."""

    def __init__(self) -> None:
        """Start without any."""
        self._minibatches, self._left = 0.0, 0

    def note(self, minibatches: float) -> None:
        """Note that a training of so many minibatches has ended before a mode was measured."""
        self._minibatches, self._left = minibatches, _OBSERVED

    def is_too_short(self, minibatches: float) -> bool:
        """Whether a training of so many minibatches that begins now is to be observed instead."""
        if minibatches <= DEFAULT_SETTINGS.minibatches:  # the first one does not count
            return True
        if minibatches > self._minibatches or not self._left:
            return False
        self._left -= 1
        return True
