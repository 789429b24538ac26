"""Scores of predictions against measurements, and the check that these were not trained on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wattfleet.errors import InvalidInputError
from wattfleet.modes import Profile
from wattfleet.prediction import Prediction

Values = NDArray[np.float64]

# A few equal rows can be chance, or a copied baseline mode.
_MAX_SHARED = 3


def percentage_errors(predicted: Prediction, measured: Profile) -> tuple[Values, Values]:
    """`[n]` absolute percentage errors of time and of power, for predictions of `[n]` measured modes."""
    time_pct = 100 * np.abs(predicted.minibatch_ms / measured.minibatch_ms - 1)
    power_pct = 100 * np.abs(predicted.power_mw / measured.power_mw - 1)
    return time_pct, power_pct


def require_disjoint(corpus: Profile, target: Profile) -> None:
    """Check that a target is not part of the corpus that its reference was trained on.

    Raises:
        InvalidInputError: more than 3 rows of the target, or all of them, are also in the corpus.
    """
    shared = len(set(corpus.canonical_rows()) & set(target.canonical_rows()))
    if shared > min(_MAX_SHARED, len(target) - 1):
        raise InvalidInputError(
            f"{shared} of the target's {len(target)} rows are also in the reference's corpus, so the score would be"
            " too good: give a target of another workload or device, or another reference"
        )
