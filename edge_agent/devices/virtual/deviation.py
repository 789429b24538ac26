"""A fixed, smooth deviation of one board from the physics, with the distribution of real boards' residuals."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Deviations stay similar over a factor of e^0.8 in any knob: the correlation of the AGX Orin corpora's residuals
# falls to a half at 0.5, a third at 1 and a tenth at 2 (in logarithms of a clock, or of the number of cores).
_LENGTH = 0.8
# Frequencies drawn from a t distribution of twice this many degrees of freedom give a Matern kernel of this order:
# once differentiable, rougher than the squared exponential that a Gaussian process usually assumes.
_SMOOTHNESS = 1.5
_WAVES = 256
_REFERENCE_MODES = 2000


class DeviationField:
    """A smooth random function of the mode, or of mode and batch, whose values over a space have a given distribution.

    A sum of plane waves is nearly Gaussian; its rank within the space selects the quantile, so that heavy tails become
    whole regions with large deviations.

    Args:
        space: `[n, k]` modes, or modes with batches, over which the distribution holds.
        levels: `[q]` ascending probabilities in (0, 1).
        quantiles: `[q]` ascending values (log deviations) at these levels.
        rng: the random number generator.
    """

    def __init__(
        self,
        space: NDArray[np.float64],
        levels: NDArray[np.float64],
        quantiles: NDArray[np.float64],
        rng: np.random.Generator,
    ) -> None:
        degrees = 2 * _SMOOTHNESS
        stretch = np.sqrt(degrees / rng.chisquare(degrees, (_WAVES, 1)))
        self._frequencies = rng.standard_normal((_WAVES, space.shape[1])) * stretch / _LENGTH
        self._phases = rng.uniform(0, 2 * np.pi, _WAVES)
        some = rng.choice(len(space), min(len(space), _REFERENCE_MODES), replace=False)
        self._heights = np.sort(self._height(space[some]))
        self._levels, self._quantiles = levels, quantiles

    def at(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the log deviation at `[n, k]` points of the space, `[n]`."""
        ranks = (np.arange(len(self._heights)) + 0.5) / len(self._heights)
        level = np.interp(self._height(points), self._heights, ranks)
        return np.interp(level, self._levels, self._quantiles)

    def _height(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(np.cos(np.log(points) @ self._frequencies.T + self._phases).sum(axis=1))
