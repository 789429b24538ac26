"""Which modes a board does not bear, by what its journal holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_agent.profiling.disturbance import USUAL_LIMITS
from edge_agent.profiling.journal import Journal
from wattfleet.modes import ModeArray, modes_to_array


@dataclass(frozen=True)
class ExcludedModes:
    """What measuring has shown of the modes that a board bears, and of those that it does not.

    Attributes:
        measured: `[k, 4]` modes that were measured undisturbed.
        given_up: `[k, 4]` modes that were disturbed, or failed, at every attempt, and are not tried again.
        overloaded: `[k, 4]` those of them at which the board got too hot or throttled itself at every attempt.
    """

    measured: ModeArray
    given_up: ModeArray
    overloaded: ModeArray

    @classmethod
    def of(cls, journal: Journal) -> ExcludedModes:
        """What a journal shows, since it was last begun anew."""
        attempts = USUAL_LIMITS.attempts
        return cls(
            modes_to_array(record.mode for record in journal.records),
            modes_to_array(journal.discarded_modes(attempts)),
            modes_to_array(journal.overloaded_modes(attempts)),
        )

    def bears(self, modes: ModeArray) -> NDArray[np.bool_]:
        """Which of `[n, 4]` modes may be trained in, `[n]`.

        Those that were given up may not. Where a mode overloads the board, so does one whose every knob is at least as
        high; but a mode like that which was measured shows that it was not the mode's fault, and then only the mode
        itself is left out. All are borne where none would be left: a device without a front could not train at all.
        """
        inherent = self.overloaded[~_at_least(self.measured, self.overloaded).any(axis=0)]
        beyond = _at_least(modes, inherent).any(axis=1) | (modes[:, None] == self.given_up).all(axis=2).any(axis=1)
        beyond &= ~(modes[:, None] == self.measured).all(axis=2).any(axis=1)
        return np.asarray(~beyond | beyond.all())


def _at_least(modes: ModeArray, others: ModeArray) -> NDArray[np.bool_]:
    """Which of `[n, 4]` modes have every knob at least as high as which of `[m, 4]` others, `[n, m]`."""
    return np.asarray((modes[:, None] >= others).all(axis=2))
