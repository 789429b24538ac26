"""A serving session: the settings that a serving method may measure, and those measured so far."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wattfleet.errors import InvalidInputError
from wattfleet.modes import BatchArray, Measurement, ModeArray, Profile


class ServingSession:
    """Measures settings of a corpus, each at most once, up to a limit. A setting is a mode with a batch size.

    Args:
        corpus: all settings, with their batches.
        limit: maximum number of settings to measure.

    Attributes:
        corpus: all settings.
        modes: `[n, 4]` modes of the settings.
        batch: `[n]` batch sizes of the settings.
        limit: maximum number of settings to measure.

    Raises:
        InvalidInputError: the corpus is empty or states no batches, or the limit is negative.
    """

    def __init__(self, corpus: Profile, limit: int) -> None:
        if not len(corpus) or corpus.batch is None or limit < 0:
            raise InvalidInputError(
                "a serving session needs rows with a batch, and a limit of 0 or more, not"
                f" {len(corpus)} rows with {len(corpus.batches)} batches and {limit}"
            )
        self.modes: ModeArray = corpus.modes
        self.batch: BatchArray = corpus.batch
        self.limit = min(limit, len(corpus))
        self.corpus = corpus
        self._rows: dict[int, Measurement] = {}
        settings = np.column_stack([corpus.modes, corpus.batch]).tolist()
        self._row_of = {tuple(setting): row for row, setting in enumerate(settings)}

    @property
    def measured(self) -> int:
        """Number of settings measured so far."""
        return len(self._rows)

    @property
    def rows(self) -> list[int]:
        """Indices of the measured settings, in the order of measuring."""
        return list(self._rows)

    @property
    def remaining(self) -> int:
        """Number of settings that may still be measured."""
        return self.limit - self.measured

    def measure(self, row: int) -> Measurement:
        """Measure the setting at an index. One that was measured before is looked up and does not count again.

        Raises:
            InvalidInputError: the limit is reached.
        """
        if row not in self._rows:
            if not self.remaining:
                raise InvalidInputError(f"the limit of {self.limit} measured settings is reached")
            (self._rows[row],) = self.corpus.rows(np.array([row])).measurements()
        return self._rows[row]

    def measure_if_allowed(self, row: int) -> bool:
        """Measure the setting at an index if the limit allows it; return whether the setting has been measured."""
        if row not in self._rows and not self.remaining:
            return False
        self.measure(row)
        return True

    def measure_all(self, settings: NDArray[np.float64]) -> None:
        """Measure `[m, 5]` modes with their batch sizes.

        Raises:
            InvalidInputError: the limit is reached.
        """
        for setting in settings.tolist():
            self.measure(self._row_of[tuple(setting)])

    def measure_random(self, rows: NDArray[np.intp], seed: int) -> None:
        """Measure settings drawn uniformly at random from `[k]` indices, as many as may still be measured."""
        for row in np.random.default_rng(seed).permutation(rows)[: self.remaining].tolist():
            self.measure(row)

    def profile(self) -> Profile:
        """The measurements made so far."""
        return self.corpus.rows(np.array(self.rows, dtype=np.intp))
