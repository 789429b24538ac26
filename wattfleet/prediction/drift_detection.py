"""Detecting drift: whether a device no longer behaves as predicted.

Each round's training is compared with the prediction made before it. A correct predictor misses its 90 % interval once
in ten rounds, on either side. A board that has changed (another power supply, a blocked fan, other data) misses it
repeatedly on the same side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from wattfleet.errors import InvalidInputError
from wattfleet.modes import Measurement
from wattfleet.prediction.predictor import Prediction
from wattfleet.prediction.quantiles import normal_quantile


@dataclass(frozen=True)
class DriftRule:
    """The criterion for drift, and the number of modes that are then measured again.

    Time or power has drifted when `outside` of the last `of_last` rounds lie beyond the same end of the interval.
    With a correct predictor, each round does so with a probability of 5 %. With the default numbers, false alarms are
    rarer than one in 1,000 rounds, so even intervals that are somewhat too narrow cause few of them.

    Attributes:
        interval: probability of the predictor's interval.
        outside: number of rounds beyond the same end of the interval that count as drift.
        of_last: number of latest rounds that are considered.
        modes: maximum number of modes to measure again after drift.

    Raises:
        InvalidInputError: a number is out of range.
    """

    interval: float = 0.90
    outside: int = 4
    of_last: int = 6
    modes: int = 16

    def __post_init__(self) -> None:
        if not 0 < self.interval < 1 or not 1 <= self.outside <= self.of_last or self.modes < 1:
            raise InvalidInputError(
                "a drift rule needs an interval between 0 and 1, outside from 1 to of_last rounds, and at least 1 mode,"
                f" not {self.interval:g}, {self.outside} of {self.of_last} and {self.modes}"
            )


DEFAULT_DRIFT_RULE = DriftRule()


@dataclass(frozen=True)
class Residual:
    """The standardised residuals of a round: deviations in standard deviations of the prediction's logarithm.

    Attributes:
        time: deviation of the time; positive if the round took longer.
        power: deviation of the power; positive if the round drew more.
    """

    time: float
    power: float

    @classmethod
    def of(cls, observed: Measurement, predicted: Prediction) -> Residual:
        """The residual of one round.

        Args:
            observed: the measurement of the round.
            predicted: the prediction for its one mode, made before the round.
        """
        return cls(
            math.log(observed.minibatch_ms / float(predicted.minibatch_ms[0])) / float(predicted.time_log_sd[0]),
            math.log(observed.power_mw / float(predicted.power_mw[0])) / float(predicted.power_log_sd[0]),
        )


def detect_drift(residuals: Sequence[Residual], rule: DriftRule = DEFAULT_DRIFT_RULE) -> str | None:
    """Describe what has drifted; None while the predictor may still be correct.

    Args:
        residuals: residuals of the rounds since the device was last measured, the newest last.
        rule: when a device counts as drifted.
    """
    edge = normal_quantile(0.5 + rule.interval / 2)
    last = residuals[-rule.of_last :]
    for values, more, less in (
        ([residual.time for residual in last], "took longer", "took less time"),
        ([residual.power for residual in last], "drew more power", "drew less power"),
    ):
        for beyond, words in ((sum(v > edge for v in values), more), (sum(v < -edge for v in values), less)):
            if beyond >= rule.outside:
                return (
                    f"{beyond} of the last {len(last)} rounds {words} than the predictor's {rule.interval:.0%} interval"
                )
    return None
