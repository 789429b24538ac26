"""When a run will be done, and what it will need: rounds, time and energy, from its own rounds so far.

Rounds to a target come from the run's own curve: its metric approaches a limit as a power law of the rounds, as
learning curves do (Domhan, Springenberg and Hutter, IJCAI 2015, section 3, fit a mixture of such curves). The limit,
exponent and offset are drawn from broad priors, weighed by how well the rounds so far fit, and followed with the noise
that these rounds show. Nothing of this knows the app, so early forecasts are wide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wattfleet.core.errors import InvalidInputError

FEWEST_ROUNDS = 4
"""Rounds with the metric that a forecast to a target needs."""

J_PER_KWH = 3.6e6
"""Joules of a kWh."""

HORIZON = 2000
"""Further rounds after which a target counts as not reached."""

SHARE = 0.9
"""The share of runs that an interval should contain."""

_HOURS = 24
_SMOOTHED = 3
_CURVES, _PATHS = 4000, 1000

# The priors, and how fast older rounds lose weight, were set on federated runs of the digits and of Fashion-MNIST with
# 6 to 50 devices (`tests/unit/core/planning/accuracy_curves.json`). What fits the digits best is too hopeful for the
# other.
_EXPONENT_MEDIAN, _EXPONENT_LOG_SD = 1.4, 0.6
_OFFSETS = 0.3, 10.0
_LIMIT_SHARE = 3.0
_FORGOTTEN = 0.5
_INDEPENDENT = 0.7
_MOST_PROGRESS = 3.0
"""Where nothing bounds a metric, it makes at most this many times the progress so far."""


@dataclass(frozen=True)
class Target:
    """The value of a metric at which a run is done: that of the mean of three rounds in a row.

    Attributes:
        name: the metric's name, as the strategy reports it. Lower values are better if it names a loss, an error or a
            perplexity, and higher ones otherwise.
        value: the value.

    Raises:
        InvalidInputError: the value is not finite.
    """

    name: str
    value: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise InvalidInputError(f"the target of {self.name} must be finite, not {self.value}")

    @property
    def falls(self) -> bool:
        """Whether lower values are better."""
        return any(word in self.name.lower() for word in ("loss", "error", "perplexity"))


@dataclass(frozen=True)
class Tariff:
    """What a kWh costs, in money or in emissions, by the hour of the day.

    Attributes:
        unit: the unit, such as "EUR" or "kg CO2".
        per_kwh: the cost of a kWh in each hour from midnight, 24 values.

    Raises:
        InvalidInputError: there are not 24 values, or one is not finite.
    """

    unit: str
    per_kwh: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.per_kwh) != _HOURS or not all(map(math.isfinite, self.per_kwh)):
            raise InvalidInputError(f"a tariff has a finite value for each of {_HOURS} hours, not {self.per_kwh}")

    @classmethod
    def constant(cls, unit: str, per_kwh: float) -> Tariff:
        """Return a tariff that is the same in all hours; errors as for the class."""
        return cls(unit, (per_kwh,) * _HOURS)

    def mean(self, from_hour: float, seconds: np.ndarray) -> np.ndarray:
        """Return the mean cost of a kWh that is drawn evenly over some time.

        Args:
            from_hour: hour of the day at which it begins, 0 to 24, with a fraction.
            seconds: how long it lasts, shape (draws,); finite.
        """
        until = np.concatenate([[0.0], np.cumsum(self.per_kwh)])
        end = from_hour + np.maximum(seconds, 1.0) / 3600

        def cost_until(hour: np.ndarray | float) -> np.ndarray:
            days, of_day = np.divmod(hour, _HOURS)
            return np.asarray(days * until[-1] + np.interp(of_day, np.arange(_HOURS + 1), until))

        mean: np.ndarray = (cost_until(end) - cost_until(from_hour)) / (end - from_hour)
        return mean


@dataclass(frozen=True)
class Interval:
    """A median, and the interval that contains 90 % of the outcomes; infinite where the target may never be reached.

    Attributes:
        low: the 5 % quantile.
        median: the median.
        high: the 95 % quantile.
    """

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, draws: np.ndarray) -> Interval:
        """Return the interval of drawn outcomes, shape (draws,)."""
        tail = (1 - SHARE) / 2
        # A drawn value, since a mean with an infinite one would be infinite.
        low, median, high = np.quantile(draws, [tail, 0.5, 1 - tail], method="inverted_cdf")
        return cls(float(low), float(median), float(high))


@dataclass(frozen=True)
class Forecast:
    """What a run still needs.

    Attributes:
        rounds: further rounds.
        seconds: further seconds.
        energy_j: further joules; None if no round's energy is known.
        costs: the cost of this energy by each tariff, in its unit; empty if no round's energy is known.
        reached: probability that the target is reached at all, within `HORIZON` rounds.
    """

    rounds: Interval
    seconds: Interval
    energy_j: Interval | None
    costs: tuple[Interval, ...]
    reached: float


def still_needed(
    further_rounds: np.ndarray,
    seconds: Sequence[float],
    energy_j: Sequence[float],
    tariffs: Sequence[Tariff] = (),
    from_hour: float = 0.0,
    seed: int = 0,
) -> Forecast:
    """Forecast what the further rounds of a run need.

    Args:
        further_rounds: draws of their number, shape (draws,), infinite where the target is not reached: those of
            `rounds_to`, or a known number.
        seconds: how long each round so far took, waiting included. The first of several rounds is left out, since it
            waits for a survey.
        energy_j: joules of each round of which they are known.
        tariffs: what the energy costs.
        from_hour: hour of the day at which the further rounds begin, 0 to 24, with a fraction.
        seed: random seed.

    Raises:
        InvalidInputError: no round has ended yet.
    """
    if not seconds:
        raise InvalidInputError("no round has ended yet: ask again after the first one")
    random = np.random.default_rng(seed)
    is_reached = np.isfinite(further_rounds)
    counted = np.where(is_reached, further_rounds, 0.0)
    needed_s = _total(counted, seconds, random)
    needed_j = _total(counted, energy_j, random) if energy_j else None
    costs = [] if needed_j is None else [needed_j / J_PER_KWH * each.mean(from_hour, needed_s) for each in tariffs]

    def interval(draws: np.ndarray) -> Interval:
        return Interval.of(np.where(is_reached, draws, math.inf))

    return Forecast(
        interval(counted),
        interval(needed_s),
        None if needed_j is None else interval(needed_j),
        tuple(map(interval, costs)),
        float(is_reached.mean()),
    )


def rounds_to(target: Target, values: Sequence[float], seed: int = 0) -> np.ndarray:
    """Draw how many further rounds a run needs to a target.

    Args:
        target: the target.
        values: the metric before the first round, and after each round so far.
        seed: random seed.

    Returns:
        Draws, shape (1000,): at least 1, or 0 if the target is reached; infinite beyond `HORIZON`.

    Raises:
        InvalidInputError: there are too few rounds, or a value is not finite.
    """
    if len(values) <= FEWEST_ROUNDS:
        raise InvalidInputError(
            f"a forecast to {target.name} needs {FEWEST_ROUNDS} rounds with its value, and the run has"
            f" {max(0, len(values) - 1)}: ask again later"
        )
    sign = -1 if target.falls else 1
    rising, goal = np.asarray(values, dtype=float) * sign, target.value * sign
    if not np.isfinite(rising).all():
        raise InvalidInputError(f"the run reported a value of {target.name} that is not finite")
    if (np.convolve(rising[1:], np.ones(_SMOOTHED) / _SMOOTHED, "valid") >= goal).any():
        return np.zeros(_PATHS)
    random = np.random.default_rng(seed)
    mean, noise = _curves(rising, _best(rising, target), random)
    paths = mean + noise[:, None] * random.standard_normal(mean.shape)
    known = np.broadcast_to(rising[-_SMOOTHED + 1 :], (len(paths), _SMOOTHED - 1))
    summed = np.cumsum(np.concatenate([np.zeros((len(paths), 1)), known, paths], axis=1), axis=1)
    is_reached = (summed[:, _SMOOTHED:] - summed[:, :-_SMOOTHED]) / _SMOOTHED >= goal
    return np.where(is_reached.any(axis=1), is_reached.argmax(axis=1) + 1.0, math.inf)


def _curves(rising: np.ndarray, ceiling: float, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw continuations of a rising curve.

    Args:
        rising: the values so far, shape (rounds + 1,).
        ceiling: the highest possible value; infinite if there is none.
        random: the generator.

    Returns:
        The means of further rounds, shape (draws, `HORIZON`), and the noise of each draw, shape (draws,).
    """
    at = np.arange(1.0, len(rising))  # the first rounds differ most from the start, of which the curve says nothing
    seen = rising[1:]
    weight = np.exp(-np.arange(len(seen))[::-1] / (_FORGOTTEN * len(seen)))
    level = seen[-_SMOOTHED:].mean()
    scale = max(abs(level - rising[0]), 1e-6)
    room = max(ceiling - level if math.isfinite(ceiling) else _MOST_PROGRESS * scale, 1e-3 * scale)
    limit = level + room * random.beta(_LIMIT_SHARE, 1.0, _CURVES)
    exponent = np.exp(random.normal(math.log(_EXPONENT_MEDIAN), _EXPONENT_LOG_SD, _CURVES))
    offset = np.exp(random.uniform(math.log(_OFFSETS[0]), math.log(_OFFSETS[1]), _CURVES))
    # limit - factor * (round + offset) ** -exponent: the factor that fits best, and how well it fits.
    basis = (at + offset[:, None]) ** -exponent[:, None]
    gap = limit[:, None] - seen
    square = (weight * basis**2).sum(axis=1)
    factor = np.maximum((weight * basis * gap).sum(axis=1) / square, 0.0)
    error = (weight * (gap - factor[:, None] * basis) ** 2).sum(axis=1) + 1e-8 * scale**2
    counted = _INDEPENDENT * weight.sum()
    log_likelihood = -0.5 * counted * np.log(error)
    likelihood = np.exp(log_likelihood - log_likelihood.max())
    kept = random.choice(_CURVES, _PATHS, p=likelihood / likelihood.sum())
    freedom = max(counted - 2, 2.0)
    variance = error[kept] / weight.sum() * freedom / random.chisquare(freedom, _PATHS)
    drawn = np.maximum(factor[kept] + np.sqrt(variance / square[kept]) * random.standard_normal(_PATHS), 0.0)
    further = len(rising) + np.arange(HORIZON)
    mean = limit[kept, None] - drawn[:, None] * (further + offset[kept, None]) ** -exponent[kept, None]
    return mean, np.sqrt(variance)


def _best(rising: np.ndarray, target: Target) -> float:
    """Return the best value that a rising curve can have: no loss is below 0, and no accuracy above 1."""
    if target.falls:
        return 0.0 if rising.max() <= 0 else math.inf
    return 1.0 if max(rising.max(), target.value) <= 1 else math.inf


def _total(count: np.ndarray, each: Sequence[float], random: np.random.Generator) -> np.ndarray:
    """Draw the sum of a quantity over some rounds, shape (draws,), from its values in the rounds so far."""
    seen = np.asarray(each[1:] if len(each) > 2 else each, dtype=float)
    mean, spread = seen.mean(), seen.std(ddof=1) if len(seen) > 1 else 0.5 * seen.mean()
    # The mean of all rounds is as uncertain as those seen let it be, and the rounds to come vary around it.
    means = mean + spread / math.sqrt(len(seen)) * random.standard_t(max(len(seen) - 1, 2), len(count))
    total = count * means + spread * np.sqrt(count) * random.standard_normal(len(count))
    needed: np.ndarray = np.maximum(total, count * seen.min() / 2)
    return needed
