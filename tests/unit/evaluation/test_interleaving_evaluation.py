"""Evaluating methods for training beside inference, and predictions of a corpus as measurements arrive."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from tests.fakes.paired_corpora import PROBLEMS, SPACE, Formula, corpora
from wattfleet.core.choosing import InterleavingObjective, Proposal, ServiceLimits
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import Profile, Task
from wattfleet.core.prediction import conditioned
from wattfleet.evaluation.judging.choices import InterleavingCases, evaluate_interleaving
from wattfleet.evaluation.methods import (
    INTERLEAVING_METHODS,
    Choose,
    CorpusPredictions,
    Fit,
    Method,
    PairBench,
    PairCorpora,
    Session,
    interleaving_method_named,
)

# --- Interleaving evaluation ------------------------------------------------------------------------------------------
# Evaluating methods for training beside inference, on small corpora whose best rows simple loops find.


PAIR = corpora()
WINDOW, SECOND = InterleavingObjective.MOST_PER_WINDOW, InterleavingObjective.MOST_PER_SECOND
MEASURING = [name for name in INTERLEAVING_METHODS if name != "network"]


def named(name: str, sd: float = 1e-6, biased: float = 1.0) -> Method[ServiceLimits]:
    def fit(task: Task) -> Fit:
        return lambda profile: Formula(task, sd, biased)  # type: ignore[return-value]

    return interleaving_method_named(name, fit)


def evaluated(
    method: Method[ServiceLimits], limit: int = 15, objective: InterleavingObjective = WINDOW, shared: bool = False
) -> InterleavingCases:
    return evaluate_interleaving(PAIR, method, limit, PROBLEMS, objective, 0, shared)


def kept_by_loop(pair: PairCorpora, limits: ServiceLimits) -> dict[int, tuple[int, float]]:
    """The number of minibatches and the window in seconds for each row that keeps the published conditions."""
    training = {
        tuple(mode): (ms / 1e3, mw)
        for mode, ms, mw in zip(pair.training.modes, pair.training.minibatch_ms, pair.training.power_mw, strict=True)
    }
    inference = zip(pair.inference.modes, pair.batch, pair.inference.minibatch_ms, pair.inference.power_mw, strict=True)
    kept = {}
    for row, (mode, batch, ms, mw) in enumerate(inference):
        window_s, step = batch / limits.arrival_per_s, training[tuple(mode)]
        if window_s + ms / 1e3 > limits.latency_ms / 1e3 or ms / 1e3 > window_s:
            continue
        if max(mw, step[1]) <= limits.budget_mw:
            kept[row] = math.floor((window_s - ms / 1e3) / step[0]), window_s
    return kept


SOLVABLE = [limits for limits in PROBLEMS if kept_by_loop(PAIR, limits)]


@pytest.mark.parametrize("objective", InterleavingObjective)
@pytest.mark.parametrize("name", MEASURING)
def test_methods_that_choose_measured_rows_break_no_limit(name: str, objective: InterleavingObjective) -> None:
    cases = evaluated(named(name, sd=0.1), objective=objective)
    assert cases.found.shape == (1, len(SOLVABLE)) and cases.left_out == len(PROBLEMS) - len(SOLVABLE)
    assert cases.found.mean() > 0.5
    assert not cases.excess_w.any() and not cases.latency_broken.any()
    if name != "brute-force":
        assert (cases.measured <= 15).all()


@pytest.mark.parametrize("name", ["wattfleet", "brute-force"])
def test_full_knowledge_finds_the_best_row(name: str) -> None:
    for objective in InterleavingObjective:
        cases = evaluated(named(name), objective=objective)
        assert cases.found.all()
        share = cases.training_share if objective is WINDOW else cases.rate_share
        assert np.nanmin(share) == 1
    assert (cases.measured == 200).all() if name == "brute-force" else cases.measured.max() <= 15


def test_the_other_strategies_get_less_training() -> None:
    for name in ("random", "binary-search", "gradient"):
        assert np.nanmean(evaluated(named(name), limit=8).training_share) < 0.98


def test_measuring_what_matters_gets_more_than_the_others() -> None:
    mean = {name: np.nanmean(evaluated(named(name, sd=0.1)).training_share) for name in MEASURING}
    assert mean["wattfleet"] > 0.95
    assert mean["wattfleet"] > max(mean["random"], mean["binary-search"], mean["gradient"])


@pytest.mark.parametrize("biased", [0.5, 2.0])
def test_a_single_problem_is_safe_whatever_is_predicted(biased: float) -> None:
    cases = evaluated(named("wattfleet", biased=biased))
    assert cases.found.any()
    assert not cases.excess_w.any() and not cases.latency_broken.any()


def test_shared_measurements_choose_by_predictions_that_may_err() -> None:
    assert (evaluated(named("wattfleet", biased=0.5), shared=True).excess_w > 0).any()
    exact = evaluated(named("wattfleet"), shared=True)
    assert exact.found.all() and np.nanmin(exact.training_share) == 1
    doubtful = evaluated(named("wattfleet", sd=0.05), limit=20, shared=True)
    assert doubtful.found.mean() > 0.9
    assert (doubtful.excess_w > 1).mean() <= 0.05


class Recorded:
    """A wrapper of another method that records its sessions and problems."""

    name = "recorded"

    def __init__(self, method: Method[ServiceLimits]) -> None:
        self.method = method
        self.sessions: list[Session[ServiceLimits]] = []
        self.problems: list[list[ServiceLimits]] = []

    def profile(
        self, session: Session[ServiceLimits], problems: Sequence[ServiceLimits], seed: int
    ) -> Choose[ServiceLimits]:
        self.sessions.append(session)
        self.problems.append(list(problems))
        return self.method.profile(session, problems, seed)


@pytest.mark.parametrize("name", [name for name in MEASURING if name != "brute-force"])
def test_sharing_makes_one_set_of_measurements(name: str) -> None:
    method = Recorded(named(name, sd=0.1))
    cases = evaluated(method, limit=12, shared=True)
    assert method.problems == [SOLVABLE]
    assert cases.measured.tolist() == [[method.sessions[0].measured]]
    assert cases.measured.max() <= 12


@pytest.mark.parametrize("name", [name for name in MEASURING if name != "brute-force"])
def test_without_sharing_every_problem_starts_from_nothing(name: str) -> None:
    method = Recorded(named(name, sd=0.1))
    cases = evaluated(method, limit=12)
    assert method.problems == [[limits] for limits in SOLVABLE]
    assert cases.measured.tolist() == [[session.measured for session in method.sessions]]
    assert cases.measured.max() <= 12
    alone = evaluate_interleaving(PAIR, named(name, sd=0.1), 12, SOLVABLE[-1:], WINDOW, 0)
    assert alone.training_share[0, 0] == pytest.approx(cases.training_share[0, -1], nan_ok=True)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", MEASURING)
def test_every_method_is_deterministic(name: str, shared: bool) -> None:
    one, other = (evaluated(named(name, sd=0.1), shared=shared) for _ in range(2))
    assert one.figures() == other.figures()
    np.testing.assert_array_equal(one.training_share, other.training_share)


@pytest.mark.usefixtures("few_epochs")
def test_the_network_is_deterministic_and_needs_two_measurements_of_each() -> None:
    some = PROBLEMS[-2:]
    one, other = (evaluate_interleaving(PAIR, named("network"), 9, some, WINDOW, 3, True) for _ in range(2))
    assert one.figures() == other.figures()
    assert one.measured.tolist() == [[8]], "half of the limit each"
    with pytest.raises(InvalidInputError, match="trained on 2 or more measurements, not 1: allow more"):
        evaluate_interleaving(PAIR, named("network"), 3, some, WINDOW, 0)


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="unknown strategy 'best': choose one of wattfleet, gradient, binary-s"):
        named("best")


class Always:
    """A method that always chooses the same row."""

    name = "always"

    def __init__(self, row: int | None) -> None:
        self.row = row

    def profile(self, session: Session[ServiceLimits], problems: object, seed: int) -> Choose[ServiceLimits]:
        if self.row is not None:
            session.measure(self.row)
        return lambda limits: self.row


@pytest.mark.parametrize("row", range(0, 160, 7))
def test_shares_are_those_of_a_loop(row: int) -> None:
    cases = evaluated(Always(row))
    for at, limits in enumerate(SOLVABLE):
        kept = kept_by_loop(PAIR, limits)
        most, fastest = max(count for count, _ in kept.values()), max(count / window for count, window in kept.values())
        if most == 0:
            assert np.isnan(cases.training_share[0, at]) and np.isnan(cases.rate_share[0, at])
            continue
        count, window_s = kept.get(row, (0, 1.0))
        assert cases.training_share[0, at] == pytest.approx(count / most)
        assert cases.rate_share[0, at] == pytest.approx(count / window_s / fastest)


SMALL = PairCorpora.of(
    Profile(SPACE[:3], np.array([10.0, 30.0, 50.0]), np.array([20e3, 10e3, 8e3])),
    Profile(
        SPACE[:3], np.array([20.0, 50.0, 200.0]), np.array([16e3, 12e3, 6e3]), np.array([10, 10, 10]), Task.INFERENCE
    ),
)
# At 100 per second, 10 requests arrive in 100 ms. Row 0 trains 8 minibatches at 20 W, row 1 trains 1 at 12 W, and row 2
# is late.


@pytest.mark.parametrize(
    ("row", "budget_w", "share", "excess_w", "broken"),
    [
        (0, 20, 1, 0, False),
        (1, 20, 1 / 8, 0, False),
        (0, 18.5, 0, 1.5, False),
        (2, 20, 0, 0, True),
        (1, 13, 1, 0, False),
    ],
)
def test_hand_computed_figures(row: int, budget_w: float, share: float, excess_w: float, broken: bool) -> None:
    limits = [ServiceLimits(200, 100, 1e3 * budget_w), ServiceLimits(200, 100, 11e3)]
    figures = evaluate_interleaving(SMALL, Always(row), 5, limits, WINDOW, 0).figures()
    shares = {"median": share, "p10": share, "mean": share}
    assert figures == {
        "problems": 2,
        "solvable": 1,
        "with_training": 1,
        "found_pct": 100,
        "training_share": shares,
        "rate_share": shares,
        "over_budget_pct": 100 * (excess_w > 0),
        "over_budget_1w_pct": 100 * (excess_w > 1),
        "latency_broken_pct": 100 * broken,
        "measured": {"mean": 2, "most": 2},
    }


def test_nothing_chosen_is_nothing_found() -> None:
    figures = evaluate_interleaving(SMALL, Always(None), 5, [ServiceLimits(200, 100, 20e3)], WINDOW, 0).figures()
    assert figures["found_pct"] == figures["over_budget_pct"] == figures["latency_broken_pct"] == 0
    assert figures["training_share"] == {"median": 0, "p10": 0, "mean": 0}


def test_rows_that_fail_the_audit_do_not_count_as_the_best() -> None:
    def passing(row: int, trusted: Sequence[bool]) -> object:
        limits = [ServiceLimits(200, 100, 20e3)]
        cases = evaluate_interleaving(SMALL, Always(row), 5, limits, WINDOW, 0, trusted=np.array(trusted))
        return cases.figures()["training_share_passing"]

    assert passing(1, [False, True, True]) == {"median": 1, "p10": 1, "mean": 1}
    assert passing(1, [True, True, True]) == {"median": 0.125, "p10": 0.125, "mean": 0.125}
    assert passing(0, [False, False, True]) is None


def test_without_a_solvable_problem_there_is_nothing_to_judge() -> None:
    with pytest.raises(InvalidInputError, match="no mode and batch keeps the limits of any problem: allow a higher"):
        evaluate_interleaving(SMALL, Always(0), 5, [ServiceLimits(200, 100, 11e3)], WINDOW, 0)


def test_a_session_counts_each_measurement_once_and_stops() -> None:
    session = Session(PairBench(PAIR, WINDOW), 3)
    assert session.measure(0) and session.measured == 2
    assert session.measure(0) and session.measured == 2
    assert not session.measure(1) and session.measured == 2, "one measurement is left, and a pair takes two"
    assert session.measure(40), "the training in its mode is known"
    assert session.measured == 3 and not session.remaining
    assert not session.measure(1)
    assert session.rows == {Task.TRAINING: [0], Task.INFERENCE: [0, 40]}
    session.measure_one(Proposal(Task.INFERENCE, 0))
    with pytest.raises(InvalidInputError, match="the limit of 3 measurements is reached"):
        session.measure_one(Proposal(Task.TRAINING, 7))
    with pytest.raises(InvalidInputError, match="allow 2 or more, not 1"):
        Session(PairBench(PAIR, WINDOW), 1)


# --- Corpus predictions -----------------------------------------------------------------------------------------------
# Predictions of a corpus as measurements arrive: which rows are fitted, conditioned on, or taken from the cache.

CORPUS = corpora(10).inference
ROWS = [7, 2, 11, 30]


def counted() -> tuple[CorpusPredictions, list[Profile]]:
    seen: list[Profile] = []

    def fit(profile: Profile) -> Formula:
        seen.append(profile)
        return Formula(Task.INFERENCE, 0.01 * (1 + len(profile)))

    return CorpusPredictions(fit), seen  # type: ignore[arg-type]


def test_without_a_number_it_fits_to_every_measurement() -> None:
    predictions, seen = counted()
    found = predictions.after(CORPUS, ROWS)
    np.testing.assert_array_equal(seen[0].minibatch_ms, CORPUS.minibatch_ms[sorted(ROWS)])
    expected = Formula(Task.INFERENCE, 0.05).predict(CORPUS.modes, CORPUS.batch)
    np.testing.assert_array_equal(found.minibatch_ms, expected.minibatch_ms)


def test_it_fits_to_the_first_and_is_conditioned_on_the_others() -> None:
    predictions, seen = counted()
    found = predictions.after(CORPUS, ROWS, 2)
    np.testing.assert_array_equal(seen[0].minibatch_ms, CORPUS.minibatch_ms[[2, 7]])
    rest = np.array(ROWS[2:])
    first = Formula(Task.INFERENCE, 0.03).predict(CORPUS.modes, CORPUS.batch)
    expected = conditioned(first, CORPUS.modes, CORPUS.batch, rest, CORPUS.rows(rest))
    np.testing.assert_array_equal(found.minibatch_ms, expected.minibatch_ms)
    np.testing.assert_array_equal(found.power_log_sd, expected.power_log_sd)


@pytest.mark.parametrize(("count", "fits"), [(None, 4), (2, 2), (0, 1)])
def test_the_same_rows_are_fitted_once_in_whatever_order(count: int | None, fits: int) -> None:
    predictions, seen = counted()
    for _ in range(2):
        for measured in range(1, len(ROWS) + 1):
            predictions.after(CORPUS, ROWS[:measured], count)
    assert len(seen) == fits
    if count is None:
        predictions.after(CORPUS, ROWS[::-1])
        assert len(seen) == fits


def test_fewer_measurements_than_are_fitted_are_all_fitted() -> None:
    predictions, seen = counted()
    predictions.after(CORPUS, [], 3)
    predictions.after(CORPUS, ROWS[:1], 3)
    assert [len(profile) for profile in seen] == [0, 1]
