"""What other units of a board show of a workload, before this unit has measured much of it.

Units of one kind are alike, but not equal: each parameter of a unit is normally distributed around that of its kind. A
fit to the rows of all known units gives the distribution of the kind's parameters, and so the prior of a further
unit's. This is the empirical Bayes estimate of a random-effects model (Laird and Ware, "Random-Effects Models for
Longitudinal Data", Biometrics 1982) whose variance between units is assumed.
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
    """The rows of several units, as a fit uses them.

    Args:
        units: what each has measured.
        batch: samples in the minibatches of rows that do not state it.
    """
    settings = [
        settings_of(each.modes, np.full(len(each), batch) if each.batch is None else each.batch) for each in units
    ]
    return Rows(
        np.concatenate(settings),
        np.log(np.concatenate([each.minibatch_ms for each in units])),
        np.log(np.concatenate([each.power_mw for each in units])),
    )


def learned_from_units(rows: Rows, units: int, assumed: Assumptions) -> Assumptions:
    """What to assume of a further unit after other units of its kind were measured.

    Args:
        rows: the measured rows of the other units.
        units: the number of these units.
        assumed: what was assumed before.

    Raises:
        InvalidInputError: no plausible parameters explain the rows.
    """
    time = fit_time(rows, assumed)
    power = fit_power(rows, assumed, time)
    return replace(assumed, time=_of_a_unit(time, units), power=_of_a_unit(power, units))


def _of_a_unit(kind: FittedQuantity, units: int) -> Prior:
    """The parameters of another unit, after a fit to the rows of several."""
    correction = kind.remainder.correction
    spread = correction.gradient @ correction.prior_root
    information = spread.T @ np.linalg.solve(correction.residual_covariance(), spread)
    posterior = np.linalg.inv(information + np.eye(len(information)))
    covariance = correction.prior_root @ posterior @ correction.prior_root.T
    k = len(kind.log_parameters)
    # The rows do not tell the kind's parameters better than the mean of so many units does.
    between = _UNIT_SD**2 * (1 + 1 / units) * np.eye(k)
    return Prior.correlated(kind.log_parameters, covariance[:k, :k] + between)
