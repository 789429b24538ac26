"""Scores of an interleaving method, on measured training and inference in the same modes.

A *problem* is a latency, an arrival rate and a power budget. It is solvable if at least one measured mode and batch
keeps them. The choice is compared with the best row that does, by the corpora's own times and powers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wattfleet.choosing import InterleavingObjective, PairedModes, ServiceLimits
from wattfleet.errors import InvalidInputError
from wattfleet_evaluation.interleaving_methods.interleaving_method import Choose, InterleavingMethod
from wattfleet_evaluation.interleaving_methods.session import InterleavingSession, PairCorpora
from wattfleet_evaluation.judging.rounding import rounded

Values = NDArray[np.float64]
Mask = NDArray[np.bool_]
Report = Callable[[int], None]
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
    scored = _Scored(corpora.measured, trusted)
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


class _Scored:
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
