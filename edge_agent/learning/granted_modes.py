"""Decides which modes keep within the watts of a grant, by a device's predictions."""

from __future__ import annotations

import numpy as np

from wattfleet.choosing import POWER_QUANTILE, Front
from wattfleet.errors import InvalidInputError
from wattfleet.modes import PowerMode
from wattfleet.prediction import Prediction

# For a running training, a slightly lower certainty than in plans is enough. Otherwise, facts of little importance,
# such as two loader workers, would lower the modes of most first rounds, and lose their observations.
_KEPT_QUANTILE = POWER_QUANTILE - 0.02
# Tolerance for rounding: a plan's watts are sums and differences, so a mode may seem to exceed them by a last digit.
_ROUNDING = 1e-9


def draws_at_most(predicted: Prediction, power_limit_w: float) -> bool:
    """Return whether a mode is expected to draw no more than the watts of a grant.

    Args:
        predicted: the prediction for this one mode.
        power_limit_w: watts reserved for the device.
    """
    return _power_w(predicted) <= power_limit_w


def keeps_within(predicted: Prediction, power_limit_w: float) -> bool:
    """Return whether a mode keeps within the watts of a grant with a probability of 93 %.

    Plans demand 95 % (`POWER_QUANTILE`).

    Args:
        predicted: the prediction for this one mode.
        power_limit_w: watts reserved for the device.
    """
    return bool(predicted.power_mw_quantile(_KEPT_QUANTILE)[0] <= _most_mw(power_limit_w))


def fastest_within(front: Front, power_limit_w: float) -> PowerMode | None:
    """Return the fastest mode of a front that keeps within the watts of a grant; None if no mode does."""
    (affordable,) = np.nonzero(front.planned_w * 1e3 <= _most_mw(power_limit_w))
    return front.mode(int(affordable[0])) if len(affordable) else None


def exceeds_grant(mode: PowerMode, predicted: Prediction, power_limit_w: float) -> InvalidInputError:
    """Return the error for a granted mode that is expected to draw more than its grant allows."""
    return InvalidInputError(
        f"the mode {mode.label()} is predicted to draw {_power_w(predicted):.1f} W, more than the limit of"
        f" {power_limit_w:.1f} W: check that agent and coordinator use the same front"
    )


def _power_w(predicted: Prediction) -> float:
    return float(predicted.power_mw[0]) / 1e3


def _most_mw(power_limit_w: float) -> float:
    return power_limit_w * 1e3 * (1 + _ROUNDING)
