"""How well a predictor transfers: errors and coverage on measured modes that it was not given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wattfleet.errors import InvalidInputError
from wattfleet.modes import Profile
from wattfleet.prediction import Predictor

Values = NDArray[np.float64]
Clock = Callable[[], float]
"""Seconds since some moment."""


@dataclass(frozen=True)
class TransferScores:
    """What the runs of an evaluation gave, `[r]` each: one value a run, over the modes that were not fitted.

    Attributes:
        time_mape: mean absolute percentage error of the time, %.
        power_mape: that of the power, %.
        time_coverage: share of modes whose time lies within the 90 % interval, %.
        power_coverage: that of the power, %.
        fit_seconds: how long the fit took, s.
        time_mape_passing: `time_mape` over the rows that are trusted; None where no audit was made, or a run left no
            such row to judge by.
        power_mape_passing: that of the power.
    """

    time_mape: Values
    power_mape: Values
    time_coverage: Values
    power_coverage: Values
    fit_seconds: Values
    time_mape_passing: Values | None
    power_mape_passing: Values | None

    def summary(self) -> dict[str, Any]:
        """Quartiles over the runs, and coverage over all of them; numbers and mappings of them, for JSON."""
        found: dict[str, Any] = {
            "time_mape": quartiles(self.time_mape),
            "power_mape": quartiles(self.power_mape),
            "coverage_90": {"time": float(self.time_coverage.mean()), "power": float(self.power_coverage.mean())},
            "fit_seconds": quartiles(self.fit_seconds),
        }
        if self.time_mape_passing is not None and self.power_mape_passing is not None:
            found["time_mape_passing"] = quartiles(self.time_mape_passing)
            found["power_mape_passing"] = quartiles(self.power_mape_passing)
        return found


def quartiles(values: Values) -> dict[str, float]:
    """Median, first and third quartile of `[r]` values."""
    q1, median, q3 = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return {"median": median, "q1": q1, "q3": q3}


def evaluate_transfer(
    predictor: type[Predictor],
    reference: Predictor | None,
    target: Profile,
    modes: int,
    runs: int,
    seed: int,
    clock: Clock,
    trusted: NDArray[np.bool_] | None = None,
    track: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> TransferScores:
    """Fit to modes drawn uniformly at random, predict all the others, and repeat.

    Args:
        predictor: the class to fit.
        reference: a predictor of this class to transfer from; None transfers from nothing.
        target: measured modes of the workload and device to transfer to, m of them.
        modes: how many are drawn in each run; at least 1 is left. Not every predictor can do with few, or none.
        runs: how many times.
        seed: run k draws with the seed `seed + k`.
        clock: tells how long fits take.
        trusted: `[m]` rows that pass an audit; errors over these are then told beside those over all, if every run
            leaves such rows to judge by.
        track: passes the numbers of the runs through, to show progress.

    Raises:
        InvalidInputError: no run, or not fewer modes than the target has.
    """
    if runs < 1:
        raise InvalidInputError(f"{runs} runs evaluate nothing: give 1 or more")
    if not 0 <= modes < len(target):
        raise InvalidInputError(
            f"{modes} modes cannot be drawn from the {len(target)} of the target with some left to judge by:"
            f" give a number from 0 to {len(target) - 1}"
        )
    if seed < 0:
        raise InvalidInputError(f"the seed {seed} is negative: give 0 or more")
    rows: list[tuple[float, ...]] = []
    for run in track(range(runs)):
        drawn = np.random.default_rng(seed + run).choice(len(target), modes, replace=False)
        others = np.ones(len(target), dtype=bool)
        others[drawn] = False
        begun = clock()
        fitted = predictor.fit(target.rows(drawn), reference)
        seconds = clock() - begun
        predicted = fitted.predict(target.modes[others])
        unseen = target.rows(others)
        time_error = 100 * np.abs(predicted.minibatch_ms / unseen.minibatch_ms - 1)
        power_error = 100 * np.abs(predicted.power_mw / unseen.power_mw - 1)
        time_low, time_high = (predicted.minibatch_ms_quantile(q) for q in (0.05, 0.95))
        power_low, power_high = (predicted.power_mw_quantile(q) for q in (0.05, 0.95))
        passing = np.ones(len(unseen), dtype=bool) if trusted is None else trusted[others]
        rows.append(
            (
                float(time_error.mean()),
                float(power_error.mean()),
                100 * float(((unseen.minibatch_ms >= time_low) & (unseen.minibatch_ms <= time_high)).mean()),
                100 * float(((unseen.power_mw >= power_low) & (unseen.power_mw <= power_high)).mean()),
                seconds,
                float(time_error[passing].mean()) if passing.any() else np.nan,
                float(power_error[passing].mean()) if passing.any() else np.nan,
            )
        )
    time, power, time_coverage, power_coverage, fit_s, time_passing, power_passing = np.array(rows).T
    told = trusted is not None and bool(np.isfinite(time_passing).all())
    return TransferScores(
        time,
        power,
        time_coverage,
        power_coverage,
        fit_s,
        time_passing if told else None,
        power_passing if told else None,
    )
