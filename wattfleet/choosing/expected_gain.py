"""The expected gain of measuring a mode: how much the measurement is expected to improve the choice within all limits.

The gain is the constrained expected improvement (Gardner et al., "Bayesian Optimization with Inequality
Constraints", ICML 2014). Costs are logarithms, so a gain is relative to the cost. The gain is computed separately for
each of `b` limits, such as power budgets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wattfleet.choosing.choice import PROBABILITY, KnownModes
from wattfleet.choosing.serving import Objective, ServingGoal

Values = NDArray[np.float64]
Mask = NDArray[np.bool_]

_MIN_SD = 1e-9
# A batch that cannot be collected within the latency has no time left. Its logarithm must be finite.
_NO_TIME_MS = 1e-9


@dataclass(frozen=True)
class Prospects:
    """The costs of `n` modes, and the probabilities that they keep each of `b` limits.

    Attributes:
        log_cost: `[n]` logarithm of the measured or median predicted cost, which the choice minimizes.
        log_sd: `[n, 1]` standard deviation of `log_cost`.
        log_limit: `[n or 1, b or 1]` logarithm of the highest cost that the limits allow; infinite without one.
        others_kept: `[n, b]` probability that all limits of other quantities are kept.
        kept: `[n, b]` whether the measured or median predicted values keep all limits.
        safe: `[n, b]` whether all limits are kept with `PROBABILITY`, each.
    """

    log_cost: Values
    log_sd: Values
    log_limit: Values
    others_kept: Values
    kept: Mask
    safe: Mask

    @classmethod
    def of_training(cls, known: KnownModes, budgets_mw: Values) -> Prospects:
        """The prospects of modes for training, with `[b]` power budgets as limits. The cost is the time per sample."""
        return cls(
            np.log(sample_ms(known.minibatch_ms, known)),
            _column(known.time_log_sd),
            np.full((1, 1), np.inf),
            _probability(known.power_margin(budgets_mw)),
            known.power_mw[:, None] <= budgets_mw,
            known.safe_power_mw(PROBABILITY)[:, None] <= budgets_mw,
        )

    @classmethod
    def of_serving(cls, known: KnownModes, goal: ServingGoal) -> Prospects:
        """The prospects of modes and batches for inference: the goal's `b` limits, and its objective as the cost."""
        batch = known.stated_batch()
        longest_ms = np.column_stack([limits.longest_ms(batch) for limits in goal.limits])
        budgets_mw = np.array([limits.budget_mw for limits in goal.limits])
        log_longest = np.log(np.maximum(longest_ms, _NO_TIME_MS))
        kept = (known.minibatch_ms[:, None] <= longest_ms) & (known.power_mw[:, None] <= budgets_mw)
        safe_ms, safe_mw = known.safe_minibatch_ms(PROBABILITY)[:, None], known.safe_power_mw(PROBABILITY)[:, None]
        safe = (safe_ms <= longest_ms) & (safe_mw <= budgets_mw)
        log_cost = np.log(goal.objective.cost(known.minibatch_ms, known.power_mw, batch))
        time_sd, power_sd = _column(known.time_log_sd), _column(known.power_log_sd)
        if goal.objective is Objective.LEAST_POWER:
            in_time = _probability((log_longest - np.log(known.minibatch_ms)[:, None]) / time_sd)
            return cls(log_cost, power_sd, np.log(budgets_mw)[None], in_time, kept, safe)
        within = _probability(known.power_margin(budgets_mw))
        return cls(log_cost, time_sd, log_longest - np.log(batch)[:, None], within, kept, safe)

    def gain(self, best: Values, cap: float | None = None) -> Values:
        """`[n, b]` the expected improvement on `[b]` log costs, counted only if all limits are kept.

        Args:
            best: the log costs to improve on.
            cap: largest improvement that counts; None for no cap.
        """
        gain = self._uncapped(best)
        if cap is not None:
            gain = gain - self._uncapped(best - cap)
        return np.asarray(gain * self.others_kept)

    def _uncapped(self, best: Values) -> Values:
        # The improvement is counted up to the lower of the best cost and the limit. A cost below a limit that lies
        # under the best cost also saves the difference of the two.
        bound = np.minimum(best, self.log_limit)
        margin = bound - self.log_cost[:, None]
        z = margin / self.log_sd
        below = _probability(z)
        return np.asarray((best - bound + margin) * below + self.log_sd * np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi))


def sample_ms(minibatch_ms: Values, known: KnownModes) -> Values:
    """Comparable times, `[n]` ms: per sample, or per step if all steps have the same batch size."""
    batch = known.batch
    return minibatch_ms if batch is None or (batch == batch[0]).all() else np.asarray(minibatch_ms / batch)


def _column(log_sd: Values) -> Values:
    return np.maximum(log_sd, _MIN_SD)[:, None]


def _probability(deviations: Values) -> Values:
    from scipy.special import ndtr  # imported here to keep scipy out of processes that never sample

    return np.asarray(ndtr(deviations))
