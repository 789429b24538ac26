"""Scores of a transfer and of a choice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference_models.training import percentage_errors
from wattfleet.core.choosing import descending_modes
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import Profile, WorkloadFacts, array_to_modes
from wattfleet.core.prediction import Predictor, fit_from
from wattfleet.evaluation.choice_methods import ChoiceMethod, MeasurementSession
from wattfleet.evaluation.judging.sources import rounded

# --- Transfer ---------------------------------------------------------------------------------------------------------
# Scores of a transfer: a predictor's errors and coverage on measured modes that it was not fitted to.


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


# --- Choice -----------------------------------------------------------------------------------------------------------
# Scores of a choice method, on a corpus in which every mode was measured.
#
# Each case is one run of a method and one budget in whole watts. The chosen mode is compared with the best measured
# mode within the budget, by the corpus's own times and powers. The figures are those of PowerTrain
# (doi:10.1016/j.future.2024.07.001, section 5).

Report = Callable[[int], None]
"""Called after each run with the number of finished runs."""


@dataclass(frozen=True)
class ChoiceCases:
    """The cases of an evaluation: `r` runs by `b` budgets that at least one mode of the corpus meets.

    Attributes:
        budgets_w: `[b]` budgets, W.
        left_out: number of further budgets, which no mode meets.
        signed_penalty_pct: `[r, b]` how much longer a step takes in the chosen mode than in the best one within the
            budget, %. It is negative for a mode over the budget that is faster than the best one within it.
        excess_w: `[r, b]` W by which the chosen mode's measured power exceeds the budget; 0 if it does not.
        modes_measured: `[r]` number of modes that the method measured.
        penalty_passing_pct: `[r, b]` the penalty against the best row that passes an audit. NaN if the chosen row does
            not pass, or no passing row meets the budget. None without an audit.
    """

    budgets_w: Values
    left_out: int
    signed_penalty_pct: Values
    excess_w: Values
    modes_measured: Values
    penalty_passing_pct: Values | None = None

    @property
    def penalty_pct(self) -> Values:
        """`[r, b]` the penalty, where a mode that is over the budget and faster counts as 0 %."""
        return np.maximum(self.signed_penalty_pct, 0.0)

    def figures(self) -> dict[str, object]:
        """The figures over all cases, as `evaluate choice --json` prints them.

        - `time_penalty_pct`: median, mean and 90th percentile.
        - `signed_penalty_pct`: median penalty with the negative ones, as the paper counts it.
        - `over_budget_pct`, `over_budget_1w_pct`: share of cases over the budget, and over it by more than 1 W (the
          paper's A/L and A/L + 1).
        - `excess_w`: mean excess over all cases, W (the paper's normalised area).
        - `modes_measured`: mean over the runs.
        - `budgets`: how many were evaluated and left out.

        With an audit, the penalty and the shares also appear as `..._passing`, over the rows that pass.
        """
        found = _figures(self.penalty_pct, self.excess_w)
        if self.penalty_passing_pct is not None:
            judged = np.isfinite(self.penalty_passing_pct)
            if judged.any():
                passing = _figures(self.penalty_passing_pct[judged], self.excess_w[judged])
                found |= {f"{name}_passing": value for name, value in passing.items()}
        return {
            **found,
            "signed_penalty_pct": rounded(np.median(self.signed_penalty_pct)),
            "excess_w": rounded(self.excess_w.mean()),
            "modes_measured": rounded(self.modes_measured.mean()),
            "budgets": {"evaluated": len(self.budgets_w), "left_out": self.left_out},
        }


def _figures(penalty_pct: Values, excess_w: Values) -> dict[str, object]:
    return {
        "time_penalty_pct": {
            "median": rounded(np.median(penalty_pct)),
            "mean": rounded(penalty_pct.mean()),
            "p90": rounded(np.quantile(penalty_pct, 0.9)),
        },
        "over_budget_pct": rounded(100 * (excess_w > 0).mean()),
        "over_budget_1w_pct": rounded(100 * (excess_w > 1).mean()),
    }


def evaluate_choice(
    corpus: Profile,
    method: ChoiceMethod,
    limit: int,
    budgets_w: Sequence[float],
    runs: int,
    seed: int,
    report: Report = lambda run: None,
    trusted: NDArray[np.bool_] | None = None,
) -> ChoiceCases:
    """Run a choice method on a corpus several times and score its choices.

    One set of measurements serves all budgets of a run, just as an agent profiles once for its whole front. If the
    method knows no mode within the budget, the lowest mode counts as its choice.

    Args:
        corpus: every mode that can be measured and chosen.
        method: the method to score.
        limit: maximum number of modes that it may measure in a run.
        budgets_w: budgets, W.
        runs: number of runs, with the seeds `seed`, `seed + 1` and so on.
        seed: seed of the first run.
        report: called after every run.
        trusted: `[n]` whether each row of the corpus passes an audit. The method does not know it.

    Raises:
        InvalidInputError: no mode of the corpus meets any budget, a number is out of range, or the method cannot work
            with so few measurements.
    """
    if runs < 1 or limit < 0 or seed < 0:
        raise InvalidInputError(
            f"give 1 run or more, and modes and a seed of 0 or more, not {runs} runs, {limit} modes and seed {seed}"
        )
    requested_w = np.array(budgets_w, dtype=np.float64)
    if not (len(requested_w) and np.isfinite(requested_w).all() and (requested_w > 0).all()):
        raise InvalidInputError("give one or more budgets above 0 W")
    met_w = requested_w[requested_w * 1e3 >= corpus.power_mw.min()]
    if not len(met_w):
        raise InvalidInputError(
            f"no mode meets any of the budgets up to {requested_w.max():g} W: give a budget of at least"
            f" {corpus.power_mw.min() / 1e3:.1f} W, the lowest power of any mode"
        )
    measurements = {measurement.mode: measurement for measurement in corpus.measurements()}
    lowest = array_to_modes(descending_modes(corpus.modes)[-1:])[0]
    best_ms = _best_ms(corpus, met_w, np.ones(len(corpus), dtype=bool))
    passing = None if trusted is None else dict(zip(array_to_modes(corpus.modes), trusted.tolist(), strict=True))
    best_passing_ms = best_ms if trusted is None else _best_ms(corpus, met_w, trusted)
    signed_penalty_pct, penalty_passing_pct, excess_w = np.empty((3, runs, len(met_w)))
    measured = np.empty(runs)
    for run in range(runs):
        session = MeasurementSession(corpus.modes, measurements.__getitem__, limit)
        choose = method.profile(session, requested_w.tolist(), seed + run)
        chosen = [measurements[choose(budget) or lowest] for budget in met_w.tolist()]
        step_ms = np.array([measurement.minibatch_ms for measurement in chosen])
        power_w = np.array([measurement.power_mw for measurement in chosen]) / 1e3
        signed_penalty_pct[run] = 100 * (step_ms / best_ms - 1)
        penalty_passing_pct[run] = np.maximum(100 * (step_ms / best_passing_ms - 1), 0.0)
        if passing is not None:
            penalty_passing_pct[run, [not passing[measurement.mode] for measurement in chosen]] = np.nan
        excess_w[run] = np.maximum(power_w - met_w, 0.0)
        measured[run] = session.measured
        report(run + 1)
    return ChoiceCases(
        met_w,
        len(requested_w) - len(met_w),
        signed_penalty_pct,
        excess_w,
        measured,
        None if passing is None else penalty_passing_pct,
    )


def _best_ms(corpus: Profile, budgets_w: Values, rows: NDArray[np.bool_]) -> Values:
    """`[b]` least time of some rows within each budget, ms; NaN if no row meets the budget."""
    within = rows & (corpus.power_mw <= 1e3 * budgets_w[:, None])
    least = np.where(within, corpus.minibatch_ms, np.inf).min(axis=1)
    return np.asarray(np.where(np.isfinite(least), least, np.nan))
