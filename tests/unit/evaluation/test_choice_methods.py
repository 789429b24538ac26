"""Methods of choice: the behaviour and scores of each one, scores of transfers, and grid searches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from reference_models.training import require_disjoint
from tests.fakes.short_forms import examples
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import (
    BOARDS,
    BatchArray,
    ModeArray,
    Profile,
    WorkloadFacts,
    board_with_modes,
    nearest_mode,
)
from wattfleet.core.prediction import Prediction, Predictor, RooflinePredictor
from wattfleet.core.prediction.roofline import power_mw, settings_of, step_time_ms
from wattfleet.evaluation.grid_search import BATCH, KNOBS, Grid
from wattfleet.evaluation.judging.choices import evaluate_choice
from wattfleet.evaluation.judging.transfer import TransferScores, evaluate_transfer, quartiles
from wattfleet.evaluation.methods import (
    CHOICE_METHODS,
    Choose,
    EveryRow,
    ModeSearch,
    Presets,
    RandomThenPredict,
    Session,
    TrainingBench,
    choice_method_named,
)

# --- Choice methods ---------------------------------------------------------------------------------------------------
# Properties of all choice methods, and the behaviour of each one.


BOARD = BOARDS["orin-nano"]


def corpus() -> Profile:
    """Measurements of an Orin Nano that follow the prior physics with a little noise."""
    from wattfleet.core.prediction.roofline import PowerParameters, TimeParameters
    from wattfleet.core.prediction.roofline.priors import general_power_prior, general_time_prior

    modes = BOARD.space.array()[::2]
    time = TimeParameters.from_log(general_time_prior(100.0, WorkloadFacts()).mean)
    rng = np.random.default_rng(0)
    noise = np.exp(rng.normal(0, 0.01, (2, len(modes))))
    settings = settings_of(modes, None)
    power = power_mw(PowerParameters.from_log(general_power_prior().mean), time, settings)
    return Profile(modes, step_time_ms(time, settings) * noise[0], power * noise[1])


CORPUS = corpus()
BENCH = TrainingBench(CORPUS)
BUDGETS_W = np.linspace(CORPUS.power_mw.min() / 1e3 + 0.5, CORPUS.power_mw.max() / 1e3, 8).tolist()
# All methods except the other kinds of predictors, which are used in the same way as `roofline`.
REFERENCE = RooflinePredictor.fit(CORPUS.rows(np.arange(0, len(CORPUS), 7)))
ALL = {
    name: choice_method_named(name, lambda predictor: lambda profile: RooflinePredictor.fit(profile, REFERENCE), BOARD)
    for name in CHOICE_METHODS
    if name not in ("powertrain", "scratch", "linear", "tree", "forest", "boosting")
}
MEASURED_ONLY = ("random", "binary-search", "brute-force")


def choose_after(name: str, limit: int = 12, seed: int = 0) -> tuple[Session[float], Choose[float]]:
    """The session of a method, and the function that it chooses by."""
    session = Session(BENCH, limit)
    return session, ALL[name].profile(session, BUDGETS_W, seed)


@pytest.mark.parametrize("name", ALL)
def test_methods_measure_each_mode_once_within_the_limit_and_choose_known_modes(name: str) -> None:
    session, choose = choose_after(name)
    (rows,) = session.rows.values()
    assert len(rows) == len(set(rows)) <= (len(CORPUS) if name == "brute-force" else 12)
    for budget in BUDGETS_W:
        assert choose(budget) is None or choose(budget) in range(len(CORPUS))


@pytest.mark.parametrize("name", ALL)
def test_every_method_is_deterministic(name: str) -> None:
    def run() -> tuple[object, list[int | None]]:
        session, choose = choose_after(name, seed=5)
        return session.rows, [choose(budget) for budget in BUDGETS_W]

    assert run() == run()


@pytest.mark.parametrize("name", MEASURED_ONLY)
def test_methods_that_choose_measured_modes_keep_every_budget(name: str) -> None:
    _, choose = choose_after(name, seed=1)
    for budget in [*BUDGETS_W, 1.0]:
        row = choose(budget)
        assert row is None or CORPUS.power_mw[row] <= budget * 1e3


def test_no_method_beats_brute_force_within_a_budget() -> None:
    chosen = {name: choose_after(name)[1] for name in ALL}
    for budget in BUDGETS_W:
        best = chosen["brute-force"](budget)
        within = CORPUS.power_mw <= budget * 1e3
        assert best is not None
        assert CORPUS.minibatch_ms[best] == CORPUS.minibatch_ms[within].min()
        for choose in chosen.values():
            row = choose(budget)
            if row is not None and within[row]:
                assert CORPUS.minibatch_ms[row] >= CORPUS.minibatch_ms[best]


def test_brute_force_measures_every_mode_whatever_the_limit() -> None:
    session, _ = choose_after("brute-force", limit=10)
    assert session.measured == len(CORPUS)


def test_one_binary_search_takes_log2_of_the_modes_and_nears_the_budget() -> None:
    session, budget = Session(BENCH, len(CORPUS)), float(np.median(CORPUS.power_mw)) / 1e3
    row = ModeSearch().profile(session, [budget], 0)(budget)
    assert session.measured <= np.log2(len(CORPUS)) + 4
    assert row is not None
    assert 0.8 * budget <= CORPUS.power_mw[row] / 1e3 <= budget


def test_presets_are_chosen_by_the_watts_in_their_names() -> None:
    choose = Presets(BOARD.presets).profile(Session(BENCH, 0), BUDGETS_W, 0)
    seven, fifteen = (BENCH.row_of[nearest_mode(CORPUS.modes, BOARD.presets[name])] for name in ("7W", "15W"))
    assert [choose(budget) for budget in (6.9, 7.0, 14.9, 15.0, 60.0)] == [None, seven, seven, fifteen, fifteen]


@pytest.mark.parametrize("kind", BOARDS)
def test_presets_lie_within_the_board_and_available_ones_are_unchanged(kind: str) -> None:
    board = BOARDS[kind]
    modes = board.space.array()
    for preset in board.presets.values():
        assert all(
            low <= knob <= high for knob, low, high in zip(preset, board.space.lowest, board.space.highest, strict=True)
        )
        assert nearest_mode(modes, preset).cores == preset.cores
        if preset in board.space:
            assert nearest_mode(modes, preset) == preset


def test_modes_belong_to_the_smallest_board_that_offers_them() -> None:
    assert board_with_modes(CORPUS.modes) is BOARD
    assert board_with_modes(BOARDS["agx-orin"].space.array()[-50:]) is BOARDS["agx-orin"]
    assert board_with_modes(CORPUS.modes * 3) is None


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidInputError, match="wattfleet, maxn, random"):
        choice_method_named("best", lambda predictor: RooflinePredictor.fit, BOARD)
    with pytest.raises(InvalidInputError, match="no known board"):
        choice_method_named("presets", lambda predictor: RooflinePredictor.fit, None)


def test_a_session_enforces_its_limit_and_its_modes() -> None:
    session = Session(BENCH, 1)
    assert session.measure(0) and session.measure(0)
    assert session.remaining == 0 and not session.measure(1)
    with pytest.raises(InvalidInputError, match="the limit of 1 measurements is reached"):
        session.measure_settings(CORPUS.modes[:2])
    with pytest.raises(InvalidInputError, match="0 or more measurements, not -1"):
        Session(BENCH, -1)


def test_a_predictor_chooses_the_least_predicted_time_as_published() -> None:
    class Predicted:
        """Times rise in steps of 0.1 %, and the fastest mode draws the most."""

        def predict(self, modes: ModeArray) -> Prediction:
            rank = np.arange(len(modes), dtype=np.float64)
            sd = np.full(len(modes), 0.1)
            return Prediction(100 * 1.001**rank, 20_000 - 1000 * rank, sd, sd)

    session = Session(TrainingBench(CORPUS.rows(np.arange(5))), 5)
    method = RandomThenPredict("known", lambda profile: cast(Predictor, Predicted()))
    choose = method.profile(session, [18.5], seed=0)
    assert (choose(25.0), choose(18.5)) == (0, 2)
    assert choose(15.9) is None


def test_without_measurements_every_choice_keeps_its_budget_with_95_pct_probability() -> None:
    predicted = RooflinePredictor.fit(Profile.of(()), REFERENCE).predict(CORPUS.modes)
    safe_w = predicted.power_mw_quantile(0.95) / 1e3
    _, choose = choose_after("wattfleet", limit=0)
    for budget_w in BUDGETS_W:
        chosen = choose(budget_w)
        assert (chosen is None) == (safe_w.min() > budget_w)
        assert chosen is None or safe_w[chosen] <= budget_w
    assert choose(float(safe_w.max())) is not None


# --- Choice evaluation ------------------------------------------------------------------------------------------------
# Scores of a choice method, computed by hand.

FOUR_MODES = np.array([[cores, 1_000_000, 600_000_000, 2_133_000_000] for cores in (1, 2, 3, 4)], dtype=np.float64)
SMALL_CORPUS = Profile(FOUR_MODES, np.array([80.0, 40.0, 20.0, 10.0]), np.array([10e3, 12e3, 14.2e3, 17e3]))


@dataclass(frozen=True)
class Fixed:
    """A method that measures the same two modes in every run, and whose choices are given in a dictionary."""

    rows: dict[float, int | None]
    name: str = "fixed"

    def profile(self, session: Session[float], budgets_w: Sequence[float], seed: int) -> Choose[float]:
        session.measure_settings(session.bench.modes[:2])
        return self.rows.get


def test_the_figures_of_five_budgets_by_hand() -> None:
    # 9 W: no mode is within it. 10 W: the best is 80 ms, the choice 40 ms at 12 W. 12 W: the best is 40 ms; nothing is
    # chosen, so the lowest mode counts with 80 ms. 14 W: the best is 40 ms, the choice 20 ms at 14.2 W. 17 W: the best
    # is 10 ms, the choice 20 ms.
    method = Fixed({10.0: 1, 12.0: None, 14.0: 2, 17.0: 2})
    cases = evaluate_choice(SMALL_CORPUS, method, 3, [9.0, 10.0, 12.0, 14.0, 17.0], runs=2, seed=0)
    np.testing.assert_allclose(cases.penalty_pct, [[0, 100, 0, 100]] * 2)
    np.testing.assert_allclose(cases.signed_penalty_pct, [[-50, 100, -50, 100]] * 2)
    np.testing.assert_allclose(cases.excess_w, [[2, 0, 0.2, 0]] * 2)
    assert cases.figures() == {
        "time_penalty_pct": {"median": 50.0, "mean": 50.0, "p90": 100.0},
        "over_budget_pct": 50.0,
        "over_budget_1w_pct": 25.0,
        "signed_penalty_pct": 25.0,
        "excess_w": 0.55,
        "modes_measured": 2.0,
        "budgets": {"evaluated": 4, "left_out": 1},
    }


def test_choices_are_also_scored_on_the_rows_that_pass_an_audit() -> None:
    method = Fixed({10.0: 1, 12.0: None, 14.0: 2, 17.0: 2})
    trusted = np.array([True, True, False, True])
    figures = evaluate_choice(SMALL_CORPUS, method, 3, [10.0, 12.0, 14.0, 17.0], 2, 0, trusted=trusted).figures()
    # The third row fails the audit, so the choices at 14 and 17 W are not scored. At 12 W the best is still 40 ms.
    assert figures["time_penalty_pct_passing"] == {"median": 50.0, "mean": 50.0, "p90": 100.0}
    assert figures["over_budget_pct_passing"] == figures["over_budget_1w_pct_passing"] == 50.0
    assert figures["time_penalty_pct"] == {"median": 50.0, "mean": 50.0, "p90": 100.0}

    # The best row within 17 W fails the audit. Among the rows that pass, the chosen one is the best.
    with_false_row = Profile(FOUR_MODES, SMALL_CORPUS.minibatch_ms, np.array([10e3, 12e3, 14e3, 11e3]))
    cases = evaluate_choice(
        with_false_row, Fixed({17.0: 2}), 3, [17.0], 1, 0, trusted=np.array([True, True, True, False])
    )
    np.testing.assert_allclose(cases.penalty_pct, [[100]])
    assert cases.penalty_passing_pct is not None
    np.testing.assert_allclose(cases.penalty_passing_pct, [[0]])


def test_brute_force_has_no_penalty_and_keeps_every_budget() -> None:
    cases = evaluate_choice(SMALL_CORPUS, EveryRow(), 4, range(8, 20), runs=1, seed=0)
    assert not cases.penalty_pct.any()
    assert not cases.excess_w.any()
    assert cases.left_out == 2


@pytest.mark.parametrize(
    ("budgets", "runs", "limit", "what"),
    [
        ([5.0], 1, 4, "no mode meets any"),
        ([], 1, 4, "budgets above 0 W"),
        ([-1.0], 1, 4, "budgets above 0 W"),
        ([15.0], 0, 4, "give 1 run or more"),
        ([15.0], 1, -1, "modes and a seed of 0 or more"),
    ],
)
def test_bad_input_is_refused(budgets: list[float], runs: int, limit: int, what: str) -> None:
    with pytest.raises(InvalidInputError, match=what):
        evaluate_choice(SMALL_CORPUS, EveryRow(), limit, budgets, runs, seed=0)


# --- Transfer evaluation ----------------------------------------------------------------------------------------------
# Scores of a transfer, for predictors whose errors are known.

TEN_MODES = np.array([[1 + k, 1e6, 1e9, 2e9] for k in range(10)])
TARGET = Profile(TEN_MODES, np.full(10, 100.0), np.full(10, 10_000.0))


class TenPercentOff:
    """A predictor with times 10 % too long and wide intervals, and powers 5 % too low and narrow ones."""

    name = "ten-percent-off"
    seen: list[Profile] = []

    @classmethod
    def fit(cls, profile: Profile, reference: object = None, facts: object = None) -> TenPercentOff:
        cls.seen.append(profile)
        return cls()

    def predict(self, modes: ModeArray, batch: BatchArray | None = None) -> Prediction:
        n = len(modes)
        return Prediction(np.full(n, 110.0), np.full(n, 9500.0), np.full(n, 0.2), np.full(n, 0.01))


@pytest.fixture(autouse=True)
def forget_profiles() -> None:
    TenPercentOff.seen.clear()


def evaluate(
    target: Profile = TARGET, modes: int = 4, runs: int = 3, seed: int = 7, trusted: NDArray[np.bool_] | None = None
) -> TransferScores:
    ticks = count(step=2.5)
    return evaluate_transfer(
        cast(type[Predictor], TenPercentOff), [], target, modes, runs, seed, lambda: next(ticks), trusted
    )


def test_errors_coverage_and_seconds() -> None:
    scores = evaluate()
    np.testing.assert_allclose(scores.time_mape, [10, 10, 10])
    np.testing.assert_allclose(scores.power_mape, [5, 5, 5])
    assert scores.time_coverage.tolist() == [100, 100, 100]
    assert scores.power_coverage.tolist() == [0, 0, 0]
    assert scores.fit_seconds.tolist() == [2.5, 2.5, 2.5]


def test_the_summary_has_the_keys_of_the_command() -> None:
    summary = evaluate().summary()
    assert set(summary) == {"time_mape", "power_mape", "coverage_90", "fit_seconds"}
    assert set(summary["time_mape"]) == {"median", "q1", "q3"}
    assert summary["coverage_90"] == {"time": 100.0, "power": 0.0}


def test_each_run_draws_with_its_own_seed() -> None:
    evaluate(seed=7)
    for run, profile in enumerate(TenPercentOff.seen):
        drawn = np.random.default_rng(7 + run).choice(10, 4, replace=False)
        np.testing.assert_array_equal(profile.modes, TEN_MODES[drawn])


def test_only_modes_that_were_not_drawn_are_scored() -> None:
    # One row is predicted wrongly. It only counts in the runs that did not draw it.
    power = np.full(10, 9500.0)
    time = np.full(10, 110.0)
    time[3] = 55.0
    scores = evaluate(Profile(TEN_MODES, time, power), runs=20)
    held_out = [3 not in np.random.default_rng(7 + k).choice(10, 4, replace=False) for k in range(20)]
    np.testing.assert_allclose(scores.time_mape, [100 / 6 if out else 0 for out in held_out], atol=1e-9)
    assert 0 < sum(held_out) < 20


def test_errors_over_the_passing_rows_are_scored_separately() -> None:
    time = np.full(10, 110.0)
    time[3] = 55.0
    scores = evaluate(Profile(TEN_MODES, time, TARGET.power_mw), trusted=np.arange(10) != 3)
    np.testing.assert_allclose(scores.summary()["time_mape_passing"]["median"], 0, atol=1e-9)
    np.testing.assert_allclose(scores.summary()["power_mape_passing"]["median"], 5)
    assert scores.time_mape.max() > 1


def test_without_passing_rows_there_are_no_passing_errors() -> None:
    scores = evaluate(trusted=np.zeros(10, dtype=bool))
    assert scores.time_mape_passing is None and scores.power_mape_passing is None
    np.testing.assert_allclose(scores.time_mape, 10)


def test_a_target_that_shares_rows_with_the_corpus_is_refused() -> None:
    time = np.arange(100.0, 110.0)
    corpus = Profile(TEN_MODES, time, TARGET.power_mw)

    def sharing(rows: int) -> Profile:
        return Profile(TEN_MODES, np.append(time[:rows], time[rows:] + 0.5), TARGET.power_mw)

    require_disjoint(corpus, sharing(3))
    with pytest.raises(InvalidInputError, match="4 of the target's 10 rows are also in the reference's corpus"):
        require_disjoint(corpus, sharing(4))
    with pytest.raises(InvalidInputError, match="2 of the target's 2 rows"):
        require_disjoint(TARGET, TARGET.rows(np.arange(2)))


@pytest.mark.parametrize("wrong", [{"runs": 0}, {"modes": 10}, {"modes": -1}, {"seed": -1}])
def test_bad_numbers_of_runs_modes_and_seeds_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        evaluate(**wrong)


def test_quartiles() -> None:
    assert quartiles(np.array([4.0, 0, 1, 2, 3])) == {"median": 2, "q1": 1, "q3": 3}


class ByBatch:
    """A predictor that knows the time of every batch size if the facts state 3 loader workers."""

    name = "by-batch"

    def __init__(self, facts: WorkloadFacts) -> None:
        self.right = facts.loader_workers == 3

    @classmethod
    def fit(cls, profile: Profile, reference: object, facts: WorkloadFacts) -> ByBatch:
        return cls(facts)

    def predict(self, modes: ModeArray, batch: BatchArray) -> Prediction:
        ms = 100.0 * batch if self.right else np.ones(len(modes))
        return Prediction(ms, np.full(len(modes), 10_000.0), np.full(len(modes), 0.1), np.full(len(modes), 0.1))


class Together(ByBatch):
    """The same predictor, fitted to all draws at once."""

    @classmethod
    def fit_all(cls, profiles: list[Profile], reference: object, facts: WorkloadFacts) -> list[Together]:
        return [cls(facts) for _ in profiles]


@pytest.mark.parametrize("kind", [ByBatch, Together])
def test_facts_reach_every_fit_and_each_row_is_predicted_at_its_batch(kind: type[ByBatch]) -> None:
    batch = np.arange(10) % 2 + 1
    target = Profile(TEN_MODES, 100.0 * batch, np.full(10, 10_000.0), batch)
    facts = WorkloadFacts(loader_workers=3)
    scores = evaluate_transfer(cast(type[Predictor], kind), [], target, 4, 2, 0, lambda: 0.0, facts=facts)
    assert scores.time_mape.tolist() == [0, 0]


# --- Grid search ------------------------------------------------------------------------------------------------------
# Grid searches over knobs and batch sizes by measuring, on full and thinned grids.

VALUES = [(2, 4, 8), (1.0, 1.5, 2.0), (0.3, 0.6, 0.9, 1.2, 1.5), (0.2, 2.1, 3.2), (1, 4, 16, 32)]
FULL = np.array(list(itertools.product(*VALUES)), dtype=np.float64)
INDEX = {tuple(setting): row for row, setting in enumerate(FULL.tolist())}


class Measurer:
    """A function that measures at most `limit` rows and records them."""

    def __init__(self, limit: int = 1000) -> None:
        self.limit = limit
        self.rows: list[int] = []
        self.last = -1

    def __call__(self, row: int) -> bool:
        self.last = row
        if row not in self.rows:
            if len(self.rows) == self.limit:
                return False
            self.rows.append(row)
        return True


class Additive:
    """Each step of a knob adds power and reduces time; batch sizes above `largest` are late."""

    def __init__(self, grid: Grid, gains: tuple[float, ...], budget: float, largest: float) -> None:
        self.values, self.gains, self.budget, self.largest = grid.values, gains, budget, largest

    def steps(self, row: int) -> list[int]:
        return [self.values[knob].index(FULL[row, knob]) for knob in KNOBS]

    def keeps_budget(self, row: int) -> bool:
        return sum(self.steps(row)) <= self.budget

    def keeps_latency(self, row: int) -> bool:
        return bool(FULL[row, BATCH] <= self.largest)

    def slope(self, low: int, high: int) -> float:
        pairs = zip(self.gains, self.steps(high), self.steps(low), strict=True)
        return sum(gain * (more - less) for gain, more, less in pairs)


@examples(100)
@given(*(st.integers(0, len(values) - 1) for values in VALUES))
def test_halving_ends_at_the_wanted_value_of_each_dimension(a: int, b: int, c: int, d: int, e: int) -> None:
    wanted, measure = (a, b, c, d, e), Measurer()

    def upper(dimension: int, row: int) -> bool:
        return bool(FULL[row, dimension] <= VALUES[dimension][wanted[dimension]])

    Grid(FULL, measure).halve(upper)
    assert FULL[measure.last].tolist() == [column[at] for column, at in zip(VALUES, wanted, strict=True)]
    assert len(measure.rows) <= 1 + sum(int(np.ceil(np.log2(len(values)))) for values in VALUES)


def test_halving_asks_for_the_batch_first_and_then_takes_turns() -> None:
    asked = []

    def upper(dimension: int, row: int) -> bool:
        asked.append(dimension)
        return False

    Grid(FULL, Measurer()).halve(upper)
    assert asked[:6] == [BATCH, 0, 1, 2, 3, BATCH]


@pytest.mark.parametrize("search", ["halve", "climb"])
@pytest.mark.parametrize("limit", [0, 1, 3, 6])
def test_a_search_stops_at_the_limit(search: str, limit: int) -> None:
    measure = Measurer(limit)
    grid = Grid(FULL, measure)
    if search == "halve":
        grid.halve(lambda dimension, row: True)
    else:
        grid.climb(Additive(grid, (1, 2, 3, 4), 100, 16))
    assert len(measure.rows) == limit


def test_a_search_over_nothing_measures_nothing() -> None:
    grid = Grid(np.empty((0, 5)), pytest.fail)
    grid.halve(pytest.fail)
    grid.climb(Additive(grid, (1, 1, 1, 1), 1, 1))


def test_a_missing_combination_is_replaced_by_the_nearest() -> None:
    thin = FULL[FULL[:, 2] != 0.9]
    thin = np.vstack([thin, [[2, 1.0, 0.9, 0.2, 1]]])
    measure = Measurer()
    row = Grid(thin, measure).measured_at([0, 0, 2, 0, 3])
    assert row is not None and measure.rows == [row]
    distances = [sum(abs(np.log(a / b)) for a, b in zip(each, (2, 1, 0.9, 0.2, 32), strict=True)) for each in thin]
    assert distances[row] == min(distances) > 0


@examples(100)
@given(st.permutations([1.0, 2.0, 3.0, 4.0]), st.integers(0, 12), st.sampled_from([1, 4, 16, 32]))
def test_climbing_follows_the_steepest_knob_first(gains: list[float], budget: int, largest: int) -> None:
    """One step of any knob adds one step of power, so a loop over the knobs gives the end of the climb."""
    at = [len(column) // 2 for column in VALUES[:4]]
    # The budget must be reachable by lowering the steepest knob alone.
    assume(sum(at) - at[gains.index(4.0)] + 1 <= budget)
    measure = Measurer()
    grid = Grid(FULL, measure)
    grid.climb(Additive(grid, tuple(gains), budget, largest))
    for knob in sorted(KNOBS, key=lambda knob: -gains[knob]):
        others = sum(at) - at[knob]
        fits = [index for index in range(len(VALUES[knob])) if others + index <= budget]
        at[knob] = max(fits, default=0)
    expected = INDEX[(*(column[index] for column, index in zip(VALUES[:4], at, strict=True)), float(largest))]
    assert expected in measure.rows
    batches = [FULL[row, BATCH] for row in measure.rows]
    assert batches == sorted(batches, reverse=True), "from the largest batch down to the one that keeps the latency"
    assert min(batches) == largest


def test_the_slopes_are_measured_by_the_next_lower_value_of_each_knob() -> None:
    measure = Measurer(5)
    grid = Grid(FULL, measure)
    grid.climb(Additive(grid, (1, 2, 3, 4), 100, 32))
    middle = FULL[measure.rows[0]].tolist()
    assert middle == [4, 1.5, 0.9, 2.1, 32]
    lower = {0: 2, 1: 1.0, 2: 0.6, 3: 0.2}
    for knob, row in zip(KNOBS, measure.rows[1:], strict=True):
        assert FULL[row].tolist() == [lower[each] if each == knob else value for each, value in enumerate(middle)]
