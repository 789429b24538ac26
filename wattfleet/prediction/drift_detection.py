"""When a device no longer does what its predictor says.

Each round's training is set beside what was predicted before it. A predictor that is right misses its own 90 %
interval once in ten rounds, on either side; a board that has changed (another power supply, a blocked fan, other
data) misses it again and again on the same side.
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
    """When to measure anew, and how much.

    For each of time and power, `outside` of the `of_last` last rounds have to lie beyond the same end of the interval,
    each with a chance of 5 % where the predictor is right. With the usual numbers that happens by chance in fewer than
    one of 1,000 rounds; intervals that are somewhat too narrow are forgiven, too.

    Attributes:
        interval: probability that the predictor's interval is to hold.
        outside: rounds that have to lie beyond the same end of it.
        of_last: among so many last ones.
        modes: modes to measure anew then, at most.

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
                "a rule needs an interval between 0 and 1, 1 or more rounds outside of no fewer last ones, and at least"
                f" 1 mode to measure anew, not {self.interval:g}, {self.outside} of {self.of_last} and {self.modes}"
            )


DEFAULT_DRIFT_RULE = DriftRule()


@dataclass(frozen=True)
class Residual:
    """How far a round lay from its prediction, in standard deviations of the prediction's logarithm.

    Attributes:
        time: of the time; positive where it took longer.
        power: of the power; positive where it drew more.
    """

    time: float
    power: float

    @classmethod
    def of(cls, observed: Measurement, predicted: Prediction) -> Residual:
        """The residual of a round's training.

        Args:
            observed: what it showed.
            predicted: the prediction of this one mode, made before the round.
        """
        return cls(
            math.log(observed.minibatch_ms / float(predicted.minibatch_ms[0])) / float(predicted.time_log_sd[0]),
            math.log(observed.power_mw / float(predicted.power_mw[0])) / float(predicted.power_log_sd[0]),
        )


def detect_drift(residuals: Sequence[Residual], rule: DriftRule = DEFAULT_DRIFT_RULE) -> str | None:
    """What has drifted, in words; None while the predictor may still be right.

    Args:
        residuals: of the rounds since the device was last measured, the newest last.
        rule: when to call it drift.
    """
    edge = normal_quantile(0.5 + rule.interval / 2)
    last = residuals[-rule.of_last :]
    for values, more, less in (
        ([residual.time for residual in last], "took longer", "took less long"),
        ([residual.power for residual in last], "drew more power", "drew less power"),
    ):
        for beyond, words in ((sum(v > edge for v in values), more), (sum(v < -edge for v in values), less)):
            if beyond >= rule.outside:
                return (
                    f"{beyond} of the last {len(last)} rounds {words} than the predictor's {rule.interval:.0%} interval"
                )
    return None
