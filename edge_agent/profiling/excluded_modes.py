"""Excludes modes from new rounds if measuring them overloaded the board or failed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_agent.profiling.disturbance import DEFAULT_LIMITS
from edge_agent.profiling.journal import Journal
from wattfleet.modes import ModeArray, modes_to_array


@dataclass(frozen=True)
class ExcludedModes:
    """The modes that were measured successfully, and those that failed.

    Attributes:
        measured: `[k, 4]` modes measured without disturbance.
        given_up: `[k, 4]` modes that were disturbed or failed at every attempt; they are not tried again.
        overloaded: `[k, 4]` those of the given-up modes at which the board got too hot or throttled at every attempt.
    """

    measured: ModeArray
    given_up: ModeArray
    overloaded: ModeArray

    @classmethod
    def of(cls, journal: Journal) -> ExcludedModes:
        """Return the excluded modes according to a journal, since its last renewal."""
        attempts = DEFAULT_LIMITS.attempts
        return cls(
            modes_to_array(record.mode for record in journal.records),
            modes_to_array(journal.discarded_modes(attempts)),
            modes_to_array(journal.overloaded_modes(attempts)),
        )

    def allows(self, modes: ModeArray) -> NDArray[np.bool_]:
        """Return which of `[n, 4]` modes may be used for training, as `[n]` booleans.

        Modes that were given up may not. If a mode overloads the board, modes at least as high in every setting are
        excluded too. However, if one of those was measured, only the overloaded mode itself is excluded. If every mode
        would be excluded, all are allowed: a device without a front could not train at all.
        """
        inherent = self.overloaded[~_at_least(self.measured, self.overloaded).any(axis=0)]
        excluded = _at_least(modes, inherent).any(axis=1) | (modes[:, None] == self.given_up).all(axis=2).any(axis=1)
        excluded &= ~(modes[:, None] == self.measured).all(axis=2).any(axis=1)
        return np.asarray(~excluded | excluded.all())


def _at_least(modes: ModeArray, others: ModeArray) -> NDArray[np.bool_]:
    """Return `[n, m]` booleans: whether a mode of `[n, 4]` is in every setting at least as high as one of `[m, 4]`."""
    return np.asarray((modes[:, None] >= others).all(axis=2))
