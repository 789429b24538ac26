"""One hypothesis about a workload, fitted to measured rows: the physics of time and power, and their remainders."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
from wattfleet.prediction.roofline.quantity import FittedQuantity, fit_corpus, fit_rows, predict_rows
from wattfleet.prediction.roofline.residual import Remainder, Surface, both_at

Values = NDArray[np.float64]

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
