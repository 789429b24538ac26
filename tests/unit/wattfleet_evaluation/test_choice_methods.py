"""What holds for every strategy, and what each does."""

from __future__ import annotations

import numpy as np
import pytest

from wattfleet.errors import InvalidInputError
from wattfleet.modes import BOARDS, Measurement, PowerMode, Profile, array_to_modes, board_with_modes
from wattfleet.prediction import RooflinePredictor
from wattfleet.prediction.roofline import power_mw, step_time_ms
from wattfleet_evaluation.choice_methods.bench import Bench
from wattfleet_evaluation.choice_methods.binary_search import BinarySearch
from wattfleet_evaluation.choice_methods.brute_force import BruteForce
from wattfleet_evaluation.choice_methods.presets import Presets, nearest_mode
from wattfleet_evaluation.choice_methods.registry import NAMES, strategy_named

BOARD = BOARDS["orin-nano"]


def corpus() -> Profile:
    """The Orin Nano as the usual physics has it, with a little noise."""
    from wattfleet.prediction.roofline import PowerParameters, TimeParameters
    from wattfleet.prediction.roofline.priors import general_power_prior, general_time_prior

    modes = BOARD.space.array()[::2]
    time = TimeParameters.from_log(general_time_prior(100.0).mean)
    rng = np.random.default_rng(0)
    noise = np.exp(rng.normal(0, 0.01, (2, len(modes))))
    power = power_mw(PowerParameters.from_log(general_power_prior().mean), time, modes)
    return Profile(modes, step_time_ms(time, modes) * noise[0], power * noise[1])


CORPUS = corpus()
TABLE = {measurement.mode: measurement for measurement in CORPUS.measurements()}
BUDGETS_W = np.linspace(CORPUS.power_mw.min() / 1e3 + 0.5, CORPUS.power_mw.max() / 1e3, 8).tolist()
# All but the networks, which take long to fit and are used as `roofline` is.
REFERENCE = RooflinePredictor.fit(CORPUS.rows(np.arange(0, len(CORPUS), 7)))
ALL = {
    name: strategy_named(name, lambda predictor: lambda profile: RooflinePredictor.fit(profile, REFERENCE), BOARD)
    for name in NAMES
    if name not in ("powertrain", "scratch")
}
MEASURED_ONLY = ("random", "binary-search", "brute-force")


class Recorder:
    """Measures from the corpus and remembers what was asked."""

    def __init__(self) -> None:
        self.asked: list[PowerMode] = []

    def __call__(self, mode: PowerMode) -> Measurement:
        self.asked.append(mode)
        return TABLE[mode]


def limit_of(name: str) -> int:
    return len(CORPUS) if name == "brute-force" else 12


@pytest.mark.parametrize("name", ALL)
def test_no_strategy_measures_a_mode_twice_or_more_than_allowed_and_all_choose_modes_of_the_corpus(name: str) -> None:
    recorder = Recorder()
    choose = ALL[name].profile(Bench(CORPUS.modes, recorder, limit_of(name)), BUDGETS_W, 0)
    assert len(recorder.asked) == len(set(recorder.asked)) <= limit_of(name)
    for budget in BUDGETS_W:
        assert choose(budget) is None or choose(budget) in TABLE


@pytest.mark.parametrize("name", ALL)
def test_every_strategy_is_deterministic(name: str) -> None:
    def run() -> tuple[list[PowerMode], list[PowerMode | None]]:
        recorder = Recorder()
        choose = ALL[name].profile(Bench(CORPUS.modes, recorder, limit_of(name)), BUDGETS_W, 5)
        return recorder.asked, [choose(budget) for budget in BUDGETS_W]

    assert run() == run()


@pytest.mark.parametrize("name", MEASURED_ONLY)
def test_strategies_that_choose_among_measured_modes_keep_every_budget(name: str) -> None:
    choose = ALL[name].profile(Bench(CORPUS.modes, TABLE.__getitem__, limit_of(name)), BUDGETS_W, 1)
    for budget in [*BUDGETS_W, 1.0]:
        mode = choose(budget)
        assert mode is None or TABLE[mode].power_mw <= budget * 1e3


def test_brute_force_is_the_best_within_every_budget_and_no_strategy_within_it_beats_it() -> None:
    chosen = {
        name: ALL[name].profile(Bench(CORPUS.modes, TABLE.__getitem__, limit_of(name)), BUDGETS_W, 0) for name in ALL
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


def test_brute_force_refuses_a_limit_it_cannot_keep() -> None:
    with pytest.raises(InvalidInputError, match="brute force measures all"):
        BruteForce().profile(Bench(CORPUS.modes, TABLE.__getitem__, 10), BUDGETS_W, 0)


def test_a_single_binary_search_takes_about_log2_of_the_space_and_comes_near_the_budget() -> None:
    recorder = Recorder()
    budget = float(np.median(CORPUS.power_mw)) / 1e3
    choose = BinarySearch().profile(Bench(CORPUS.modes, recorder, len(CORPUS)), [budget], 0)
    assert len(recorder.asked) <= np.log2(len(CORPUS)) + 4
    mode = choose(budget)
    assert mode is not None
    assert 0.8 * budget <= TABLE[mode].power_mw / 1e3 <= budget


def test_presets_go_by_the_watts_in_their_names() -> None:
    choose = Presets(BOARD.presets).profile(Bench(CORPUS.modes, TABLE.__getitem__, 0), BUDGETS_W, 0)
    seven, fifteen = (nearest_mode(CORPUS.modes, BOARD.presets[name]) for name in ("7W", "15W"))
    assert [choose(budget) for budget in (6.9, 7.0, 14.9, 15.0, 60.0)] == [None, seven, seven, fifteen, fifteen]


@pytest.mark.parametrize("kind", BOARDS)
def test_presets_lie_within_their_board_and_what_is_in_the_table_is_unchanged(kind: str) -> None:
    board = BOARDS[kind]
    modes = board.space.array()
    for preset in board.presets.values():
        assert all(
            low <= knob <= high for knob, low, high in zip(preset, board.space.lowest, board.space.highest, strict=True)
        )
        assert nearest_mode(modes, preset).cores == preset.cores
        if preset in board.space:
            assert nearest_mode(modes, preset) == preset


def test_the_board_of_modes_is_the_smallest_that_offers_them() -> None:
    assert board_with_modes(CORPUS.modes) is BOARD
    assert board_with_modes(BOARDS["agx-orin"].space.array()[-50:]) is BOARDS["agx-orin"]
    assert board_with_modes(CORPUS.modes * 3) is None


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidInputError, match="wattfleet, maxn, random"):
        strategy_named("best", lambda predictor: RooflinePredictor.fit, BOARD)
    with pytest.raises(InvalidInputError, match="no board"):
        strategy_named("presets", lambda predictor: RooflinePredictor.fit, None)


def test_a_bench_keeps_its_limit_and_its_modes() -> None:
    bench = Bench(CORPUS.modes, TABLE.__getitem__, 1)
    first, second = array_to_modes(CORPUS.modes[:2])
    assert bench.measure(first) is bench.measure(first)
    assert bench.left == 0
    with pytest.raises(InvalidInputError, match="limit"):
        bench.measure(second)
    with pytest.raises(InvalidInputError, match="none of the modes"):
        bench.measure(PowerMode(99, 1, 1, 1))
