"""Estimating a measured workload's parameters for a population."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from wattfleet.modes import Hardware, Profile, WorkloadFacts
from wattfleet.prediction.roofline.estimation import Model, jacobian, residual_weights, value_at
from wattfleet.prediction.roofline.hypothesis import Hypothesis, Rows, fit_whole_corpus, power_physics, time_physics
from wattfleet.prediction.roofline.physics import BASE_BATCH, settings_of
from wattfleet.prediction.roofline.population import Estimate, Member, population_of
from wattfleet.prediction.roofline.priors import general_power_prior, general_time_prior
from wattfleet.prediction.roofline.quantity import SHARE
from wattfleet.prediction.roofline.residual import Remainder, Surface

Values = NDArray[np.float64]

# The model's own errors are correlated at neighbouring modes. Thousands of rows therefore carry no more information
# than this number of independent rows with this error.
_INDEPENDENT_ROWS = 150
_ERROR_SD = 0.03
_WIDTH = 0.1
# A parameter with less information than this stays at the value of the transfer. It is the information of a log
# standard deviation of 3.
_MIN_INFORMATION = 0.1


def measured_member(profile: Profile, facts: WorkloadFacts, hardware: Hardware) -> Member:
    """Estimate a workload's parameters from its measurements.

    Args:
        profile: its measured rows, of one batch size or several.
        facts: its task, and whether it has loader workers.
        hardware: the board that it was measured on.
    """
    batch = np.full(len(profile), facts.batch or BASE_BATCH) if profile.batch is None else profile.batch
    rows = Rows(settings_of(profile.modes, batch), np.log(profile.minibatch_ms), np.log(profile.power_mw))
    # The median step differs between batch sizes, but the general prior is wide.
    prior = general_time_prior(float(np.median(profile.minibatch_ms)), facts)
    fitted = fit_whole_corpus(rows, prior, general_power_prior())
    physics = power_physics(fitted.time, rows.settings)
    return Member(
        facts,
        hardware,
        _estimate(time_physics(rows.settings), fitted.time.log(), rows.log_ms, fitted.time_remainder),
        _estimate(physics, fitted.power.log(), rows.log_mw, fitted.power_remainder),
    )


def _estimate(physics: Model, parameters: Values, observed: Values, remainder: Remainder) -> Estimate:
    """The fitted parameters with the information that the rows carry about them."""
    gradient = jacobian(physics, parameters)
    weights = residual_weights(observed - value_at(physics, parameters), _WIDTH)
    counted = min(1.0, _INDEPENDENT_ROWS / len(observed))
    information = counted / _ERROR_SD**2 * (gradient.T * weights) @ gradient
    return Estimate(parameters, information, remainder.surface)


def learned_member(fitted: Hypothesis, facts: WorkloadFacts, hardware: Hardware) -> Member:
    """Turn a workload whose predictor was fitted into a member of a population.

    Only the information of its own rows counts. The prior of the transfer is removed again, because it came from the
    population that is to contain this member.

    Args:
        fitted: the most probable hypothesis of a transfer to a few rows, or of a fit to a corpus.
        facts: known facts of the workload. If its loader workers are unknown, those of the hypothesis are used.
        hardware: the board of the workload.
    """
    if facts.loader_workers is None:
        facts = replace(facts, loader_workers=fitted.loader_workers)
    time, power = fitted.time_remainder, fitted.power_remainder
    if not power.correction.prior_root.any():
        # It was fitted to a whole corpus.
        known = population_of(fitted.time.log(), fitted.power.log(), (time.surface, power.surface), hardware)
        return replace(known.members[0], facts=facts)
    return Member(
        facts,
        hardware,
        _estimate_without_prior(fitted.time.log(), time),
        _estimate_without_prior(fitted.power.log(), power),
    )


def _estimate_without_prior(parameters: Values, remainder: Remainder) -> Estimate:
    """The estimate from a correction's rows without the prior, if the model is linear around the fitted parameters."""
    correction = remainder.correction
    gradient, of_share = correction.gradient[:, :-1], correction.gradient[:, -1]
    residuals = correction.residual_covariance() @ correction.weights
    # The share of the surface is not a parameter of the workload, so it adds to the residuals.
    share, share_sd = SHARE
    residuals = residuals + of_share * (remainder.share - share)
    covariance = correction.residual_covariance() + share_sd**2 * np.outer(of_share, of_share)
    information = gradient.T @ np.linalg.solve(covariance, gradient)
    pull = gradient.T @ np.linalg.solve(covariance, residuals)
    shift = np.linalg.solve(information + _MIN_INFORMATION * np.eye(len(parameters)), pull)
    # The smooth residual of this workload, without the deviations of single rows.
    surface = Surface(correction.points.settings, correction.process.amplitude**2 * correction.weights)
    return Estimate(parameters + shift, information, surface)
