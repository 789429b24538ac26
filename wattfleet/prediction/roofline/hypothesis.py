"""One hypothesis about a workload, fitted to measured rows: the physics of time and power, and their remainders."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from wattfleet.modes import Hardware
from wattfleet.prediction.roofline.estimation import Model, Prior, jacobian, value_at
from wattfleet.prediction.roofline.physics import (
    PowerParameters,
    Settings,
    TimeParameters,
    active_power_mw,
    activity,
    log_time_gradient,
    step_time_ms,
)
from wattfleet.prediction.roofline.population import power_shift, time_shift
from wattfleet.prediction.roofline.quantity import FittedQuantity, fit_corpus, fit_rows, no_effects, predict_rows
from wattfleet.prediction.roofline.residual import Remainder, Surface, both_at

Values = NDArray[np.float64]

# Log residuals of time and power beyond which a row is rather wrong than typical of the workload.
TIME_WIDTH, POWER_WIDTH = 0.15, 0.08
_TIME = len(TimeParameters.__dataclass_fields__)
# Share of the variance of the power by unknown time parameters that may be neglected.
_NEGLIGIBLE = 0.02
_GPU_WORK = [
    k
    for k, name in enumerate(TimeParameters.__dataclass_fields__)
    if name in ("compute_mcycles", "serial_compute_mcycles", "traffic_mcycles")
]


def no_unknowns() -> Values:
    """Nothing is unknown of the time parameters, `[k, 0]`."""
    return np.empty((_TIME, 0))


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
    """What a hypothesis assumes before any measurement.

    Attributes:
        time: the prior of the time parameters.
        power: the prior of the power parameters.
        surfaces: the mean residuals of other workloads, of time and of power.
        loader_workers: number of processes that load data; None if nothing is assumed of it.
    """

    time: Prior
    power: Prior
    surfaces: tuple[Surface, Surface]
    loader_workers: int | None = None


@dataclass(frozen=True)
class Hypothesis:
    """Time and power of a workload, if one hypothesis about it is true.

    Attributes:
        probability: the probability of the hypothesis, given the measurements.
        time: parameters of the step time.
        power: parameters of the power.
        time_remainder: what is added to the logarithm of the modelled time.
        power_remainder: what is added to the logarithm of the modelled power.
        loader_workers: the number of processes that load data; None if it is unknown.
        time_unknowns: `[k, r]` changes of the log time parameters by `r` independent standard deviations, as far as
            they matter for the power. The measured times leave them open.
    """

    probability: float
    time: TimeParameters
    power: PowerParameters
    time_remainder: Remainder
    power_remainder: Remainder
    loader_workers: int | None = None
    time_unknowns: Values = field(default_factory=no_unknowns)

    def adapted(self, of: Hardware, to: Hardware) -> Hypothesis:
        """The same, scaled to another board by the two boards' data sheets."""
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
        effects = time_effects(self.time, self.time_unknowns, log_power, settings)
        power = predict_rows(log_mw, gradient, self.power_remainder, settings, of_power, _power_gpu_share, effects)
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


def with_power(rows: Rows, assumed: Assumptions, time: FittedQuantity, probability: float) -> Hypothesis:
    """Fit the power to few rows, or none, after the time."""
    theta = TimeParameters.from_log(time.log_parameters)
    # The effects are linear only for a prior that was learned. General priors are far too wide for that.
    is_learned = assumed.time.samples is not None
    unknowns = _time_unknowns(time, theta, assumed) if is_learned else no_unknowns()
    power = fit_rows(
        power_physics(theta, rows.settings),
        rows.settings,
        rows.log_mw,
        assumed.power,
        assumed.surfaces[1],
        POWER_WIDTH,
        _power_gpu_share,
        lambda log_power: time_effects(theta, unknowns, log_power, rows.settings),
    )
    return Hypothesis(
        probability,
        theta,
        PowerParameters.from_log(power.log_parameters),
        time.remainder,
        power.remainder,
        assumed.loader_workers,
        unknowns,
    )


def fit_whole_corpus(rows: Rows, time_prior: Prior, power_prior: Prior) -> Hypothesis:
    """Fit both quantities to a corpus, whose priors hardly matter."""
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


def time_effects(time: TimeParameters, unknowns: Values, log_power: Values, settings: Settings) -> Values:
    """By how much the log power changes with `r` unknown changes of the time parameters at `[n, 5]` settings, `[n, r]`.

    Args:
        time: the fitted time parameters.
        unknowns: `[k, r]` changes of their logarithms.
        log_power: log power parameters.
        settings: the settings.
    """
    power = PowerParameters.from_log(log_power)

    def log_mw(sizes: Values) -> Values:
        changed = TimeParameters.from_log(time.log()[:, None] + unknowns @ sizes)
        return np.asarray(np.log(active_power_mw(power, activity(changed, settings))))

    r = unknowns.shape[1]
    return jacobian(log_mw, np.zeros(r)) if r else no_effects(settings)


def _time_unknowns(time: FittedQuantity, theta: TimeParameters, assumed: Assumptions) -> Values:
    """What the measured times leave open about the time parameters, as far as it matters for the power, `[k, r]`."""
    root = time.remainder.correction.parameter_root()[:-1]
    # The rows that carry the residual of other workloads are spread over the modes of a board.
    probe = assumed.surfaces[1].settings
    effects = time_effects(theta, root, assumed.power.mean, probe) if len(probe) else root
    _, sizes, directions = np.linalg.svd(effects, full_matrices=False)
    share = np.cumsum(sizes[::-1] ** 2)[::-1] / (sizes**2).sum()
    return np.asarray(root @ directions[share > _NEGLIGIBLE].T)


def _time_gpu_share(gradient: Values) -> Values:
    """By how much the log time grows with the log of all GPU work, `[n]`."""
    return np.asarray(gradient[:, _GPU_WORK].sum(1))


def _power_gpu_share(gradient: Values) -> Values:
    """The power's parameters do not depend on the batch size."""
    return np.zeros(len(gradient))
