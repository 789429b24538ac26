"""The prior of a workload on one unit of a board, from the measurements of other units.

Units of one kind are similar, but not equal: each parameter of a unit is normally distributed around that of its kind.
A fit to the rows of all known units gives the distribution of the kind's parameters, and thus the prior of a further
unit's parameters. This is the empirical Bayes estimate of a random-effects model (Laird and Ware, "Random-Effects
Models for Longitudinal Data", Biometrics 1982) whose variance between units is assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from wattfleet.modes import Profile
from wattfleet.prediction.roofline.estimation import Prior
from wattfleet.prediction.roofline.hypothesis import Assumptions, Rows, fit_power, fit_time
from wattfleet.prediction.roofline.physics import settings_of
from wattfleet.prediction.roofline.quantity import FittedQuantity

Values = NDArray[np.float64]

# Log standard deviation of a unit's parameters around those of its kind.
_UNIT_SD = 0.05


def unit_rows(units: Sequence[Profile], batch: int) -> Rows:
    """Concatenate the rows of several units for a fit.

    Args:
        units: the measured rows of each unit.
        batch: samples in a minibatch, for units whose rows do not state it.
    """
    settings = [
        settings_of(each.modes, np.full(len(each), batch) if each.batch is None else each.batch) for each in units
    ]
    return Rows(
        np.concatenate(settings),
        np.log(np.concatenate([each.minibatch_ms for each in units])),
        np.log(np.concatenate([each.power_mw for each in units])),
    )


def assumptions_from_units(rows: Rows, units: int, assumed: Assumptions) -> Assumptions:
    """The prior of a further unit, learned from measurements of other units of its kind.

    Args:
        rows: the measured rows of the other units.
        units: the number of these units.
        assumed: the prior without these measurements.

    Raises:
        InvalidInputError: no plausible parameters explain the rows.
    """
    time = fit_time(rows, assumed)
    power = fit_power(rows, assumed, time)
    return replace(assumed, time=_unit_prior(time, units), power=_unit_prior(power, units))


def _unit_prior(kind: FittedQuantity, units: int) -> Prior:
    """The prior of another unit's parameters of one quantity, from a fit to the rows of several units."""
    correction = kind.remainder.correction
    spread = correction.gradient @ correction.prior_root
    information = spread.T @ np.linalg.solve(correction.residual_covariance(), spread)
    posterior = np.linalg.inv(information + np.eye(len(information)))
    covariance = correction.prior_root @ posterior @ correction.prior_root.T
    k = len(kind.log_parameters)
    # However many rows there are, the kind's parameters are only known as well as the mean over this many units.
    between = _UNIT_SD**2 * (1 + 1 / units) * np.eye(k)
    return Prior.correlated(kind.log_parameters, covariance[:k, :k] + between)
