"""Which modes keep within the watts of a grant, as a device predicts them."""

from __future__ import annotations

import numpy as np

from wattfleet.choosing import POWER_QUANTILE, Front
from wattfleet.errors import InvalidInputError
from wattfleet.modes import PowerMode
from wattfleet.prediction import Prediction

# A running mode may be a little less certain to keep its watts than plans demand. Otherwise, facts that hardly matter,
# such as two loader workers, would lower most modes of a first round, and cost its observation.
_KEPT_QUANTILE = POWER_QUANTILE - 0.02
# The watts of a plan are sums and differences, so that a mode may seem to exceed its own by the last digit.
_ROUNDING = 1e-9


def draws_at_most(predicted: Prediction, power_limit_w: float) -> bool:
    """Whether a mode is expected to draw no more than the watts of a grant.

    Args:
        predicted: of the mode alone.
        power_limit_w: watts set aside for the device.
    """
    return _power_w(predicted) <= power_limit_w


def keeps_within(predicted: Prediction, power_limit_w: float) -> bool:
    """Whether a mode keeps within the watts of a grant with a probability of 93 %.

    Plans demand 95 % (`POWER_QUANTILE`).

    Args:
        predicted: of the mode alone.
        power_limit_w: watts set aside for the device.
    """
    return bool(predicted.power_mw_quantile(_KEPT_QUANTILE)[0] <= _most_mw(power_limit_w))


def fastest_within(front: Front, power_limit_w: float) -> PowerMode | None:
    """The fastest mode of a front that keeps within the watts of a grant; None without one."""
    (affordable,) = np.nonzero(front.planned_w * 1e3 <= _most_mw(power_limit_w))
    return front.mode(int(affordable[0])) if len(affordable) else None


def exceeds_grant(mode: PowerMode, predicted: Prediction, power_limit_w: float) -> InvalidInputError:
    """The error that refuses a granted mode, which is expected to draw more than its grant allows."""
    return InvalidInputError(
        f"the mode {mode.label()} is predicted to draw {_power_w(predicted):.1f} W, more than the limit of"
        f" {power_limit_w:.1f} W: check that agent and coordinator use the same front"
    )


def _power_w(predicted: Prediction) -> float:
    return float(predicted.power_mw[0]) / 1e3


def _most_mw(power_limit_w: float) -> float:
    return power_limit_w * 1e3 * (1 + _ROUNDING)
