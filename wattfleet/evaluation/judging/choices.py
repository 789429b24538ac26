"""Scores of methods that choose: modes for training, rows for inference, and rows for both on one board.

A *case* is one run of a method and one *problem* that at least one row of the corpus solves. The chosen row is compared
with the best of these rows, by the corpus's own times and powers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from wattfleet.core.choosing import InterleavingObjective, Objective, ServiceLimits, descending_modes
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import Profile
from wattfleet.evaluation.judging.sources import rounded
from wattfleet.evaluation.methods import (
    Bench,
    InferenceBench,
    Method,
    P,
    PairBench,
    PairCorpora,
    Session,
    TrainingBench,
)

Values = NDArray[np.float64]
Mask = NDArray[np.bool_]
Report = Callable[[float], None]
"""Called after each set of measurements with the share of the evaluation that is done, 0 to 1."""

# --- Cases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cases:
    """The cases of an evaluation: `r` runs by `p` problems that at least one row solves.

    Attributes:
        left_out: number of further problems, which no row solves.
        found: `[r, p]` whether the method chose a row.
        excess_w: `[r, p]` W by which the chosen row's measured power exceeds the budget; 0 if it does not.
        latency_broken: `[r, p]` whether the chosen row's measured time breaks a condition of latency.
        measured: `[r, g]` number of measurements for each of `g` groups of problems that share them.
    """

    left_out: int
    found: Mask
    excess_w: Values
    latency_broken: Mask
    measured: Values

    def broken(self) -> dict[str, object]:
        """The shares of cases in which something was chosen, and in which the choice breaks a limit, %.

        `over_budget_pct` counts cases over the budget, and `over_budget_1w_pct` those over it by more than 1 W.
        """
        return {
            "found_pct": rounded(100 * self.found.mean()),
            **_over_budget(self.excess_w),
            "latency_broken_pct": rounded(100 * self.latency_broken.mean()),
        }


def _cases(
    bench: Bench[P],
    method: Method[P],
    limit: int,
    groups: Sequence[Sequence[P]],
    runs: int,
    seed: int,
    case: Callable[[P, int | None], tuple[float, ...]],
    report: Report,
) -> tuple[Values, Values]:
    """Run a method several times.

    Args:
        bench: what can be measured and chosen.
        method: the method.
        limit: maximum number of measurements for each group of problems.
        groups: the problems; one set of measurements serves a group.
        runs: number of runs, with the seeds `seed`, `seed + 1` and so on.
        seed: seed of the first run.
        case: scores the choice of a row for a problem, with `s` numbers.
        report: called after each group.

    Returns:
        `[s, r, p]` scores, and `[r, g]` numbers of measurements.
    """
    if runs < 1 or limit < 0 or seed < 0:
        raise InvalidInputError(
            f"give 1 run or more, and modes and a seed of 0 or more, not {runs} runs, {limit} modes and seed {seed}"
        )
    scores, measured = [], np.empty((runs, len(groups)))
    for run in range(runs):
        of_run = []
        for number, group in enumerate(groups):
            session = Session(bench, limit)
            choose = method.profile(session, group, seed + run)
            of_run += [case(problem, choose(problem)) for problem in group]
            measured[run, number] = session.measured
            report((run + (number + 1) / len(groups)) / runs)
        scores.append(of_run)
    return np.moveaxis(np.array(scores, dtype=np.float64), -1, 0), measured


def _over_budget(excess_w: Values) -> dict[str, object]:
    return {
        "over_budget_pct": rounded(100 * (excess_w > 0).mean()),
        "over_budget_1w_pct": rounded(100 * (excess_w > 1).mean()),
    }


def _spread(values: Values, quantile: float) -> dict[str, float] | None:
    """Median, mean and a quantile of the finite values; None if there are none."""
    known = values[np.isfinite(values)]
    if not len(known):
        return None
    tail = rounded(np.quantile(known, quantile))
    return {"median": rounded(np.median(known)), f"p{100 * quantile:.0f}": tail, "mean": rounded(known.mean())}


# --- Training ---------------------------------------------------------------------------------------------------------
# Scores of a method that chooses modes for training. The problems are budgets in whole watts. The figures are those of
# PowerTrain (doi:10.1016/j.future.2024.07.001, section 5).


@dataclass(frozen=True)
class ChoiceCases(Cases):
    """The cases of a method for training.

    Attributes:
        budgets_w: `[p]` budgets, W.
        signed_penalty_pct: `[r, p]` how much longer a step takes in the chosen mode than in the best one within the
            budget, %. It is negative for a mode over the budget that is faster than the best one within it.
        penalty_passing_pct: `[r, p]` the penalty against the best row that passes an audit. NaN if the chosen row does
            not pass, or no passing row meets the budget. None without an audit.
    """

    budgets_w: Values
    signed_penalty_pct: Values
    penalty_passing_pct: Values | None

    @property
    def penalty_pct(self) -> Values:
        """`[r, p]` the penalty, where a mode that is over the budget and faster counts as 0 %."""
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
        found = {"time_penalty_pct": _spread(self.penalty_pct, 0.9)} | _over_budget(self.excess_w)
        if self.penalty_passing_pct is not None and (judged := np.isfinite(self.penalty_passing_pct)).any():
            found["time_penalty_pct_passing"] = _spread(self.penalty_passing_pct, 0.9)
            found |= {f"{name}_passing": value for name, value in _over_budget(self.excess_w[judged]).items()}
        return {
            **found,
            "signed_penalty_pct": rounded(np.median(self.signed_penalty_pct)),
            "excess_w": rounded(self.excess_w.mean()),
            "modes_measured": rounded(self.measured.mean()),
            "budgets": {"evaluated": len(self.budgets_w), "left_out": self.left_out},
        }


def evaluate_choice(
    corpus: Profile,
    method: Method[float],
    limit: int,
    budgets_w: Sequence[float],
    runs: int,
    seed: int,
    report: Report = lambda done: None,
    trusted: Mask | None = None,
) -> ChoiceCases:
    """Run a method for training on a corpus several times and score its choices.

    One set of measurements serves all budgets of a run, just as an agent profiles once for its whole front. If the
    method knows no mode within the budget, the lowest mode counts as its choice.

    Args:
        corpus: every mode that can be measured and chosen.
        method: the method to score.
        limit: maximum number of modes that it may measure in a run.
        budgets_w: budgets, W.
        runs: number of runs, with the seeds `seed`, `seed + 1` and so on.
        seed: seed of the first run.
        report: reports the progress.
        trusted: `[n]` whether each row of the corpus passes an audit. The method does not know it.

    Raises:
        InvalidInputError: no mode of the corpus meets any budget, a number is out of range, or the method cannot work
            with so few measurements.
    """
    requested_w = np.array(budgets_w, dtype=np.float64)
    if not (len(requested_w) and np.isfinite(requested_w).all() and (requested_w > 0).all()):
        raise InvalidInputError("give one or more budgets above 0 W")
    met = requested_w * 1e3 >= corpus.power_mw.min()
    if not met.any():
        raise InvalidInputError(
            f"no mode meets any of the budgets up to {requested_w.max():g} W: give a budget of at least"
            f" {corpus.power_mw.min() / 1e3:.1f} W, the lowest power of any mode"
        )
    bench = TrainingBench(corpus)
    lowest = bench.row_of[tuple(descending_modes(corpus.modes)[-1].tolist())]
    passes = np.ones(len(corpus), dtype=bool) if trusted is None else trusted
    best_ms = {watts: _least_ms(corpus, watts) for watts in requested_w.tolist()}
    passing_ms = {watts: _least_ms(corpus, watts, passes) for watts in best_ms}

    def case(budget_w: float, row: int | None) -> tuple[float, ...]:
        chosen = lowest if row is None else row
        step_ms, power_w = float(corpus.minibatch_ms[chosen]), float(corpus.power_mw[chosen]) / 1e3
        passing = max(100 * (step_ms / passing_ms[budget_w] - 1), 0.0) if passes[chosen] else np.nan
        return row is not None, max(power_w - budget_w, 0.0), 100 * (step_ms / best_ms[budget_w] - 1), passing

    scores, measured = _cases(bench, method, limit, [requested_w.tolist()], runs, seed, case, report)
    found, excess_w, signed_penalty_pct, penalty_passing_pct = scores[:, :, met]
    return ChoiceCases(
        int((~met).sum()),
        found > 0,
        excess_w,
        np.zeros_like(found, dtype=bool),
        measured,
        requested_w[met],
        signed_penalty_pct,
        None if trusted is None else penalty_passing_pct,
    )


def _least_ms(corpus: Profile, budget_w: float, rows: Mask | bool = True) -> float:
    """The least time of some rows within a budget, ms; NaN if none is within it."""
    within = corpus.minibatch_ms[rows & (corpus.power_mw <= 1e3 * budget_w)]
    return float(within.min()) if len(within) else np.nan


# --- Serving ----------------------------------------------------------------------------------------------------------
# Scores of a method for inference, on a corpus in which every mode was measured with every batch size. A problem is a
# latency, an arrival rate and a power budget.


@dataclass(frozen=True)
class ServingCases(Cases):
    """The cases of a method for inference.

    Attributes:
        loss_pct: `[r, p]` how many more watts, or how many fewer samples a second, than in the best row that keeps the
            limits, %. A choice that breaks a limit may be better; its loss is then 0. NaN if nothing was chosen.
        loss_passing_pct: `[r, p]` the loss against the best row that passes an audit. NaN if the chosen row does not
            pass, or no passing row keeps the limits. None without an audit.
    """

    loss_pct: Values
    loss_passing_pct: Values | None

    def figures(self) -> dict[str, object]:
        """The figures over all cases, as `evaluate choice --json` prints them.

        - `found_pct`: share of cases in which the method chose a setting.
        - `loss_pct`: median, mean and 90th percentile over the cases with a choice.
        - `over_budget_pct`, `over_budget_1w_pct`, `latency_broken_pct`: share of cases; see `Cases.broken`.
        - `excess_w`: mean excess over all cases, W.
        - `rows_measured`: mean over the runs.
        - `problems`: how many were evaluated and left out.

        With an audit, `loss_pct_passing` has the loss over the rows that pass.
        """
        return self._figures() | {
            "rows_measured": rounded(self.measured.mean()),
            "problems": {"evaluated": self.found.shape[1], "left_out": self.left_out},
        }

    def duty_figures(self) -> dict[str, object]:
        """The figures over all cases, as `evaluate duty --json` prints them; see `figures`."""
        solvable = self.found.shape[1]
        return {
            "problems": solvable + self.left_out,
            "solvable": solvable,
            **self._figures(),
            "measured": {"mean": rounded(self.measured.mean()), "most": int(self.measured.max())},
        }

    def _figures(self) -> dict[str, object]:
        figures = self.broken() | {"loss_pct": _spread(self.loss_pct, 0.9), "excess_w": rounded(self.excess_w.mean())}
        if self.loss_passing_pct is not None:
            figures["loss_pct_passing"] = _spread(self.loss_passing_pct, 0.9)
        return figures


def evaluate_serving(
    corpus: Profile,
    method: Method[ServiceLimits],
    limit: int,
    problems: Sequence[ServiceLimits],
    objective: Objective,
    runs: int,
    seed: int,
    report: Report = lambda done: None,
    trusted: Mask | None = None,
    shares_budgets: bool = True,
) -> ServingCases:
    """Run a method for inference on a corpus several times and score its choices.

    Args:
        corpus: every setting that can be measured and chosen, with its batch.
        method: the method to score.
        limit: maximum number of rows that it may measure for a latency and an arrival rate, or for a problem.
        problems: the limits to choose for.
        objective: what is chosen by.
        runs: number of runs, with the seeds `seed`, `seed + 1` and so on.
        seed: seed of the first run.
        report: reports the progress.
        trusted: `[n]` whether each row of the corpus passes an audit. The method does not know it.
        shares_budgets: whether, within a run, one set of measurements serves all budgets of a latency and an arrival
            rate; otherwise each problem starts from none.

    Raises:
        InvalidInputError: the corpus states no batches, no row keeps the limits of any problem, a number is out of
            range, or the method cannot work with so few measurements.
    """
    bench = InferenceBench(corpus, objective)
    passes = np.ones(len(corpus), dtype=bool) if trusted is None else trusted
    # Watts, or samples a second: the loss is relative to the best.
    more = objective is Objective.MOST_SAMPLES
    worth = bench.batch / corpus.minibatch_ms if more else corpus.power_mw

    def in_time(problem: ServiceLimits) -> Mask:
        return np.asarray(corpus.minibatch_ms <= problem.longest_ms(bench.batch))

    def keeping(problem: ServiceLimits) -> Mask:
        return np.asarray(in_time(problem) & (corpus.power_mw <= problem.budget_mw))

    def loss_pct(row: int, among: Mask) -> float:
        if not among.any():
            return np.nan
        loss = 1 - worth[row] / worth[among].max() if more else worth[row] / worth[among].min() - 1
        return max(100 * float(loss), 0.0)

    def case(problem: ServiceLimits, row: int | None) -> tuple[float, ...]:
        if row is None:
            return False, 0.0, False, np.nan, np.nan
        keeps = keeping(problem)
        excess_w = max(float(corpus.power_mw[row] - problem.budget_mw) / 1e3, 0.0)
        passing = loss_pct(row, keeps & passes) if passes[row] else np.nan
        return True, excess_w, not in_time(problem)[row], loss_pct(row, keeps), passing

    kept = [problem for problem in problems if keeping(problem).any()]
    if not kept:
        raise InvalidInputError(
            "no row of the target keeps the limits of any problem: allow a higher latency, fewer samples a second or"
            " more power"
        )
    groups = [[problem] for problem in kept]
    if shares_budgets:
        groups = [list(group) for _, group in groupby(kept, key=lambda each: (each.latency_ms, each.arrival_per_s))]
    scores, measured = _cases(bench, method, limit, groups, runs, seed, case, report)
    found, excess_w, broken, loss, loss_passing = scores
    return ServingCases(
        len(problems) - len(kept),
        found > 0,
        excess_w,
        broken > 0,
        measured,
        loss,
        None if trusted is None else loss_passing,
    )


# --- Interleaving -----------------------------------------------------------------------------------------------------
# Scores of a method for training beside inference, on measurements of both in the same modes. A problem is a latency,
# an arrival rate and a power budget.


@dataclass(frozen=True)
class InterleavingCases(Cases):
    """The cases of a method for training beside inference, in one run.

    Attributes:
        training_share: `[1, p]` minibatches per window of the choice, relative to those of the best row that keeps the
            limits. 0 if nothing was chosen or the choice breaks a limit; NaN if no such row leaves time for training.
        rate_share: `[1, p]` the same for minibatches per second.
        passing_share: `[1, p]` the same as `training_share`, compared with rows that pass an audit only. NaN if no
            passing row that keeps the limits leaves time for training. None without an audit.
    """

    training_share: Values
    rate_share: Values
    passing_share: Values | None

    def figures(self) -> dict[str, object]:
        """The figures, as `evaluate interleave --json` prints them.

        - `problems`, `solvable`: numbers of problems.
        - `found_pct`: share of the solvable problems in which the method chose a row.
        - `training_share`, `rate_share`: median, 10th percentile and mean over the solvable problems whose best choice
          leaves time for training; `with_training` is their number. `training_share_passing` with an audit.
        - `over_budget_pct`, `over_budget_1w_pct`, `latency_broken_pct`: share of the solvable problems.
        - `measured`: mean and most.
        """
        solvable = self.found.shape[1]
        figures = {
            "problems": solvable + self.left_out,
            "solvable": solvable,
            "with_training": int(np.isfinite(self.training_share).sum()),
            "training_share": _spread(self.training_share, 0.1),
            "rate_share": _spread(self.rate_share, 0.1),
            **self.broken(),
            "measured": {"mean": rounded(self.measured.mean()), "most": int(self.measured.max())},
        }
        if self.passing_share is not None:
            figures["training_share_passing"] = _spread(self.passing_share, 0.1)
        return figures


def evaluate_interleaving(
    corpora: PairCorpora,
    method: Method[ServiceLimits],
    limit: int,
    problems: Sequence[ServiceLimits],
    objective: InterleavingObjective,
    seed: int,
    shared: bool = False,
    report: Report = lambda done: None,
    trusted: Mask | None = None,
) -> InterleavingCases:
    """Let a method choose for each problem, and score its choices.

    Args:
        corpora: all that can be measured and chosen.
        method: the method to score.
        limit: maximum number of measurements, for each problem or for all of them.
        problems: the limits to choose for.
        objective: what is maximized.
        seed: seed of random draws.
        shared: whether one set of measurements serves all problems; otherwise each problem starts from none.
        report: reports the progress.
        trusted: `[m]` whether a row's training and inference pass an audit. The method does not know it.

    Raises:
        InvalidInputError: no row keeps the limits of any problem, or the method cannot work with so few measurements.
    """
    pair = corpora.measured
    power_mw, ms = pair.power_mw(), pair.inference.minibatch_ms
    passes = np.ones(len(pair.mode_of), dtype=bool) if trusted is None else trusted
    solvable = [limits for limits in problems if pair.keeps(limits).any()]
    if not solvable:
        raise InvalidInputError(
            "no mode and batch keeps the limits of any problem: allow a higher latency, fewer requests a second or more"
            " power"
        )

    def case(limits: ServiceLimits, row: int | None) -> tuple[float, ...]:
        kept, minibatches = pair.keeps(limits), pair.minibatches(limits)
        excess_w = 0.0 if row is None else max(float(power_mw[row] - limits.budget_mw) / 1e3, 0.0)
        return (
            row is not None,
            excess_w,
            row is not None and bool(ms[row] > limits.longest_ms(corpora.batch)[row]),
            _share(minibatches, row, kept, kept),
            _share(minibatches / limits.collect_ms(corpora.batch), row, kept, kept),
            _share(minibatches, row, kept, kept & passes),
        )

    groups = [solvable] if shared else [[limits] for limits in solvable]
    scores, measured = _cases(PairBench(corpora, objective), method, limit, groups, 1, seed, case, report)
    found, excess_w, broken, training_share, rate_share, passing_share = scores
    return InterleavingCases(
        len(problems) - len(solvable),
        found > 0,
        excess_w,
        broken > 0,
        measured,
        training_share,
        rate_share,
        None if trusted is None else passing_share,
    )


def _share(worth: Values, row: int | None, kept: Mask, best_of: Mask) -> float:
    """The worth of a row as a share of the best; 0 if it breaks a limit, NaN if the best is 0."""
    best = worth[best_of].max(initial=0.0)
    if best <= 0:
        return float(np.nan)
    return 0.0 if row is None or not kept[row] else min(float(worth[row] / best), 1.0)
