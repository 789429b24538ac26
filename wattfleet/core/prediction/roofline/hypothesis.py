"""One hypothesis about a workload, fitted to measured rows: the physics of time and power, and their remainders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import Hardware
from wattfleet.core.prediction.roofline.estimation import (
    MAX_INDUCING,
    Correction,
    Model,
    Points,
    Prior,
    Remainder,
    Surface,
    both_at,
    expected_process,
    generalised_fit,
    jacobian,
    log_evidence,
    residual_weights,
    robust_fit,
    value_at,
)
from wattfleet.core.prediction.roofline.physics import (
    PowerParameters,
    Settings,
    TimeParameters,
    active_power_mw,
    activity,
    log_time_gradient,
    step_time_ms,
)
from wattfleet.core.prediction.roofline.population import power_shift, time_shift
from wattfleet.core.prediction.tensors import LARGEST_LOG

# --- Quantity ---------------------------------------------------------------------------------------------------------
# Fitting one quantity, time or power, of one workload: the parameters of the physics, and the residual.


Values = NDArray[np.float64]
GpuShare = Callable[[Values], Values]
"""Returns the elasticity of a quantity with respect to the GPU's work, `[n]`, from its `[n, k]` derivatives."""

SHARE = (0.4, 0.25)
"""Prior of the share of the population's residual that applies to another workload: mean and standard deviation."""

# Number of measured rows at which the scatter of the rows and that of the model have equal weight in the intervals.
_SCALE_ROWS = 10.0
_MAX_SCALE = 3.0
# Minimum number of measured rows whose scatter is used for the intervals.
_MIN_SCATTER_ROWS = 5


@dataclass(frozen=True)
class FittedQuantity:
    """One quantity, fitted to measured rows.

    Attributes:
        log_parameters: `[k]` log parameters of the physics.
        remainder: the correction that is added to the physics.
        log_evidence: log probability density of the measurements under the prior.
    """

    log_parameters: Values
    remainder: Remainder
    log_evidence: float


def fit_rows(
    physics: Model, settings: Settings, observed: Values, prior: Prior, surface: Surface, width: float, gpu: GpuShare
) -> FittedQuantity:
    """Fit one quantity to few rows, or none.

    Args:
        physics: the model from log parameters to log values at the rows.
        settings: `[n, 5]` measured rows.
        observed: `[n]` measured logarithms.
        prior: the prior of the parameters.
        surface: the residual of the physics for other workloads.
        width: log residual beyond which a row is more likely to be wrong than typical of the workload.
        gpu: returns the elasticity with respect to GPU work.

    Raises:
        InvalidInputError: no plausible parameters explain the rows.
    """
    prior = prior.extended(*SHARE)
    model = with_surface(physics, surface.at(settings))
    parameters = prior.mean
    _require_plausible(parameters, value_at(model, parameters))
    if len(observed):
        parameters = robust_fit(model, observed, prior, width / 5, "soft_l1", starts=1)
    residuals, gradient = observed - value_at(model, parameters), jacobian(model, parameters)
    row_weights = residual_weights(residuals, width)
    # The model is nearly linear around these parameters, so residuals around the prior's mean are nearly normal.
    target, spread = residuals + gradient @ (parameters - prior.mean), gradient @ prior.root
    points = Points(settings, gpu(gradient))
    process = expected_process(points, target, row_weights, spread @ spread.T)
    measurement_var = process.measurement_var(row_weights)
    if len(observed):
        covariance = process.covariance(points, points) + np.diag(measurement_var)
        parameters = generalised_fit(model, observed, prior, covariance, parameters)
    residuals, gradient = observed - value_at(model, parameters), jacobian(model, parameters)
    _require_plausible(parameters, residuals)
    points = Points(settings, gpu(gradient))
    covariance = process.covariance(points, points) + np.diag(measurement_var)
    spread = gradient @ prior.root
    correction = Correction(
        process, points, gradient, prior.root, measurement_var, np.asarray(np.linalg.solve(covariance, residuals))
    )
    target = residuals + gradient @ (parameters - prior.mean)
    evidence = log_evidence(covariance + spread @ spread.T, target) if len(observed) else 0.0
    remainder = Remainder(float(parameters[-1]), surface, _with_scaled_intervals(correction))
    return FittedQuantity(parameters[:-1], remainder, evidence)


def _require_plausible(parameters: Values, values: Values) -> None:
    """Check log parameters and the values computed from them."""
    if not ((np.abs(parameters) <= LARGEST_LOG).all() and np.isfinite(values).all()):
        raise InvalidInputError(
            "the prior does not fit the measured rows: check the units of the rows, or choose another reference"
        )


def fit_corpus(physics: Model, settings: Settings, observed: Values, prior: Prior, width: float) -> FittedQuantity:
    """Fit one quantity to a whole corpus with some wrong rows; the order of the rows does not matter.

    The residual is condensed into a surface instead of a correction.
    """
    parameters = robust_fit(physics, observed, prior, 0.02, "cauchy", starts=3)
    residuals = observed - value_at(physics, parameters)
    surface = Surface.fit(settings, residuals, residual_weights(residuals, width), inducing_rows(settings))
    remaining = np.abs(residuals - surface.at(settings))
    # The standard deviation whose 90 % interval contains 90 % of the plausible rows; wrong rows do not widen it.
    sd = float(np.quantile(remaining[remaining <= width], 0.9)) / 1.645
    correction = Correction.none(len(parameters) + 1, sd, np.unique(settings[:, 4]))
    return FittedQuantity(parameters, Remainder(1.0, surface, correction), 0.0)


def inducing_rows(settings: Settings) -> NDArray[np.intp]:
    """Indices of the inducing rows of a corpus's surface. The choice does not depend on the order of the rows."""
    order = np.lexsort(settings.T)
    return np.asarray(order[np.random.default_rng(0).permutation(len(settings))[:MAX_INDUCING]])


def with_surface(physics: Model, surface: Values) -> Model:
    """Extend a model with one more parameter: the share of a surface whose `[n]` values are given."""
    return lambda parameters: physics(parameters[:-1]) + parameters[-1][:, None] * surface


def predict_rows(
    values: Values,
    gradient: Values,
    remainder: Remainder,
    settings: Settings,
    surface: Values,
    gpu: GpuShare,
) -> tuple[Values, Values]:
    """Predict the mean and standard deviation of one quantity's logarithm, `[n]` each.

    Args:
        values: `[n]` logarithms that the physics gives.
        gradient: `[n, k]` their derivatives with respect to the log parameters.
        remainder: the correction that is added.
        settings: `[n, 5]` rows.
        surface: `[n]` the residual of the physics for other workloads.
        gpu: returns the elasticity with respect to GPU work.
    """
    gradient = np.column_stack([gradient, surface])
    correction, sd = remainder.correction.at(Points(settings, gpu(gradient)), gradient)
    return values + remainder.share * surface + correction, sd


def _with_scaled_intervals(correction: Correction) -> Correction:
    """Widen the intervals if the leave-one-out residuals of the measured rows are larger than expected.

    Wrong rows count here, because similar ones are to be expected among the rows that were not measured.
    """
    rows = len(correction.weights)
    if rows < _MIN_SCATTER_ROWS:
        return correction
    residuals, expected = correction.left_out()
    wider = np.clip(np.quantile(np.abs(residuals) / expected, 0.9) / 1.645, 1.0, _MAX_SCALE)
    return replace(correction, interval_scale=float(wider ** (rows / (rows + _SCALE_ROWS))))


# --- Hypothesis -------------------------------------------------------------------------------------------------------

# Log residuals of time and power beyond which a row is more likely to be wrong than typical of the workload.
TIME_WIDTH, POWER_WIDTH = 0.15, 0.08
_GPU_WORK = [
    k
    for k, name in enumerate(TimeParameters.__dataclass_fields__)
    if name in ("compute_mcycles", "serial_compute_mcycles", "traffic_mcycles")
]


@dataclass(frozen=True)
class Rows:
    """Measured rows, as the fits use them.

    Attributes:
        settings: `[n, 5]` modes and batch sizes.
        log_ms: `[n]` logarithms of the times, ms.
        log_mw: `[n]` logarithms of the powers, mW.
    """

    settings: Settings
    log_ms: Values
    log_mw: Values


@dataclass(frozen=True)
class Assumptions:
    """The prior of a hypothesis, before any measurement.

    Attributes:
        time: the prior of the time parameters.
        power: the prior of the power parameters.
        surfaces: the mean residuals of other workloads, of time and of power.
        loader_workers: number of processes that load data; None if nothing is assumed about it.
    """

    time: Prior
    power: Prior
    surfaces: tuple[Surface, Surface]
    loader_workers: int | None = None


@dataclass(frozen=True)
class Hypothesis:
    """The model of a workload's time and power under one hypothesis about its unknown facts.

    Attributes:
        probability: the posterior probability of the hypothesis, given the measurements.
        time: parameters of the step time.
        power: parameters of the power.
        time_remainder: what is added to the logarithm of the modelled time.
        power_remainder: what is added to the logarithm of the modelled power.
        loader_workers: the number of processes that load data; None if it is unknown.
    """

    probability: float
    time: TimeParameters
    power: PowerParameters
    time_remainder: Remainder
    power_remainder: Remainder
    loader_workers: int | None = None

    def adapted(self, of: Hardware, to: Hardware) -> Hypothesis:
        """The hypothesis scaled to another board by the two boards' data sheets."""
        time = TimeParameters.from_log(self.time.log() + time_shift(of, to))
        power = PowerParameters.from_log(self.power.log() + power_shift(of, to))
        return replace(self, time=time, power=power)

    def predict(self, settings: Settings) -> tuple[Values, Values, Values, Values]:
        """Predict the rows at `[n, 5]` settings.

        Returns:
            The mean and the standard deviation of the logarithm of the time in ms, and both of the power in mW; `[n]`
            each.
        """
        of_time, of_power = both_at(settings, self.time_remainder.surface, self.power_remainder.surface)
        log_ms, gradient = np.log(step_time_ms(self.time, settings)), log_time_gradient(self.time, settings)
        time = predict_rows(log_ms, gradient, self.time_remainder, settings, of_time, _time_gpu_share)
        physics, log_power = power_physics(self.time, settings), self.power.log()
        log_mw, gradient = value_at(physics, log_power), jacobian(physics, log_power)
        power = predict_rows(log_mw, gradient, self.power_remainder, settings, of_power, _power_gpu_share)
        return *time, *power


def fit_time(rows: Rows, assumed: Assumptions) -> FittedQuantity:
    """Fit the time to few rows, or none."""
    return fit_rows(
        time_physics(rows.settings),
        rows.settings,
        rows.log_ms,
        assumed.time,
        assumed.surfaces[0],
        TIME_WIDTH,
        _time_gpu_share,
    )


def fit_power(rows: Rows, assumed: Assumptions, time: FittedQuantity) -> FittedQuantity:
    """Fit the power to few rows, or none, after the time."""
    theta = TimeParameters.from_log(time.log_parameters)
    return fit_rows(
        power_physics(theta, rows.settings),
        rows.settings,
        rows.log_mw,
        assumed.power,
        assumed.surfaces[1],
        POWER_WIDTH,
        _power_gpu_share,
    )


def with_power(rows: Rows, assumed: Assumptions, time: FittedQuantity, probability: float) -> Hypothesis:
    """Fit the power of a hypothesis whose time was fitted, and return the complete hypothesis."""
    power = fit_power(rows, assumed, time)
    return Hypothesis(
        probability,
        TimeParameters.from_log(time.log_parameters),
        PowerParameters.from_log(power.log_parameters),
        time.remainder,
        power.remainder,
        assumed.loader_workers,
    )


def fit_whole_corpus(rows: Rows, time_prior: Prior, power_prior: Prior) -> Hypothesis:
    """Fit both quantities to a corpus, which is so large that the priors hardly matter."""
    time = fit_corpus(time_physics(rows.settings), rows.settings, rows.log_ms, time_prior, TIME_WIDTH)
    theta = TimeParameters.from_log(time.log_parameters)
    physics = power_physics(theta, rows.settings)
    power = fit_corpus(physics, rows.settings, rows.log_mw, power_prior, POWER_WIDTH)
    return Hypothesis(1.0, theta, PowerParameters.from_log(power.log_parameters), time.remainder, power.remainder)


def time_physics(settings: Settings) -> Model:
    """The model from log time parameters to log times at `[n, 5]` settings."""
    return lambda log_time: np.log(step_time_ms(TimeParameters.from_log(log_time), settings))


def power_physics(time: TimeParameters, settings: Settings) -> Model:
    """The model from log power parameters to log powers at `[n, 5]` settings."""
    busy = activity(time, settings)
    return lambda log_power: np.log(active_power_mw(PowerParameters.from_log(log_power), busy))


def _time_gpu_share(gradient: Values) -> Values:
    """The elasticity of the time with respect to all GPU work, `[n]`."""
    return np.asarray(gradient[:, _GPU_WORK].sum(1))


def _power_gpu_share(gradient: Values) -> Values:
    """Zeros, `[n]`: the power's parameters do not depend on the batch size."""
    return np.zeros(len(gradient))
