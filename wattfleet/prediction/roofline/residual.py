"""What the physics leaves unexplained: Gaussian processes over the modes, on log residuals.

A `Surface` condenses the residual of a whole corpus into a few hundred inducing modes. A `Correction` is the exact
process over the few modes measured on a device, together with the uncertainty of the physics' parameters.
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

MEASUREMENT_SD = 0.01
"""Repeated measurements of one mode differ by about this much (log standard deviation)."""

# Distance in log number of cores and log frequency over which residuals stay alike. Cores are counted in few,
# coarse steps, at which the operating system's scheduling makes times jump; clocks act smoothly.
_LENGTHS = np.array([0.35, 0.8, 0.8, 0.8])
# Two modes of any board differ by more than this (squared, in units of `_LENGTHS`); rounding errs by less.
_SAME_MODE = 1e-9
# What is tried for the standard deviations of a smooth residual and of a single mode's own deviation, and what
# the few modes of a transfer are drawn towards: log means and log standard deviations that keep the intervals of
# transfers between the corpora honest.
_AMPLITUDES = (0.003, 0.01, 0.02, 0.04, 0.08, 0.15)
_NUGGETS = (0.005, 0.01, 0.02, 0.04, 0.08)
_USUAL = np.log([0.06, 0.035])
_USUAL_SD = np.array([1.0, 0.7])


def _squared_distances(a: ModeArray, b: ModeArray) -> Values:
    """`[n, m]` squared distances of `[n, 4]` and `[m, 4]` modes, in units of `_LENGTHS`."""
    x, y = np.log(a) / _LENGTHS, np.log(b) / _LENGTHS
    squares = (x**2).sum(1)[:, None] + (y**2).sum(1)[None, :] - 2 * x @ y.T
    return np.asarray(np.maximum(squares, 0.0))


def _alike(a: ModeArray, b: ModeArray) -> Values:
    """`[n, m]` correlations of the smooth residual: 1 at the same mode, falling with distance."""
    return np.asarray(np.exp(-0.5 * _squared_distances(a, b)))


def _log_evidence(covariance: Values, values: Values) -> float:
    factor = cho_factor(covariance, lower=True)
    return float(-0.5 * values @ cho_solve(factor, values) - np.log(np.diag(factor[0])).sum())


@dataclass(frozen=True)
class Surface:
    """The mean log residual of a corpus as a function of the mode.

    Attributes:
        modes: `[m, 4]` inducing modes; none for a surface that is zero everywhere.
        weights: `[m]` height of each inducing mode's bump.
    """

    modes: ModeArray
    weights: Values

    @classmethod
    def zero(cls) -> Surface:
        """The surface of nothing learned."""
        return cls(np.empty((0, 4)), np.empty(0))

    @classmethod
    def fit(cls, modes: ModeArray, residuals: Values, trusted: Values, inducing: NDArray[np.intp]) -> Surface:
        """Condense the residuals of a corpus.

        Args:
            modes: `[n, 4]` modes of the corpus.
            residuals: `[n]` log residuals.
            trusted: `[n]` weights in (0, 1]; a row of little weight does not shape the surface.
            inducing: `[m]` rows whose modes carry the surface, and on which its smoothness is chosen.
        """
        centres = modes[inducing]
        between = _alike(centres, centres)

        def provenance(choice: tuple[float, float]) -> float:
            amplitude, nugget = choice
            covariance = amplitude**2 * between + np.diag(nugget**2 / trusted[inducing])
            return _log_evidence(covariance, residuals[inducing])

        amplitude, nugget = max(itertools.product(_AMPLITUDES, _NUGGETS), key=provenance)
        to_corpus = _alike(centres, modes)
        precision = (to_corpus * trusted) @ to_corpus.T / nugget**2 + between / amplitude**2
        # Neighbouring inducing modes are nearly alike: a little on the diagonal keeps the system solvable.
        precision += 1e-6 * np.diag(precision).mean() * np.eye(len(centres))
        pull = to_corpus @ (trusted * residuals) / nugget**2
        return cls(centres, np.asarray(cho_solve(cho_factor(precision, lower=True), pull)))

    def at(self, modes: ModeArray) -> Values:
        """The surface at `[n, 4]` modes, `[n]` logarithms."""
        return np.asarray(_alike(modes, self.modes) @ self.weights)


def both_at(modes: ModeArray, one: Surface, other: Surface) -> tuple[Values, Values]:
    """Two surfaces at `[n, 4]` modes, `[n]` each; those of one corpus share their inducing modes, and then the work."""
    if not np.array_equal(one.modes, other.modes):
        return one.at(modes), other.at(modes)
    bumps = _alike(modes, one.modes)
    return np.asarray(bumps @ one.weights), np.asarray(bumps @ other.weights)


@dataclass(frozen=True)
class Process:
    """A prior on log residuals.

    Attributes:
        amplitude: standard deviation of the smooth residual.
        nugget_sd: standard deviation of a single mode's own deviation, which only measuring that mode reveals.
    """

    amplitude: float
    nugget_sd: float

    def covariance(self, a: ModeArray, b: ModeArray) -> Values:
        """Covariance of the residuals at `[n, 4]` and `[m, 4]` modes, `[n, m]`."""
        squares = _squared_distances(a, b)
        smooth = self.amplitude**2 * np.exp(-0.5 * squares)
        return np.asarray(smooth + self.nugget_sd**2 * (squares < _SAME_MODE))

    def measurement_var(self, trusted: Values) -> Values:
        """Variances of measurements of which `[n]` are trusted so far, `[n]`."""
        return np.asarray(MEASUREMENT_SD**2 + self.nugget_sd**2 * (1 / trusted - 1))


def expected_process(modes: ModeArray, target: Values, trusted: Values, parametric: Values) -> Process:
    """The process to expect after seeing `n` residuals.

    Its variances are averaged over what is plausible; at few modes the likeliest ones would be far too small.

    Args:
        modes: `[n, 4]` measured modes.
        target: `[n]` residuals around the prior's mean.
        trusted: `[n]` weights in (0, 1].
        parametric: `[n, n]` covariance that uncertain parameters already give the residuals.
    """
    smooth, own = _alike(modes, modes), np.eye(len(modes))
    choices = np.array(list(itertools.product(_AMPLITUDES, _NUGGETS)))

    def plausibility(choice: Values) -> float:
        amplitude, nugget = choice.tolist()
        noise = Process(amplitude, nugget).measurement_var(trusted)
        covariance = parametric + amplitude**2 * smooth + nugget**2 * own + np.diag(noise)
        unusual = ((np.log(choice) - _USUAL) / _USUAL_SD) ** 2
        return _log_evidence(covariance, target) - 0.5 * float(unusual.sum())

    weight = softmax([plausibility(choice) for choice in choices])
    return Process(*np.sqrt(weight @ choices**2).tolist())


@dataclass(frozen=True)
class Correction:
    """What the measured modes of a device say beyond its fitted physics, and how sure they leave it.

    Attributes:
        process: the prior on the residual.
        modes: `[n, 4]` measured modes; may be none.
        gradient: `[n, k]` derivatives of the model's logarithm by its parameters at those modes.
        parameter_sd: `[k]` standard deviations of the parameters before the measurements.
        measurement_var: `[n]` variances of the measured logarithms.
        weights: `[n]` the measured residuals, solved for their covariance.
    """

    process: Process
    modes: ModeArray
    gradient: Values
    parameter_sd: Values
    measurement_var: Values
    weights: Values

    @classmethod
    def none(cls, parameters: int, sd: float) -> Correction:
        """Nothing to correct, with certain parameters: single modes deviate by `sd`."""
        nothing = np.empty(0)
        return cls(
            Process(0.0, sd), np.empty((0, 4)), np.empty((0, parameters)), np.zeros(parameters), nothing, nothing
        )

    def at(self, modes: ModeArray, gradient: Values) -> tuple[Values, Values]:
        """What to add at `[m, 4]` modes with `[m, k]` gradients, and how sure a measurement there is.

        Returns:
            `[m]` means and `[m]` standard deviations of logarithms.
        """
        between = self.process.covariance(modes, self.modes)
        ahead, behind = gradient * self.parameter_sd, self.gradient * self.parameter_sd
        among = behind @ behind.T + self.process.covariance(self.modes, self.modes)
        root = np.linalg.cholesky(among + np.diag(self.measurement_var))
        prior = (ahead**2).sum(1) + self.process.amplitude**2 + self.process.nugget_sd**2
        explained = (solve_triangular(root, (ahead @ behind.T + between).T, lower=True) ** 2).sum(0)
        sd = np.sqrt(np.maximum(prior - explained, 0.0) + MEASUREMENT_SD**2)
        return np.asarray(between @ self.weights), np.asarray(sd)

    def left_out(self) -> tuple[Values, Values]:
        """What each of the `n` measured modes would miss if it had not been measured.

        Returns:
            `[n]` log residuals against what the other measurements lead to expect, and their `[n]` standard
            deviations if they are true.
        """
        spread = self.gradient * self.parameter_sd
        among = spread @ spread.T + self.process.covariance(self.modes, self.modes)
        precision = np.diag(np.linalg.inv(among + np.diag(self.measurement_var)))
        variance = 1 / precision - self.measurement_var + MEASUREMENT_SD**2
        return np.asarray(self.weights / precision), np.asarray(np.sqrt(variance))


@dataclass(frozen=True)
class Remainder:
    """What is added to the physics of one quantity, in logarithms.

    Attributes:
        share: how much of the reference's residual holds here.
        surface: the reference's residual.
        correction: what the measured modes say beyond.
    """

    share: float
    surface: Surface
    correction: Correction
