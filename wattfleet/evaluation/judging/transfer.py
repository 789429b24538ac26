"""Scores of a transfer: a predictor's errors and coverage on measured modes that it was not fitted to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference_models.training import percentage_errors
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import Profile, WorkloadFacts
from wattfleet.core.prediction import Predictor, fit_from

Values = NDArray[np.float64]
Clock = Callable[[], float]
"""Returns seconds since a fixed moment."""


@dataclass(frozen=True)
class TransferScores:
    """Scores of `r` runs, `[r]` each: one value per run, over the modes that were not fitted.

    Attributes:
        time_mape: mean absolute percentage error of the time, %.
        power_mape: mean absolute percentage error of the power, %.
        time_coverage: share of modes whose time lies within the 90 % interval, %.
        power_coverage: share of modes whose power lies within the 90 % interval, %.
        fit_seconds: duration of the fit, s; an equal share of it where the runs' fits train together.
        time_mape_passing: `time_mape` over the trusted rows only. None without an audit, or if some run has no trusted
            row to score.
        power_mape_passing: `power_mape` over the trusted rows only, likewise.
    """

    time_mape: Values
    power_mape: Values
    time_coverage: Values
    power_coverage: Values
    fit_seconds: Values
    time_mape_passing: Values | None
    power_mape_passing: Values | None

    def summary(self) -> dict[str, Any]:
        """Quartiles over the runs, and the mean coverage, as numbers and mappings for JSON."""
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


def _fits(
    predictor: type[Predictor],
    profiles: list[Profile],
    references: Sequence[Predictor],
    facts: WorkloadFacts,
    clock: Clock,
) -> Iterator[tuple[Predictor, float]]:
    """Fit a predictor to each profile; yield it with the duration of its fit, s.

    Networks train together, which takes a fraction of the time. Each is then charged an equal share of it.
    """
    if len(references) < 2 and (fit_all := getattr(predictor, "fit_all", None)):
        begun = clock()
        together = fit_all(profiles, next(iter(references), None), facts)
        share = (clock() - begun) / len(profiles)
        yield from ((fitted, share) for fitted in together)
        return
    for profile in profiles:
        begun = clock()
        fitted = fit_from(predictor, profile, references, facts)
        yield fitted, clock() - begun


def quartiles(values: Values) -> dict[str, float]:
    """Median, first and third quartile of `[r]` values."""
    q1, median, q3 = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return {"median": median, "q1": q1, "q3": q3}


def evaluate_transfer(
    predictor: type[Predictor],
    references: Sequence[Predictor],
    target: Profile,
    modes: int,
    runs: int,
    seed: int,
    clock: Clock,
    trusted: NDArray[np.bool_] | None = None,
    facts: WorkloadFacts | None = None,
    track: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> TransferScores:
    """Fit a predictor to rows drawn uniformly at random, predict all other rows, and repeat.

    A row is a mode, or a mode and a batch size.

    Args:
        predictor: the class to fit.
        references: predictors of this class to transfer from; none to fit without a reference.
        target: `m` measured rows of the workload and device to transfer to.
        modes: number of rows drawn in each run, below `m`. Some predictors need more than a few.
        runs: number of runs.
        seed: run k draws with the seed `seed + k`.
        clock: measures how long the fits take.
        trusted: `[m]` whether each row passes an audit. The errors over these rows are scored, too, if every run leaves
            some.
        facts: known facts of the target's workload; None if only its task is known.
        track: wraps the iteration over the runs, to show progress.

    Raises:
        InvalidInputError: there are no runs, the seed is negative, `modes` is not below the target's number, or the
            class cannot transfer from several references.
    """
    if runs < 1:
        raise InvalidInputError(f"give 1 or more runs, not {runs}")
    if not 0 <= modes < len(target):
        raise InvalidInputError(
            f"the target has {len(target)} modes and at least 1 must be left for scoring: draw 0 to"
            f" {len(target) - 1} modes, not {modes}"
        )
    if seed < 0:
        raise InvalidInputError(f"the seed {seed} is negative: give 0 or more")
    if facts is None:
        facts = WorkloadFacts(target.task)
    scores: list[tuple[float, ...]] = []
    draws = [np.random.default_rng(seed + run).choice(len(target), modes, replace=False) for run in range(runs)]
    fits = _fits(predictor, [target.rows(drawn) for drawn in draws], references, facts, clock)
    for run in track(range(runs)):
        others = np.ones(len(target), dtype=bool)
        others[draws[run]] = False
        fitted, seconds = next(fits)
        unseen = target.rows(others)
        predicted = fitted.predict(unseen.modes, unseen.batch)
        time_error, power_error = percentage_errors(predicted, unseen)
        time_low, time_high = (predicted.minibatch_ms_quantile(q) for q in (0.05, 0.95))
        power_low, power_high = (predicted.power_mw_quantile(q) for q in (0.05, 0.95))
        passing = np.ones(len(unseen), dtype=bool) if trusted is None else trusted[others]
        scores.append(
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
    time, power, time_coverage, power_coverage, fit_s, time_passing, power_passing = np.array(scores).T
    has_passing = trusted is not None and bool(np.isfinite(time_passing).all())
    return TransferScores(
        time,
        power,
        time_coverage,
        power_coverage,
        fit_s,
        time_passing if has_passing else None,
        power_passing if has_passing else None,
    )
