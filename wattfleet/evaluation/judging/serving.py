"""Scores of serving and of interleaving methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wattfleet.core.choosing import InterleavingObjective, Objective, PairedModes, ServiceLimits
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import BatchArray, PowerMode, Profile, array_to_modes
from wattfleet.evaluation.interleaving_methods import Choose, InterleavingMethod, InterleavingSession, PairCorpora
from wattfleet.evaluation.judging.sources import rounded
from wattfleet.evaluation.serving_methods import ServingMethod, ServingSession

# --- Serving ----------------------------------------------------------------------------------------------------------
# Scores of a serving method, on a corpus in which every mode was measured with every batch size.
#
# A *case* is one run of a method and one *problem*: a latency, an arrival rate and a power budget. The chosen row is
# compared with the best measured row that keeps the limits, by the corpus's own times and powers.


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


# --- Interleaving -----------------------------------------------------------------------------------------------------
# Scores of an interleaving method, on measured training and inference in the same modes.
#
# A *problem* is a latency, an arrival rate and a power budget. It is solvable if at least one measured mode and batch
# keeps them. The choice is compared with the best row that does, by the corpora's own times and powers.

"""Called with the number of judged problems."""


@dataclass(frozen=True)
class InterleavingCases:
    """The scores of a method's choices in `p` solvable problems.

    Attributes:
        problems: number of problems, solvable or not.
        found: `[p]` whether the method chose a row.
        training_share: `[p]` minibatches per window of the choice, relative to those of the best row that keeps the
            limits. 0 if nothing was chosen or the choice breaks a limit; NaN if no such row leaves time for training.
        rate_share: `[p]` the same for minibatches per second.
        passing_share: `[p]` the same as `training_share`, compared with rows that pass an audit only. NaN if no passing
            row that keeps the limits leaves time for training. None without an audit.
        excess_w: `[p]` W by which the choice's measured power exceeds the budget; 0 if it does not.
        latency_broken: `[p]` whether the choice's measured time breaks a condition of latency.
        measured: `[p]` number of measurements; a single number if they were shared.
    """

    problems: int
    found: Mask
    training_share: Values
    rate_share: Values
    passing_share: Values | None
    excess_w: Values
    latency_broken: Mask
    measured: Values

    def figures(self) -> dict[str, object]:
        """The figures, as `evaluate interleave --json` prints them.

        - `problems`, `solvable`: numbers of problems.
        - `found_pct`: share of the solvable problems in which the method chose a row.
        - `training_share`, `rate_share`: median, 10th percentile and mean over the solvable problems whose best choice
          leaves time for training; `with_training` is their number. `training_share_passing` with an audit.
        - `over_budget_pct`, `over_budget_1w_pct`, `latency_broken_pct`: share of the solvable problems.
        - `measured`: mean and most.
        """
        figures: dict[str, object] = {
            "problems": self.problems,
            "solvable": len(self.found),
            "with_training": int(np.isfinite(self.training_share).sum()),
            "found_pct": rounded(100 * self.found.mean()),
            "training_share": _shares(self.training_share),
            "rate_share": _shares(self.rate_share),
            "over_budget_pct": rounded(100 * (self.excess_w > 0).mean()),
            "over_budget_1w_pct": rounded(100 * (self.excess_w > 1).mean()),
            "latency_broken_pct": rounded(100 * self.latency_broken.mean()),
            "measured": {"mean": rounded(self.measured.mean()), "most": int(self.measured.max())},
        }
        if self.passing_share is not None:
            figures["training_share_passing"] = _shares(self.passing_share)
        return figures


def _shares(shares: Values) -> dict[str, float] | None:
    known = shares[np.isfinite(shares)]
    if not len(known):
        return None
    return {
        "median": rounded(np.median(known)),
        "p10": rounded(np.quantile(known, 0.1)),
        "mean": rounded(known.mean()),
    }


def evaluate_interleaving(
    corpora: PairCorpora,
    method: InterleavingMethod,
    limit: int,
    problems: Sequence[ServiceLimits],
    objective: InterleavingObjective,
    seed: int,
    shared: bool = False,
    report: Report = lambda problem: None,
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
        report: called after every problem.
        trusted: `[m]` whether a row's training and inference pass an audit. The method does not know it.

    Raises:
        InvalidInputError: no row keeps the limits of any problem, or the method cannot work with so few measurements.
    """
    scored = _ScoredPair(corpora.measured, trusted)
    solvable = [limits for limits in problems if scored.pair.keeps(limits).any()]
    if not solvable:
        raise InvalidInputError(
            "no mode and batch keeps the limits of any problem: allow a higher latency, fewer requests a second or more"
            " power"
        )

    def chosen() -> Iterator[tuple[ServiceLimits, Choose, InterleavingSession]]:
        if shared:
            session = InterleavingSession(corpora, limit)
            choose = method.profile(session, solvable, objective, seed)
            for limits in solvable:
                yield limits, choose, session
            return
        for limits in solvable:
            session = InterleavingSession(corpora, limit)
            yield limits, method.profile(session, [limits], objective, seed), session

    cases, measured = [], []
    for number, (limits, choose, session) in enumerate(chosen(), 1):
        cases.append(scored.case(limits, choose(limits)))
        measured.append(session.measured)
        report(number)
    return InterleavingCases(
        problems=len(problems),
        found=np.array([case.found for case in cases]),
        training_share=np.array([case.training_share for case in cases]),
        rate_share=np.array([case.rate_share for case in cases]),
        passing_share=None if trusted is None else np.array([case.passing_share for case in cases]),
        excess_w=np.array([case.excess_w for case in cases]),
        latency_broken=np.array([case.latency_broken for case in cases]),
        measured=np.array(measured, dtype=np.float64),
    )


class _Case(NamedTuple):
    """One solvable problem; see `InterleavingCases`."""

    found: bool
    training_share: float
    rate_share: float
    passing_share: float
    excess_w: float
    latency_broken: bool


class _ScoredPair:
    """Measured rows against which choices are scored."""

    def __init__(self, pair: PairedModes, trusted: Mask | None) -> None:
        self.pair = pair
        self._trusted = np.ones(len(pair.mode_of), dtype=bool) if trusted is None else trusted
        self._batch = pair.inference.stated_batch()
        self._power_mw = pair.power_mw()

    def case(self, limits: ServiceLimits, row: int | None) -> _Case:
        """The score of choosing a row; None if no row was chosen."""
        kept, minibatches = self.pair.keeps(limits), self.pair.minibatches(limits)
        excess_w, in_time = 0.0, True
        if row is not None:
            excess_w = max(float(self._power_mw[row] - limits.budget_mw) / 1e3, 0.0)
            in_time = bool(self.pair.inference.minibatch_ms[row] <= limits.longest_ms(self._batch)[row])
        return _Case(
            found=row is not None,
            training_share=_share(minibatches, row, kept),
            rate_share=_share(minibatches / limits.collect_ms(self._batch), row, kept),
            passing_share=_share(minibatches, row, kept, kept & self._trusted),
            excess_w=excess_w,
            latency_broken=not in_time,
        )


def _share(worth: Values, row: int | None, kept: Mask, best_of: Mask | None = None) -> float:
    """The worth of a row as a share of the best; 0 if it breaks a limit, NaN if the best is 0."""
    among = kept if best_of is None else best_of
    best = worth[among].max() if among.any() else 0.0
    if best <= 0:
        return float(np.nan)
    return 0.0 if row is None or not kept[row] else min(float(worth[row] / best), 1.0)
