"""Fitting positive parameters to few or many observations: least squares with a Gaussian prior.

Parameters are fitted as logarithms, which keeps them positive. Observations are logarithms, too, so that a residual is
a relative error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve, solve_triangular
from scipy.optimize import least_squares
from scipy.special import softmax

from wattfleet.core.prediction.roofline.physics import Settings
from wattfleet.core.prediction.tensors import LARGEST_LOG

Values = NDArray[np.float64]
Model = Callable[[Values], Values]
"""Maps `p` sets of parameters, `[k, p]`, to the logarithms that they predict, `[p, n]`."""

_STEP = 1e-5
# Standard deviation of further starting points around the first: a factor of about 1.5.
_START_SPREAD = 0.4
# Keeps a covariance invertible if a parameter is known exactly.
_JITTER = 1e-10


@dataclass(frozen=True)
class Prior:
    """The prior distribution of `k` parameters: a normal distribution.

    Attributes:
        mean: `[k]` means.
        root: `[k, k]` lower Cholesky factor of the covariance.
    """

    mean: Values
    root: Values

    @classmethod
    def independent(cls, mean: Values, sd: Values) -> Prior:
        """Independent parameters with `[k]` means and standard deviations."""
        return cls(mean, np.asarray(np.diag(sd)))

    @classmethod
    def correlated(cls, mean: Values, covariance: Values) -> Prior:
        """Parameters with `[k]` means and a `[k, k]` covariance."""
        return cls(mean, np.asarray(np.linalg.cholesky(covariance + _JITTER * np.eye(len(mean)))))

    def extended(self, mean: float, sd: float) -> Prior:
        """The prior with one more, independent parameter."""
        k = len(self.mean)
        root = np.zeros((k + 1, k + 1))
        root[:k, :k], root[k, k] = self.root, sd
        return Prior(np.append(self.mean, mean), root)

    def parameters(self, deviations: Values) -> Values:
        """The parameters at independent standard deviations from the mean; both `[k]`, or both `[k, p]`."""
        offset = self.root @ deviations
        return np.asarray(self.mean + offset if offset.ndim == 1 else self.mean[:, None] + offset)

    def deviations(self, parameters: Values) -> Values:
        """Independent standard deviations of `[k]` parameters from the mean, `[k]`."""
        return np.asarray(solve_triangular(self.root, parameters - self.mean, lower=True))


def robust_fit(
    model: Model,
    observed: Values,
    prior: Prior,
    scale: float,
    loss: Literal["soft_l1", "cauchy"],
    starts: int,
) -> Values:
    """The parameters with the largest posterior density, `[k]`, by a fit that is robust to single wrong observations.

    Args:
        model: the model to fit.
        observed: `[n]` observed logarithms.
        prior: the prior; the first start is its mean.
        scale: standard deviation of an ordinary residual.
        loss: how the cost grows with a large residual: `soft_l1` linearly, `cauchy` only logarithmically, which suits
            many observations of which some are wrong.
        starts: number of starting points; those after the first are drawn around it with a fixed seed.
    """
    whitened = _whitened(model, prior)

    def residuals(deviations: Values) -> Values:
        return np.concatenate([(value_at(whitened, deviations) - observed) / scale, deviations])

    def gradient(deviations: Values) -> Values:
        return np.vstack([jacobian(whitened, deviations) / scale, np.eye(len(deviations))])

    rng = np.random.default_rng(0)
    k = len(prior.mean)
    further = [prior.deviations(prior.mean + rng.normal(0, _START_SPREAD, k)) for _ in range(starts - 1)]
    fits = [least_squares(residuals, start, jac=gradient, loss=loss, max_nfev=100) for start in (np.zeros(k), *further)]
    return prior.parameters(np.asarray(min(fits, key=lambda fit: float(fit.cost)).x))


def generalised_fit(model: Model, observed: Values, prior: Prior, covariance: Values, start: Values) -> Values:
    """The parameters with the largest posterior density, `[k]`, for correlated residuals (generalised least squares).

    Args:
        model: the model to fit.
        observed: `[n]` observed logarithms.
        prior: the prior.
        covariance: `[n, n]` covariance of the residuals.
        start: `[k]` parameters near the solution.
    """
    whitened = _whitened(model, prior)
    # Inverted once: for the few rows of a device, solving in each step takes 30 times as long as multiplying.
    decorrelate = solve_triangular(np.linalg.cholesky(covariance), np.eye(len(observed)), lower=True)

    def residuals(deviations: Values) -> Values:
        return np.concatenate([decorrelate @ (value_at(whitened, deviations) - observed), deviations])

    def gradient(deviations: Values) -> Values:
        return np.vstack([decorrelate @ jacobian(whitened, deviations), np.eye(len(deviations))])

    found = least_squares(residuals, prior.deviations(start), jac=gradient, max_nfev=50)
    return prior.parameters(np.asarray(found.x))


def _whitened(model: Model, prior: Prior) -> Model:
    """A model as a function of independent deviations from a prior's mean, instead of the parameters."""
    return lambda deviations: model(np.clip(prior.parameters(deviations), -LARGEST_LOG, LARGEST_LOG))


def value_at(model: Model, parameters: Values) -> Values:
    """The model's `[n]` values with one set of `[k]` parameters."""
    return np.asarray(model(parameters[:, None])[0])


def jacobian(model: Model, parameters: Values) -> Values:
    """The derivatives of the model's `[n]` values with respect to its `[k]` parameters, `[n, k]`."""
    k = len(parameters)
    values = model(parameters[:, None] + _STEP * np.eye(k, k + 1, 1))
    return np.asarray((values[1:] - values[0]).T / _STEP)


def residual_weights(residuals: Values, width: float) -> Values:
    """Weight of each residual, `[n]` in (0, 1]: near 1 within `width`, and falling with its 4th power beyond.

    Beyond the width, a larger residual has less influence on the fit. If weights fell only with the square, its
    influence would not decrease.
    """
    return np.asarray(1 / (1 + (residuals / width) ** 4))


# --- Residual ---------------------------------------------------------------------------------------------------------
# Gaussian processes over modes and batch sizes, on the log residuals of the physical model.
#
# A `Surface` condenses the residual of a whole corpus into a few hundred inducing rows. A `Correction` is the exact
# process over the few rows measured on a device, together with the uncertainty of the model's parameters.

MAX_INDUCING = 400
"""Maximum number of inducing rows of a surface."""

MEASUREMENT_SD = 0.01
"""Log standard deviation of repeated measurements of one mode."""

# Length scales in log number of cores, log frequency and log batch size. The number of cores has few, coarse steps, at
# which times jump because of the operating system's scheduling; clocks act smoothly.
_LENGTHS = np.array([0.35, 0.8, 0.8, 0.8, 1.0])
# Squared distance, in units of `_LENGTHS`, below which settings are the same: above rounding errors, and below the
# distance of any two modes of a board.
_SAME_SETTING = 1e-9
# Log standard deviation of one batch size's GPU work around a smooth curve over batch sizes: libraries choose other
# kernels for other batch sizes.
_BATCH_SD = 0.15
# A grid is not worth computing if it has more than this many times as many points as there are rows.
_MAX_GRID = 4
# Candidates for the standard deviations of the smooth residual and of a single mode's own deviation, and the prior of
# both for the few modes of a transfer (log means and log standard deviations). The prior was selected so that the
# intervals of transfers between the corpora have their nominal coverage.
_AMPLITUDES = (0.003, 0.01, 0.02, 0.04, 0.08, 0.15)
_NUGGETS = (0.005, 0.01, 0.02, 0.04, 0.08)
_PRIOR_LOG_MEAN = np.log([0.06, 0.035])
_PRIOR_LOG_SD = np.array([1.0, 0.7])


@dataclass(frozen=True)
class Points:
    """Rows at which residuals are modelled.

    Attributes:
        settings: `[n, 5]` modes and batch sizes.
        gpu_share: `[n]` elasticity of the quantity with respect to GPU work; 0 if batch sizes do not matter.
    """

    settings: Settings
    gpu_share: Values

    @classmethod
    def none(cls) -> Points:
        """No rows."""
        return cls(np.empty((0, 5)), np.empty(0))


def _squared_distances(a: Settings, b: Settings, lengths: Values = _LENGTHS) -> Values:
    """`[n, m]` squared distances of `[n, 5]` and `[m, 5]` settings, in units of length scales."""
    x, y = np.log(a) / lengths, np.log(b) / lengths
    squares = (x**2).sum(1)[:, None] + (y**2).sum(1)[None, :] - 2 * x @ y.T
    return np.asarray(np.maximum(squares, 0.0))


def correlation(a: Settings, b: Settings) -> Values:
    """`[n, m]` correlations of the smooth residual: 1 at the same settings, and falling with distance."""
    return np.asarray(np.exp(-0.5 * _squared_distances(a, b)))


def _batch_covariance(a: Points, b: Points) -> Values:
    """`[n, m]` covariances of the residuals due to the own deviation of each batch size."""
    same = a.settings[:, 4][:, None] == b.settings[:, 4][None, :]
    return np.asarray(_BATCH_SD**2 * same * np.outer(a.gpu_share, b.gpu_share))


def log_evidence(covariance: Values, values: Values) -> float:
    """Log density of `[n]` normal values with mean 0 and a `[n, n]` covariance, without its constant."""
    factor = cho_factor(covariance, lower=True)
    return float(-0.5 * values @ cho_solve(factor, values) - np.log(np.diag(factor[0])).sum())


@dataclass(frozen=True)
class Surface:
    """The mean log residual of a corpus as a function of mode and batch size.

    Attributes:
        settings: `[m, 5]` inducing rows; none for a surface that is zero everywhere.
        weights: `[m]` weight of each inducing row's kernel.
    """

    settings: Settings
    weights: Values

    @classmethod
    def zero(cls) -> Surface:
        """A surface that is zero everywhere."""
        return cls(np.empty((0, 5)), np.empty(0))

    @classmethod
    def fit(cls, settings: Settings, residuals: Values, row_weights: Values, inducing: NDArray[np.intp]) -> Surface:
        """Condense the residuals of a corpus.

        Args:
            settings: `[n, 5]` modes and batch sizes of the corpus.
            residuals: `[n]` log residuals.
            row_weights: `[n]` weights in (0, 1]; a row with a small weight hardly shapes the surface.
            inducing: `[m]` rows that carry the surface, and which determine its smoothness.
        """
        centres = settings[inducing]
        between = correlation(centres, centres)

        def evidence(candidate: tuple[float, float]) -> float:
            amplitude, nugget = candidate
            covariance = amplitude**2 * between + np.diag(nugget**2 / row_weights[inducing])
            return log_evidence(covariance, residuals[inducing])

        amplitude, nugget = max(itertools.product(_AMPLITUDES, _NUGGETS), key=evidence)
        to_corpus = correlation(centres, settings)
        precision = (to_corpus * row_weights) @ to_corpus.T / nugget**2 + between / amplitude**2
        # Neighbouring inducing rows are almost fully correlated: jitter on the diagonal keeps the system solvable.
        precision += 1e-6 * np.diag(precision).mean() * np.eye(len(centres))
        target = to_corpus @ (row_weights * residuals) / nugget**2
        return cls(centres, np.asarray(cho_solve(cho_factor(precision, lower=True), target)))

    def at(self, settings: Settings) -> Values:
        """The surface at `[n, 5]` settings, `[n]` logarithms."""
        return _weighted(settings, self.settings, self.weights[:, None])[:, 0]


def both_at(settings: Settings, one: Surface, other: Surface) -> tuple[Values, Values]:
    """Two surfaces at `[n, 5]` settings, `[n]` each; the kernel is computed once if they share their inducing rows."""
    if not np.array_equal(one.settings, other.settings):
        return one.at(settings), other.at(settings)
    found = _weighted(settings, one.settings, np.column_stack([one.weights, other.weights]))
    return found[:, 0], found[:, 1]


def _weighted(settings: Settings, centres: Settings, weights: Values) -> Values:
    """Weighted sums of the correlations of `[n, 5]` settings with `[m, 5]` centres, `[n, s]` for `[m, s]` weights.

    The correlation is a product over the knobs. A mode space is nearly a grid, so that the factors of its few settings
    of the CPU, and of its few settings of everything else, are computed once.
    """
    grid = _grid(np.asarray(settings, dtype=np.float64).tobytes())
    if grid is None:
        return np.asarray(correlation(settings, centres) @ weights)
    cpu, cpu_row, rest, rest_row = grid
    of_cpu = np.exp(-0.5 * _squared_distances(cpu, centres[:, :2], _LENGTHS[:2]))
    of_rest = np.exp(-0.5 * _squared_distances(rest, centres[:, 2:], _LENGTHS[2:]))
    sums = [((of_cpu * column) @ of_rest.T)[cpu_row, rest_row] for column in weights.T]
    return np.stack(sums, axis=1)


@lru_cache(maxsize=4)  # the same mode space is predicted again and again
def _grid(settings: bytes) -> tuple[Settings, NDArray[np.intp], Settings, NDArray[np.intp]] | None:
    """The different settings of the CPU and of everything else, and the index of both for each of `[n, 5]` settings.

    None if the settings are far from a grid.
    """
    knobs = np.frombuffer(settings).reshape(-1, 5)
    cpu, cpu_row = np.unique(knobs[:, :2], axis=0, return_inverse=True)
    rest, rest_row = np.unique(knobs[:, 2:], axis=0, return_inverse=True)
    if len(cpu) * len(rest) > _MAX_GRID * len(knobs):
        return None
    return cpu, cpu_row.ravel(), rest, rest_row.ravel()


@dataclass(frozen=True)
class Process:
    """The prior distribution of log residuals.

    Attributes:
        amplitude: standard deviation of the smooth residual.
        nugget_sd: standard deviation of a single row's own deviation, which only a measurement of that row shows.
    """

    amplitude: float
    nugget_sd: float

    def covariance(self, a: Points, b: Points) -> Values:
        """Covariance of the residuals at `n` and `m` rows, `[n, m]`."""
        squares = _squared_distances(a.settings, b.settings)
        smooth = self.amplitude**2 * np.exp(-0.5 * squares)
        return np.asarray(smooth + self.nugget_sd**2 * (squares < _SAME_SETTING) + _batch_covariance(a, b))

    def variance(self, points: Points) -> Values:
        """Variances of the residuals at `n` rows, `[n]`."""
        return np.asarray(self.amplitude**2 + self.nugget_sd**2 + (_BATCH_SD * points.gpu_share) ** 2)

    def measurement_var(self, row_weights: Values) -> Values:
        """Variances of `n` measurements with `[n]` weights in (0, 1], `[n]`."""
        return np.asarray(MEASUREMENT_SD**2 + self.nugget_sd**2 * (1 / row_weights - 1))


def expected_process(points: Points, target: Values, row_weights: Values, parametric: Values) -> Process:
    """Estimate the process from `n` residuals.

    Its variances are averaged over all plausible candidates. With few modes, the most likely candidates alone would be
    far too small.

    Args:
        points: the `n` measured rows.
        target: `[n]` residuals around the prior's mean.
        row_weights: `[n]` weights in (0, 1].
        parametric: `[n, n]` covariance of the residuals due to uncertain parameters.
    """
    smooth, own = correlation(points.settings, points.settings), np.eye(len(target))
    known = parametric + _batch_covariance(points, points)
    candidates = np.array(list(itertools.product(_AMPLITUDES, _NUGGETS)))

    def log_posterior(candidate: Values) -> float:
        amplitude, nugget = candidate.tolist()
        noise = Process(amplitude, nugget).measurement_var(row_weights)
        covariance = known + amplitude**2 * smooth + nugget**2 * own + np.diag(noise)
        deviation = ((np.log(candidate) - _PRIOR_LOG_MEAN) / _PRIOR_LOG_SD) ** 2
        return log_evidence(covariance, target) - 0.5 * float(deviation.sum())

    weight = softmax([log_posterior(candidate) for candidate in candidates])
    return Process(*np.sqrt(weight @ candidates**2).tolist())


@dataclass(frozen=True)
class Correction:
    """The correction by a device's measured rows beyond the fitted model, with its uncertainty.

    Attributes:
        process: the prior on the residual.
        points: the `n` measured rows; may be none.
        gradient: `[n, k]` derivatives of the model's logarithm with respect to its parameters at those rows.
        prior_root: `[k, k]` lower Cholesky factor of the parameters' covariance before the measurements.
        measurement_var: `[n]` variances of the measured logarithms.
        weights: `[n]` the inverse of the residuals' covariance, times the measured residuals.
        interval_scale: factor of all standard deviations of predictions, chosen so that the measured rows lie within
            their intervals.
        known_batches: `[b]` batch sizes whose own deviation the surface of a corpus has.
    """

    process: Process
    points: Points
    gradient: Values
    prior_root: Values
    measurement_var: Values
    weights: Values
    interval_scale: float = 1.0
    known_batches: Values = field(default_factory=lambda: np.empty(0))

    @classmethod
    def none(cls, parameters: int, sd: float, known_batches: Values) -> Correction:
        """No correction, with known parameters; single rows of `[b]` known batch sizes deviate by `sd`."""
        nothing, known = np.empty(0), np.zeros((parameters, parameters))
        return cls(
            Process(0.0, sd),
            Points.none(),
            np.empty((0, parameters)),
            known,
            nothing,
            nothing,
            known_batches=known_batches,
        )

    def residual_covariance(self) -> Values:
        """Covariance of the measured residuals if the parameters were known, `[n, n]`."""
        return np.asarray(self.process.covariance(self.points, self.points) + np.diag(self.measurement_var))

    def _covariance(self) -> Values:
        """Covariance of the measured residuals around the prior's mean, `[n, n]`."""
        spread = self.gradient @ self.prior_root
        return np.asarray(spread @ spread.T + self.residual_covariance())

    def at(self, points: Points, gradient: Values) -> tuple[Values, Values]:
        """The correction at `m` rows with `[m, k]` gradients, and the uncertainty of a measurement there.

        Returns:
            `[m]` means and `[m]` standard deviations, both of logarithms.
        """
        is_known = np.isin(points.settings[:, 4], self.known_batches)
        points = replace(points, gpu_share=np.where(is_known, 0.0, points.gpu_share))
        across = self.process.covariance(points, self.points)
        spread, spread_measured = gradient @ self.prior_root, self.gradient @ self.prior_root
        root = np.linalg.cholesky(self._covariance())
        prior = (spread**2).sum(1) + self.process.variance(points)
        explained = (solve_triangular(root, (spread @ spread_measured.T + across).T, lower=True) ** 2).sum(0)
        sd = self.interval_scale * np.sqrt(np.maximum(prior - explained, 0.0) + MEASUREMENT_SD**2)
        return np.asarray(across @ self.weights), np.asarray(sd)

    def left_out(self) -> tuple[Values, Values]:
        """Leave-one-out residuals of the `n` measured rows.

        Returns:
            `[n]` log residuals from the prediction by the other measurements, and the `[n]` standard deviations
            expected of correct measurements.
        """
        precision = np.diag(np.linalg.inv(self._covariance()))
        variance = 1 / precision - self.measurement_var + MEASUREMENT_SD**2
        return np.asarray(self.weights / precision), np.asarray(np.sqrt(variance))


@dataclass(frozen=True)
class Remainder:
    """The correction that is added to the logarithm of one modelled quantity.

    Attributes:
        share: share of the reference's residual that applies here.
        surface: the reference's residual.
        correction: the correction by the measured modes.
    """

    share: float
    surface: Surface
    correction: Correction
