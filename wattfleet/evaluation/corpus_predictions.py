"""Predictions of a whole corpus from some of its rows, for methods that alternate measuring and predicting."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from wattfleet.core.modes import Profile
from wattfleet.core.prediction import Prediction, Predictor, conditioned

Fit = Callable[[Profile], Predictor]
"""Fits a predictor to measured rows; the reference to transfer from is bound to the function."""


class CorpusPredictions:
    """Predicts all rows of a corpus from the measured ones, and caches the fits.

    The first measurements are the most informative about the workload, so the predictor is fitted again after each of
    them. The last of these fits is conditioned on further measurements, which takes a tenth of the time of a fit.

    Args:
        fit: fits the predictor.
    """

    def __init__(self, fit: Fit) -> None:
        self._fit = fit
        self._known: dict[tuple[int, ...], Prediction] = {}

    def after(self, corpus: Profile, rows: Sequence[int], fitted: int | None = None) -> Prediction:
        """The prediction of all rows.

        Args:
            corpus: the corpus, the same one in every call.
            rows: the measured rows, in the order of measuring.
            fitted: number of measurements up to which the predictor is fitted; None fits it to all.
        """
        count = len(rows) if fitted is None else fitted
        first, further = tuple(sorted(rows[:count])), np.array(rows[count:], dtype=np.intp)
        if first not in self._known:
            predictor = self._fit(corpus.rows(np.array(first, dtype=np.intp)))
            self._known[first] = predictor.predict(corpus.modes, corpus.batch)
        return conditioned(self._known[first], corpus.modes, corpus.batch, further, corpus.rows(further))
