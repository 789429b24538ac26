"""Scores of a serving method, on a corpus in which every mode was measured with every batch size.

A *case* is one run of a method and one *problem*: a latency, an arrival rate and a power budget. The chosen row is
compared with the best measured row that keeps the limits, by the corpus's own times and powers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from wattfleet.choosing import Objective, ServiceLimits
from wattfleet.errors import InvalidInputError
from wattfleet.modes import BatchArray, PowerMode, Profile, array_to_modes
from wattfleet_evaluation.judging.rounding import rounded
from wattfleet_evaluation.serving_methods.serving_method import ServingMethod
from wattfleet_evaluation.serving_methods.serving_session import ServingSession

Values = NDArray[np.float64]
Mask = NDArray[np.bool_]
Report = Callable[[int], None]
"""Called after each run with the number of finished runs."""


@dataclass(frozen=True)
class ServingCases:
    """The cases of an evaluation: `r` runs by `p` problems that at least one row keeps.

    Attributes:
        left_out: number of further problems, whose limits no row keeps.
        found: `[r, p]` whether the method chose a setting.
        loss_pct: `[r, p]` how many more watts, or how many fewer samples a second, than in the best row that keeps the
            limits, %. A choice that breaks a limit may be better; its loss is then 0. NaN if nothing was chosen.
        excess_w: `[r, p]` W by which the chosen row's measured power exceeds the budget; 0 if it does not.
        latency_broken: `[r, p]` whether the chosen row's measured time breaks a condition of latency.
        rows_measured: `[r, g]` number of rows measured for each of `g` pairs of latency and arrival rate, or problems.
        loss_passing_pct: `[r, p]` the loss against the best row that passes an audit. NaN if the chosen row does not
            pass, or no passing row keeps the limits. None without an audit.
    """

    left_out: int
    found: Mask
    loss_pct: Values
    excess_w: Values
    latency_broken: Mask
    rows_measured: Values
    loss_passing_pct: Values | None

    def figures(self) -> dict[str, object]:
        """The figures over all cases, as `evaluate choice --json` prints them.

        - `found_pct`: share of cases in which the method chose a setting.
        - `loss_pct`: median, mean and 90th percentile over the cases with a choice.
        - `over_budget_pct`, `over_budget_1w_pct`: share of cases over the budget, and over it by more than 1 W.
        - `latency_broken_pct`: share of cases that break a condition of latency.
        - `excess_w`: mean excess over all cases, W.
        - `rows_measured`: mean over the runs.
        - `problems`: how many were evaluated and left out.

        With an audit, `loss_pct_passing` has the loss over the rows that pass.
        """
        figures: dict[str, object] = {
            "found_pct": rounded(100 * self.found.mean()),
            "loss_pct": _loss(self.loss_pct),
            "over_budget_pct": rounded(100 * (self.excess_w > 0).mean()),
            "over_budget_1w_pct": rounded(100 * (self.excess_w > 1).mean()),
            "latency_broken_pct": rounded(100 * self.latency_broken.mean()),
            "excess_w": rounded(self.excess_w.mean()),
            "rows_measured": rounded(self.rows_measured.mean()),
            "problems": {"evaluated": self.found.shape[1], "left_out": self.left_out},
        }
        if self.loss_passing_pct is not None:
            figures["loss_pct_passing"] = _loss(self.loss_passing_pct)
        return figures

    def duty_figures(self) -> dict[str, object]:
        """The figures over all cases, as `evaluate duty --json` prints them; see `figures`."""
        figures = self.figures()
        del figures["problems"], figures["rows_measured"]
        evaluated = self.found.shape[1]
        measured = {"mean": rounded(self.rows_measured.mean()), "most": int(self.rows_measured.max())}
        return {"problems": evaluated + self.left_out, "solvable": evaluated, **figures, "measured": measured}


def _loss(loss_pct: Values) -> dict[str, float] | None:
    """Median, mean and 90th percentile of the finite losses; None if there are none."""
    known = loss_pct[np.isfinite(loss_pct)]
    if not len(known):
        return None
    return {
        "median": rounded(np.median(known)),
        "mean": rounded(known.mean()),
        "p90": rounded(np.quantile(known, 0.9)),
    }


def evaluate_serving(
    corpus: Profile,
    method: ServingMethod,
    limit: int,
    problems: Sequence[ServiceLimits],
    objective: Objective,
    runs: int,
    seed: int,
    report: Report = lambda run: None,
    trusted: Mask | None = None,
    shares_budgets: bool = True,
) -> ServingCases:
    """Run a serving method on a corpus several times and score its choices.

    Args:
        corpus: every setting that can be measured and chosen, with its batch.
        method: the method to score.
        limit: maximum number of rows that it may measure for a latency and an arrival rate, or for a problem.
        problems: the limits to choose for.
        objective: what is chosen by.
        runs: number of runs, with the seeds `seed`, `seed + 1` and so on.
        seed: seed of the first run.
        report: called after every run.
        trusted: `[n]` whether each row of the corpus passes an audit. The method does not know it.
        shares_budgets: whether, within a run, one set of measurements serves all budgets of a latency and an arrival
            rate; otherwise each problem starts from none.

    Raises:
        InvalidInputError: the corpus states no batches, no row keeps the limits of any problem, a number is out of
            range, or the method cannot work with so few measurements.
    """
    if corpus.batch is None:
        raise InvalidInputError("the target has no column 'batch': state the batch of each row to choose among them")
    if runs < 1 or limit < 0 or seed < 0:
        raise InvalidInputError(
            f"give 1 run or more, and modes and a seed of 0 or more, not {runs} runs, {limit} modes and seed {seed}"
        )
    scored = _Scored(corpus, corpus.batch, objective, np.ones(len(corpus), dtype=bool) if trusted is None else trusted)
    kept = [problem for problem in problems if scored.keeps(problem).any()]
    if not kept:
        raise InvalidInputError(
            "no row of the target keeps the limits of any problem: allow a higher latency, fewer samples a second or"
            " more power"
        )
    services = [[problem] for problem in kept]
    if shares_budgets:
        services = [list(group) for _, group in groupby(kept, key=lambda each: (each.latency_ms, each.arrival_per_s))]
    cases, measured = np.empty((runs, len(kept), 5)), np.empty((runs, len(services)))
    for run in range(runs):
        at = 0
        for service, budgets in enumerate(services):
            session = ServingSession(corpus, limit)
            choose = method.profile(session, budgets, objective, seed + run)
            for problem in budgets:
                chosen = choose(problem)
                row = None if chosen is None else scored.row_of[(chosen.mode, chosen.batch)]
                cases[run, at] = scored.case(problem, row)
                at += 1
            measured[run, service] = session.measured
        report(run + 1)
    found, loss_pct, excess_w, broken, loss_passing_pct = np.moveaxis(cases, -1, 0)
    return ServingCases(
        len(problems) - len(kept),
        found > 0,
        loss_pct,
        excess_w,
        broken > 0,
        measured,
        None if trusted is None else loss_passing_pct,
    )


class _Scored:
    """A corpus against which choices are scored."""

    def __init__(self, corpus: Profile, batch: BatchArray, objective: Objective, trusted: Mask) -> None:
        self._power_mw, self._ms, self._batch, self._trusted = corpus.power_mw, corpus.minibatch_ms, batch, trusted
        # Watts, or samples a second: the loss is relative to the best.
        self._fewer = objective is Objective.MOST_SAMPLES
        self._worth = batch / self._ms if self._fewer else self._power_mw
        settings = zip(array_to_modes(corpus.modes), batch.tolist(), strict=True)
        self.row_of: dict[tuple[PowerMode, int | None], int] = {setting: row for row, setting in enumerate(settings)}

    def keeps(self, problem: ServiceLimits) -> Mask:
        """`[n]` the rows that keep the limits."""
        return np.asarray(self._in_time(problem) & (self._power_mw <= problem.budget_mw))

    def _in_time(self, problem: ServiceLimits) -> Mask:
        return np.asarray(self._ms <= problem.longest_ms(self._batch))

    def case(self, problem: ServiceLimits, row: int | None) -> tuple[float, float, float, float, float]:
        """Whether a row was chosen, its loss, its excess, whether it breaks the latency, and its loss after audit."""
        if row is None:
            return 0.0, np.nan, 0.0, 0.0, np.nan
        keeps = self.keeps(problem)
        excess_w = max(float(self._power_mw[row] - problem.budget_mw) / 1e3, 0.0)
        passing = self._loss_pct(row, keeps & self._trusted) if self._trusted[row] else np.nan
        return 1.0, self._loss_pct(row, keeps), excess_w, float(not self._in_time(problem)[row]), passing

    def _loss_pct(self, row: int, keeps: Mask) -> float:
        if not keeps.any():
            return np.nan
        if self._fewer:
            loss = 1 - self._worth[row] / self._worth[keeps].max()
        else:
            loss = self._worth[row] / self._worth[keeps].min() - 1
        return max(100 * float(loss), 0.0)
