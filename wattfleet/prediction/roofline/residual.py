"""Gaussian processes over the modes, on the log residuals of the physical model.

A `Surface` condenses the residual of a whole corpus into a few hundred inducing modes. A `Correction` is the exact
process over the few modes measured on a device, together with the uncertainty of the model's parameters.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve, solve_triangular
from scipy.special import softmax

from wattfleet.modes import ModeArray

Values = NDArray[np.float64]

MAX_INDUCING = 400
"""Inducing modes of a surface at most."""

MEASUREMENT_SD = 0.01
"""Log standard deviation of repeated measurements of one mode."""

# Length scales in log number of cores and log frequency. The number of cores has few, coarse steps, at which times jump
# because of the operating system's scheduling; clocks act smoothly.
_LENGTHS = np.array([0.35, 0.8, 0.8, 0.8])
# Squared distance, in units of `_LENGTHS`, below which modes are the same: above rounding errors, and below the
# distance of any two modes of a board.
_SAME_MODE = 1e-9
# Candidates for the standard deviations of the smooth residual and of a single mode's own deviation, and the prior of
# both for the few modes of a transfer (log means and log standard deviations). The prior was selected so that intervals
# of transfers between the corpora hold as often as stated.
_AMPLITUDES = (0.003, 0.01, 0.02, 0.04, 0.08, 0.15)
_NUGGETS = (0.005, 0.01, 0.02, 0.04, 0.08)
_PRIOR_LOG_MEAN = np.log([0.06, 0.035])
_PRIOR_LOG_SD = np.array([1.0, 0.7])


def _squared_distances(a: ModeArray, b: ModeArray) -> Values:
    """`[n, m]` squared distances of `[n, 4]` and `[m, 4]` modes, in units of `_LENGTHS`."""
    x, y = np.log(a) / _LENGTHS, np.log(b) / _LENGTHS
    squares = (x**2).sum(1)[:, None] + (y**2).sum(1)[None, :] - 2 * x @ y.T
    return np.asarray(np.maximum(squares, 0.0))


def _correlation(a: ModeArray, b: ModeArray) -> Values:
    """`[n, m]` correlations of the smooth residual: 1 at the same mode, and falling with distance."""
    return np.asarray(np.exp(-0.5 * _squared_distances(a, b)))


def _log_evidence(covariance: Values, values: Values) -> float:
    factor = cho_factor(covariance, lower=True)
    return float(-0.5 * values @ cho_solve(factor, values) - np.log(np.diag(factor[0])).sum())


@dataclass(frozen=True)
class Surface:
    """The mean log residual of a corpus as a function of the mode.

    Attributes:
        modes: `[m, 4]` inducing modes; none for a surface that is zero everywhere.
        weights: `[m]` weight of each inducing mode's kernel.
    """

    modes: ModeArray
    weights: Values

    @classmethod
    def zero(cls) -> Surface:
        """A surface that is zero everywhere."""
        return cls(np.empty((0, 4)), np.empty(0))

    @classmethod
    def fit(cls, modes: ModeArray, residuals: Values, row_weights: Values, inducing: NDArray[np.intp]) -> Surface:
        """Condense the residuals of a corpus.

        Args:
            modes: `[n, 4]` modes of the corpus.
            residuals: `[n]` log residuals.
            row_weights: `[n]` weights in (0, 1]; a row with a small weight hardly shapes the surface.
            inducing: `[m]` rows whose modes carry the surface, and which determine its smoothness.
        """
        centres = modes[inducing]
        between = _correlation(centres, centres)

        def evidence(candidate: tuple[float, float]) -> float:
            amplitude, nugget = candidate
            covariance = amplitude**2 * between + np.diag(nugget**2 / row_weights[inducing])
            return _log_evidence(covariance, residuals[inducing])

        amplitude, nugget = max(itertools.product(_AMPLITUDES, _NUGGETS), key=evidence)
        to_corpus = _correlation(centres, modes)
        precision = (to_corpus * row_weights) @ to_corpus.T / nugget**2 + between / amplitude**2
        # Neighbouring inducing modes are almost fully correlated: jitter on the diagonal keeps the system solvable.
        precision += 1e-6 * np.diag(precision).mean() * np.eye(len(centres))
        target = to_corpus @ (row_weights * residuals) / nugget**2
        return cls(centres, np.asarray(cho_solve(cho_factor(precision, lower=True), target)))

    def at(self, modes: ModeArray) -> Values:
        """The surface at `[n, 4]` modes, `[n]` logarithms."""
        return np.asarray(_correlation(modes, self.modes) @ self.weights)


def both_at(modes: ModeArray, one: Surface, other: Surface) -> tuple[Values, Values]:
    """Two surfaces at `[n, 4]` modes, `[n]` each; the kernel is computed once if they share their inducing modes."""
    if not np.array_equal(one.modes, other.modes):
        return one.at(modes), other.at(modes)
    kernel = _correlation(modes, one.modes)
    return np.asarray(kernel @ one.weights), np.asarray(kernel @ other.weights)


@dataclass(frozen=True)
class Process:
    """The prior distribution of log residuals.

    Attributes:
        amplitude: standard deviation of the smooth residual.
        nugget_sd: standard deviation of a single mode's own deviation, which only a measurement of that mode shows.
    """

    amplitude: float
    nugget_sd: float

    def covariance(self, a: ModeArray, b: ModeArray) -> Values:
        """Covariance of the residuals at `[n, 4]` and `[m, 4]` modes, `[n, m]`."""
        squares = _squared_distances(a, b)
        smooth = self.amplitude**2 * np.exp(-0.5 * squares)
        return np.asarray(smooth + self.nugget_sd**2 * (squares < _SAME_MODE))

    def measurement_var(self, row_weights: Values) -> Values:
        """Variances of `n` measurements with `[n]` weights in (0, 1], `[n]`."""
        return np.asarray(MEASUREMENT_SD**2 + self.nugget_sd**2 * (1 / row_weights - 1))


def expected_process(modes: ModeArray, target: Values, row_weights: Values, parametric: Values) -> Process:
    """Estimate the process from `n` residuals.

    Its variances are averaged over all plausible candidates. With few modes, the most likely candidates alone would be
    far too small.

    Args:
        modes: `[n, 4]` measured modes.
        target: `[n]` residuals around the prior's mean.
        row_weights: `[n]` weights in (0, 1].
        parametric: `[n, n]` covariance of the residuals due to uncertain parameters.
    """
    smooth, own = _correlation(modes, modes), np.eye(len(modes))
    candidates = np.array(list(itertools.product(_AMPLITUDES, _NUGGETS)))

    def log_posterior(candidate: Values) -> float:
        amplitude, nugget = candidate.tolist()
        noise = Process(amplitude, nugget).measurement_var(row_weights)
        covariance = parametric + amplitude**2 * smooth + nugget**2 * own + np.diag(noise)
        deviation = ((np.log(candidate) - _PRIOR_LOG_MEAN) / _PRIOR_LOG_SD) ** 2
        return _log_evidence(covariance, target) - 0.5 * float(deviation.sum())

    weight = softmax([log_posterior(candidate) for candidate in candidates])
    return Process(*np.sqrt(weight @ candidates**2).tolist())


@dataclass(frozen=True)
class Correction:
    """The correction by a device's measured modes beyond the fitted model, with its uncertainty.

    Attributes:
        process: the prior on the residual.
        modes: `[n, 4]` measured modes; may be none.
        gradient: `[n, k]` derivatives of the model's logarithm with respect to its parameters at those modes.
        parameter_sd: `[k]` standard deviations of the parameters before the measurements.
        measurement_var: `[n]` variances of the measured logarithms.
        weights: `[n]` the inverse of the residuals' covariance, times the measured residuals.
    """

    process: Process
    modes: ModeArray
    gradient: Values
    parameter_sd: Values
    measurement_var: Values
    weights: Values

    @classmethod
    def none(cls, parameters: int, sd: float) -> Correction:
        """No correction, with known parameters; single modes deviate by `sd`."""
        nothing = np.empty(0)
        return cls(
            Process(0.0, sd), np.empty((0, 4)), np.empty((0, parameters)), np.zeros(parameters), nothing, nothing
        )

    def at(self, modes: ModeArray, gradient: Values) -> tuple[Values, Values]:
        """The correction at `[m, 4]` modes with `[m, k]` gradients, and the uncertainty of a measurement there.

        Returns:
            `[m]` means and `[m]` standard deviations, both of logarithms.
        """
        across = self.process.covariance(modes, self.modes)
        spread_at_modes, spread_measured = gradient * self.parameter_sd, self.gradient * self.parameter_sd
        among = spread_measured @ spread_measured.T + self.process.covariance(self.modes, self.modes)
        root = np.linalg.cholesky(among + np.diag(self.measurement_var))
        prior = (spread_at_modes**2).sum(1) + self.process.amplitude**2 + self.process.nugget_sd**2
        explained = (solve_triangular(root, (spread_at_modes @ spread_measured.T + across).T, lower=True) ** 2).sum(0)
        sd = np.sqrt(np.maximum(prior - explained, 0.0) + MEASUREMENT_SD**2)
        return np.asarray(across @ self.weights), np.asarray(sd)

    def left_out(self) -> tuple[Values, Values]:
        """Leave-one-out residuals of the `n` measured modes.

        Returns:
            `[n]` log residuals from the prediction by the other measurements, and the `[n]` standard deviations
            expected of correct measurements.
        """
        spread = self.gradient * self.parameter_sd
        among = spread @ spread.T + self.process.covariance(self.modes, self.modes)
        precision = np.diag(np.linalg.inv(among + np.diag(self.measurement_var)))
        variance = 1 / precision - self.measurement_var + MEASUREMENT_SD**2
        return np.asarray(self.weights / precision), np.asarray(np.sqrt(variance))


@dataclass(frozen=True)
class Remainder:
    """What is added to the logarithm of one modelled quantity.

    Attributes:
        share: share of the reference's residual that applies here.
        surface: the reference's residual.
        correction: the correction by the measured modes.
    """

    share: float
    surface: Surface
    correction: Correction
