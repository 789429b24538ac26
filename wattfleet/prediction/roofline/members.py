"""Estimating a measured workload's parameters for a population."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wattfleet.modes import Hardware, Profile, WorkloadFacts
from wattfleet.prediction.roofline.estimation import Model, jacobian, residual_weights, value_at
from wattfleet.prediction.roofline.hypothesis import Rows, fit_whole_corpus, power_physics, time_physics
from wattfleet.prediction.roofline.physics import BASE_BATCH, settings_of
from wattfleet.prediction.roofline.population import Estimate, Member
from wattfleet.prediction.roofline.priors import general_power_prior, general_time_prior
from wattfleet.prediction.roofline.residual import Remainder

Values = NDArray[np.float64]

# The model's own errors are alike at neighbouring modes. Thousands of rows therefore tell no more than so many
# independent ones with these errors.
_INDEPENDENT_ROWS = 150
_ERROR_SD = 0.03
_WIDTH = 0.1


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
    """Parameters with the information that the rows give about each of them."""
    gradient = jacobian(physics, parameters)
    weights = residual_weights(observed - value_at(physics, parameters), _WIDTH)
    counted = min(1.0, _INDEPENDENT_ROWS / len(observed))
    information = counted / _ERROR_SD**2 * (gradient.T * weights) @ gradient
    return Estimate(parameters, information, remainder.surface)
