"""Properties of all choice methods, and the behaviour of each one."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from wattfleet.errors import InvalidInputError
from wattfleet.modes import (
    BOARDS,
    Measurement,
    ModeArray,
    PowerMode,
    Profile,
    WorkloadFacts,
    array_to_modes,
    board_with_modes,
    nearest_mode,
)
from wattfleet.prediction import Prediction, Predictor, RooflinePredictor
from wattfleet.prediction.roofline import power_mw, settings_of, step_time_ms
from wattfleet_evaluation.choice_methods import (
    NAMES,
    BinarySearch,
    BruteForce,
    MeasurementSession,
    Presets,
    RandomThenPredict,
    choice_method_named,
)

BOARD = BOARDS["orin-nano"]


def corpus() -> Profile:
    """Measurements of an Orin Nano that follow the prior physics with a little noise."""
    from wattfleet.prediction.roofline import PowerParameters, TimeParameters
    from wattfleet.prediction.roofline.priors import general_power_prior, general_time_prior

    modes = BOARD.space.array()[::2]
    time = TimeParameters.from_log(general_time_prior(100.0, WorkloadFacts()).mean)
    rng = np.random.default_rng(0)
    noise = np.exp(rng.normal(0, 0.01, (2, len(modes))))
    settings = settings_of(modes, None)
    power = power_mw(PowerParameters.from_log(general_power_prior().mean), time, settings)
    return Profile(modes, step_time_ms(time, settings) * noise[0], power * noise[1])


CORPUS = corpus()
TABLE = {measurement.mode: measurement for measurement in CORPUS.measurements()}
BUDGETS_W = np.linspace(CORPUS.power_mw.min() / 1e3 + 0.5, CORPUS.power_mw.max() / 1e3, 8).tolist()
# All methods except the other kinds of predictors, which are used in the same way as `roofline`.
REFERENCE = RooflinePredictor.fit(CORPUS.rows(np.arange(0, len(CORPUS), 7)))
ALL = {
    name: choice_method_named(name, lambda predictor: lambda profile: RooflinePredictor.fit(profile, REFERENCE), BOARD)
    for name in NAMES
    if name not in ("powertrain", "scratch", "linear", "tree", "forest", "boosting")
}
MEASURED_ONLY = ("random", "binary-search", "brute-force")


class Recorder:
    """Measures from the corpus and records the requested modes."""

    def __init__(self) -> None:
        self.requested: list[PowerMode] = []

    def __call__(self, mode: PowerMode) -> Measurement:
        self.requested.append(mode)
        return TABLE[mode]


def limit_of(name: str) -> int:
    return len(CORPUS) if name == "brute-force" else 12


@pytest.mark.parametrize("name", ALL)
def test_methods_measure_each_mode_once_within_the_limit_and_choose_known_modes(name: str) -> None:
    recorder = Recorder()
    choose = ALL[name].profile(MeasurementSession(CORPUS.modes, recorder, limit_of(name)), BUDGETS_W, 0)
    assert len(recorder.requested) == len(set(recorder.requested)) <= limit_of(name)
    for budget in BUDGETS_W:
        assert choose(budget) is None or choose(budget) in TABLE


@pytest.mark.parametrize("name", ALL)
def test_every_method_is_deterministic(name: str) -> None:
    def run() -> tuple[list[PowerMode], list[PowerMode | None]]:
        recorder = Recorder()
        choose = ALL[name].profile(MeasurementSession(CORPUS.modes, recorder, limit_of(name)), BUDGETS_W, 5)
        return recorder.requested, [choose(budget) for budget in BUDGETS_W]

    assert run() == run()


@pytest.mark.parametrize("name", MEASURED_ONLY)
def test_methods_that_choose_measured_modes_keep_every_budget(name: str) -> None:
    choose = ALL[name].profile(MeasurementSession(CORPUS.modes, TABLE.__getitem__, limit_of(name)), BUDGETS_W, 1)
    for budget in [*BUDGETS_W, 1.0]:
        mode = choose(budget)
        assert mode is None or TABLE[mode].power_mw <= budget * 1e3


def test_no_method_beats_brute_force_within_a_budget() -> None:
    chosen = {
        name: ALL[name].profile(MeasurementSession(CORPUS.modes, TABLE.__getitem__, limit_of(name)), BUDGETS_W, 0)
        for name in ALL
    }
    for budget in BUDGETS_W:
        best = chosen["brute-force"](budget)
        within = CORPUS.power_mw <= budget * 1e3
        assert best is not None
        assert TABLE[best].minibatch_ms == CORPUS.minibatch_ms[within].min()
        for choose in chosen.values():
            mode = choose(budget)
            if mode is not None and TABLE[mode].power_mw <= budget * 1e3:
                assert TABLE[mode].minibatch_ms >= TABLE[best].minibatch_ms


def test_brute_force_refuses_a_limit_below_the_number_of_modes() -> None:
    with pytest.raises(InvalidInputError, match="brute force measures all"):
        BruteForce().profile(MeasurementSession(CORPUS.modes, TABLE.__getitem__, 10), BUDGETS_W, 0)


def test_one_binary_search_takes_log2_of_the_modes_and_nears_the_budget() -> None:
    recorder = Recorder()
    budget = float(np.median(CORPUS.power_mw)) / 1e3
    choose = BinarySearch().profile(MeasurementSession(CORPUS.modes, recorder, len(CORPUS)), [budget], 0)
    assert len(recorder.requested) <= np.log2(len(CORPUS)) + 4
    mode = choose(budget)
    assert mode is not None
    assert 0.8 * budget <= TABLE[mode].power_mw / 1e3 <= budget


def test_presets_are_chosen_by_the_watts_in_their_names() -> None:
    choose = Presets(BOARD.presets).profile(MeasurementSession(CORPUS.modes, TABLE.__getitem__, 0), BUDGETS_W, 0)
    seven, fifteen = (nearest_mode(CORPUS.modes, BOARD.presets[name]) for name in ("7W", "15W"))
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
    session = MeasurementSession(CORPUS.modes, TABLE.__getitem__, 1)
    first, second = array_to_modes(CORPUS.modes[:2])
    assert session.measure(first) is session.measure(first)
    assert session.remaining == 0
    with pytest.raises(InvalidInputError, match="limit"):
        session.measure(second)
    with pytest.raises(InvalidInputError, match="not one of the modes"):
        session.measure(PowerMode(99, 1, 1, 1))


def test_a_predictor_chooses_the_least_predicted_time_as_published() -> None:
    class Predicted:
        """Times rise in steps of 0.1 %, and the fastest mode draws the most."""

        def predict(self, modes: ModeArray) -> Prediction:
            rank = np.arange(len(modes), dtype=np.float64)
            sd = np.full(len(modes), 0.1)
            return Prediction(100 * 1.001**rank, 20_000 - 1000 * rank, sd, sd)

    session = MeasurementSession(CORPUS.modes[:5], TABLE.__getitem__, 5)
    method = RandomThenPredict("known", lambda profile: cast(Predictor, Predicted()))
    choose = method.profile(session, [18.5], seed=0)
    assert choose(25.0) == array_to_modes(CORPUS.modes)[0]
    assert choose(18.5) == array_to_modes(CORPUS.modes)[2]
    assert choose(15.9) is None


def test_without_measurements_every_choice_keeps_its_budget_with_95_pct_probability() -> None:
    predicted = RooflinePredictor.fit(Profile.of(()), REFERENCE).predict(CORPUS.modes)
    safe_w = dict(zip(array_to_modes(CORPUS.modes), predicted.power_mw_quantile(0.95) / 1e3, strict=True))
    session = MeasurementSession(CORPUS.modes, TABLE.__getitem__, 0)
    choose = ALL["wattfleet"].profile(session, BUDGETS_W, 0)
    for budget_w in BUDGETS_W:
        chosen = choose(budget_w)
        assert (chosen is None) == (min(safe_w.values()) > budget_w)
        assert chosen is None or safe_w[chosen] <= budget_w
    assert choose(max(safe_w.values())) is not None
