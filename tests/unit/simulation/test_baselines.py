"""A simulated fleet's baselines and its rounds in virtual time, compared with sums by hand."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from edge_agent.devices.selection import open_virtual_board
from edge_agent.devices.sysfs import presets_of
from edge_agent.devices.virtual.simulated import DatedWork, SimulatedDevice
from edge_agent.devices.virtual.virtual_board import VirtualBoard, WorkSpan, step_times_s
from edge_agent.runtime.readiness import parked_mode
from wattfleet.core.errors import InfeasibleBudgetError
from wattfleet.core.modes import PowerMode, Workload, WorkloadFacts, array_to_modes
from wattfleet.core.prediction import warmup_s
from wattfleet.simulation.baselines import (
    BestPresets,
    PlainFlower,
    TrainedBoards,
    TrueBoard,
    described_stretches,
    random_draw,
    true_boards,
)
from wattfleet.simulation.comparison import compared
from wattfleet.simulation.devices import DEFAULT_FLEET, device_specs
from wattfleet.simulation.digits_app.task import Minibatches, device_data
from wattfleet.simulation.settings import SimulatedApp
from wattfleet.simulation.virtual_time import TRAINING, Draw, Stretch, site_watts, stretches

# --- Baselines --------------------------------------------------------------------------------------------------------
# The baselines and random draws, compared with sums by hand of the boards' true values.


APP, SEED, EPOCHS = SimulatedApp("perceptron", 32), 3, 2.0
STATED = Workload("any", WorkloadFacts(parameters=9_610))
PACED = Workload("any", WorkloadFacts(parameters=9_610, batch=32))


@pytest.fixture(scope="module")
def truth() -> dict[str, TrueBoard]:
    """The demo's boards with an app, none of which has trained."""
    opened = {
        device_id: open_virtual_board(spec, 1000 * SEED + k)
        for k, (device_id, spec) in enumerate(device_specs(DEFAULT_FLEET, []))
    }
    return true_boards(APP, STATED, SEED, opened)


def mean_ms(board: VirtualBoard, mode: PowerMode) -> float:
    """The mean of a minibatch's skewed time: its times at all quantiles of the jitter, weighted by their density."""
    assert isinstance(board, SimulatedDevice)
    deviations = np.linspace(-6, 6, 2_001)
    density = np.exp(-(deviations**2) / 2)
    times_s = step_times_s(board.load(mode, PACED), deviations)
    return 1e3 * float((times_s * density).sum() / density.sum())


def counted(partition: int, devices: int) -> int:
    """The minibatches of an epoch that a device trains, one by one."""
    return sum(1 for _ in Minibatches(device_data(partition, devices, SEED), APP.batch_size, 0))


def cost(board: VirtualBoard, mode: PowerMode, minibatches: float) -> tuple[float, float]:
    """Seconds and watts of a training."""
    modes, step_ms = np.array([mode], dtype=float), mean_ms(board, mode)
    start_s = float(warmup_s(modes, np.array([step_ms]), board.mean_first_gcycles)[0])
    return start_s + minibatches * step_ms / 1e3, float(board.truth(modes, PACED)[1][0]) / 1e3


def highest(board: VirtualBoard) -> PowerMode:
    return PowerMode(*map(int, board.modes.max(axis=0)))


def parked_w(board: VirtualBoard) -> float:
    assert isinstance(board, SimulatedDevice)
    return board.load(parked_mode(board)).idle_mw / 1e3


def test_boards_that_never_trained_count_with_their_own_epochs_and_minibatches(truth: dict[str, TrueBoard]) -> None:
    lengths = [counted(partition, len(truth)) for partition in range(len(truth))]
    assert [board.minibatches_per_epoch for board in truth.values()] == lengths
    assert len(set(lengths)) == len(lengths), "every device has its own"
    for board, length in zip(truth.values(), lengths, strict=True):
        seconds, watts = cost(board.board, highest(board.board), EPOCHS * length)
        own = board.highest
        assert own.warmup_s[0] + EPOCHS * own.epoch_s[0] == pytest.approx(seconds)
        assert own.power_w[0] == pytest.approx(watts)
        assert board.idle_w == pytest.approx(parked_w(board.board))


def test_boards_train_as_long_and_draw_as_much_as_their_true_values_say(truth: dict[str, TrueBoard]) -> None:
    modes = {device_id: highest(truth[device_id].board) for device_id in ("agx-orin-1", "orin-nano-0")}
    fleet = TrainedBoards(truth, noise=5)
    for _ in range(2):
        work = fleet.train(modes, EPOCHS)
        assert set(work) == set(modes)
        for device_id, spans in work.items():
            partition = list(truth).index(device_id)
            seconds, watts = cost(truth[device_id].board, modes[device_id], EPOCHS * counted(partition, len(truth)))
            assert sum(span.end_s - span.begin_s for span in spans) == pytest.approx(seconds, rel=0.05)
            assert sum(span.energy_j for span in spans) / seconds == pytest.approx(watts, rel=0.1)
            assert {span.mode for span in spans} == {modes[device_id]}
    assert truth["agx-orin-1"].board.clock.now_s() == 0.0, "the given boards are left as they are"


def test_plain_flower_draws_as_many_devices_as_fit_in_maxn(truth: dict[str, TrueBoard]) -> None:
    budget_w = 70.0
    idle_w = sum(parked_w(board.board) for board in truth.values())
    extra_w = {
        device_id: cost(board.board, highest(board.board), 1)[1] - parked_w(board.board)
        for device_id, board in truth.items()
    }
    drawn = [PlainFlower(truth, budget_w, SEED).modes(number) for number in range(1, 200)]
    for modes in drawn:
        assert modes == {device_id: highest(truth[device_id].board) for device_id in modes}
        left_w = budget_w - idle_w - sum(extra_w[device_id] for device_id in modes)
        assert left_w >= 0
        assert all(extra_w[device_id] > left_w for device_id in truth if device_id not in modes), "another one fits"
    assert {device_id for modes in drawn for device_id in modes} == set(truth)
    assert len({frozenset(modes) for modes in drawn}) > 4, "each round has a draw of its own"
    assert PlainFlower(truth, budget_w, SEED).modes(7) == drawn[6]
    with pytest.raises(InfeasibleBudgetError, match="no board fits into 50 W in MAXN"):
        PlainFlower(truth, 50.0, SEED).modes(1)


def test_presets_are_the_fastest_combination_of_the_drawn_devices_within_the_budget(
    truth: dict[str, TrueBoard],
) -> None:
    budget_w = 70.0
    idle_w = sum(parked_w(board.board) for board in truth.values())
    drawn = [BestPresets(truth, budget_w, SEED, EPOCHS, 3).modes(number) for number in range(1, 5)]
    for modes in drawn:
        choices = []
        for device_id in modes:
            board = truth[device_id].board
            length = EPOCHS * counted(list(truth).index(device_id), len(truth))
            offered = set(array_to_modes(board.modes))
            presets = [mode for mode in presets_of(board).values() if mode in offered]
            choices.append({mode: cost(board, mode, length) for mode in presets})
        parked = sum(parked_w(truth[device_id].board) for device_id in modes)
        within = {
            combination: max(choice[mode][0] for choice, mode in zip(choices, combination, strict=True))
            for combination in itertools.product(*choices)
            if idle_w - parked + sum(choice[mode][1] for choice, mode in zip(choices, combination, strict=True))
            <= budget_w
        }
        assert within[tuple(modes.values())] == pytest.approx(min(within.values()))
    assert [len(modes) for modes in drawn] == [3] * len(drawn)
    assert len({frozenset(modes) for modes in drawn}) > 1, "each round has a draw of its own"
    assert len(BestPresets(truth, budget_w, SEED, EPOCHS).modes(1)) == 3, "half of the devices"
    with pytest.raises(InfeasibleBudgetError):
        BestPresets(truth, 40.0, SEED, EPOCHS).modes(1)


def test_a_random_draw_gets_the_same_modes_and_true_lengths_as_the_selection(truth: dict[str, TrueBoard]) -> None:
    def fastest_s(devices: Sequence[str], budget_w: float) -> float:
        """The shortest round of two devices, by trying all pairs of modes that are Pareto-optimal."""
        one, other = (truth[each].best for each in devices)
        idle_w = sum(board.idle_w for device_id, board in truth.items() if device_id not in devices)
        site_w = one.power_w[:, None] + other.power_w + idle_w
        own_s, other_s = (front.warmup_s + EPOCHS * front.epoch_s for front in (one, other))
        return float(np.maximum(own_s[:, None], other_s)[site_w <= budget_w].min())

    chosen, budget_w = ("agx-orin-0", "orin-nx-0"), 65.0
    found = random_draw(truth, chosen, EPOCHS, budget_w, 0)
    durations_s = [fastest_s(pair, budget_w) for pair in itertools.combinations(truth, 2)]
    assert (found["draws"], found["over_budget"]) == (15, 0)
    assert found["selected_duration_s"] == pytest.approx(fastest_s(chosen, budget_w))
    assert found["mean_duration_s"] == pytest.approx(np.mean(durations_s))
    assert found["worst_duration_s"] == pytest.approx(max(durations_s))


def test_draws_from_many_devices_are_uniform(truth: dict[str, TrueBoard]) -> None:
    # One of 13 boards is slow. It is in 3 of 13 sets of three, and in few of the first sets in order.
    many = {f"agx-{number:02}": truth["agx-orin-0"] for number in range(12)} | {"nano": truth["orin-nano-0"]}
    ids = list(many)
    drawn, with_it = (random_draw(many, chosen, EPOCHS, 1e4, 0) for chosen in (ids[:3], ids[-3:]))
    fast_s, slow_s = drawn["selected_duration_s"], with_it["selected_duration_s"]
    assert drawn["draws"] == 200, "not all 286 sets"
    assert (drawn["mean_duration_s"] - fast_s) / (slow_s - fast_s) == pytest.approx(3 / 13, abs=0.05)


# --- Virtual time -----------------------------------------------------------------------------------------------------
# Rounds in the boards' own time, compared with sums by hand.

OWN, OTHER = PowerMode(4, 1, 1, 1), PowerMode(2, 1, 1, 1)
IDLE_W = {"a": 5.0, "b": 3.0, "idle": 2.0}


def span(begin_s: float, end_s: float, mode: PowerMode, watts: float) -> WorkSpan:
    return WorkSpan(begin_s, end_s, mode, watts * (end_s - begin_s))


FIRST = {
    # Its clock stands at 100 s. Between the spans it waited, in which no time passes for it.
    "a": [span(100, 104, OTHER, 15), span(104, 110, OWN, 25)],
    "b": [span(7, 11, OWN, 13)],
}
SECOND = {"b": [span(11, 31, OWN, 13)]}
PLANNED = {"a": [OWN], "b": [OWN]}


def test_a_round_ends_with_its_slowest_board_and_the_others_idle_until_then() -> None:
    first, second = stretches([(1, FIRST, PLANNED), (2, SECOND, PLANNED)], IDLE_W)
    assert (first.begin_s, first.end_s) == (0.0, 10.0)
    assert (second.begin_s, second.end_s) == (10.0, 30.0)
    a_j, b_j, idle_j = 4 * 15 + 6 * 25, 4 * 13 + 6 * 3, 10 * 2
    assert first.energy_j == pytest.approx(a_j + b_j + idle_j)
    assert second.energy_j == pytest.approx(20 * (5 + 13 + 2))


def test_boards_that_measure_beside_a_round_end_with_it() -> None:
    beside = {**FIRST, "idle": [span(0, 8, OTHER, 5), span(8, 500, OTHER, 5), span(500, 900, OTHER, 5)]}
    first, second = stretches([(1, beside, PLANNED), (2, SECOND, PLANNED)], IDLE_W)
    assert (first.end_s, second.end_s) == (10.0, 30.0)
    assert [(draw.begin_s, draw.end_s) for draw in first.draws[-2:]] == [(0.0, 8.0), (8.0, 10.0)]
    a_j, b_j, beside_j = 4 * 15 + 6 * 25, 4 * 13 + 6 * 3, 10 * 5
    assert first.energy_j == pytest.approx(a_j + b_j + beside_j)
    [survey] = stretches([(0, {"idle": beside["idle"]}, {})], IDLE_W)
    assert survey.end_s == 900.0, "nobody trains meanwhile"


def granted(begin_s: float, end_s: float, mode: PowerMode, watts: float, at_s: float, limit_w: float) -> DatedWork:
    return DatedWork(begin_s, end_s, mode, watts * (end_s - begin_s), at_s, limit_w)


def test_boards_measure_as_soon_as_their_granted_watts_fit() -> None:
    # Within 40 W, 30 W can be granted above the idle power. Here, all trainings are over within a second of real time:
    # "b" was granted what "a" no longer needed, and "idle" what "b" no longer needed.
    work = {
        "idle": [granted(0, 3, OTHER, 5, 1.0, 27.0), granted(3, 4, OTHER, 5, 1.1, 27.0)],
        "b": [granted(0, 2, OTHER, 9, 0.8, 23.0), granted(2, 5, OTHER, 9, 0.9, 23.0)],
        "a": [granted(100, 110, OWN, 25, 0.5, 26.0), granted(110, 118, OWN, 10, 0.7, 10.0)],
    }
    [one] = stretches([(1, work, {"a": [OWN]})], IDLE_W, 40.0)
    periods_s = [(draw.begin_s, draw.end_s) for draw in one.draws]
    assert periods_s == [(15.0, 18.0), (10.0, 12.0), (12.0, 15.0), (0.0, 10.0), (10.0, 18.0)]
    watts = site_watts([one], IDLE_W)
    site_w = [watts.idle_w + sum(both) for both in zip(*watts.extra_w.values(), strict=True)]
    assert max(site_w) == 10 + 20
    # What was granted beyond the budget is not hidden, nor is what a board draws beyond its grant.
    [alone] = stretches([(1, {"b": [granted(0, 5, OTHER, 90, 0.8, 99.0)]}, {})], IDLE_W, 40.0)
    assert (alone.begin_s, alone.end_s) == (0.0, 5.0)


def test_other_modes_than_the_planned_one_are_measured() -> None:
    first, nobody_planned = stretches([(1, FIRST, PLANNED), (2, SECOND, {})], IDLE_W)
    assert [(draw.begin_s, draw.end_s, draw.extra_w, draw.kind) for draw in first.draws] == [
        (0.0, 4.0, 10.0, "measuring"),
        (4.0, 10.0, 20.0, "training"),
        (0.0, 4.0, 10.0, "training"),
    ]
    assert {draw.kind for draw in nobody_planned.draws} == {"measuring"}


def test_the_sites_watts_change_where_a_board_begins_or_ends() -> None:
    watts = site_watts(stretches([(1, FIRST, PLANNED), (2, SECOND, PLANNED)], IDLE_W), IDLE_W)
    assert watts.idle_w == 10.0
    assert watts.at_s == [0.0, 4.0, 10.0, 30.0]
    assert watts.extra_w == {"training": [10.0, 20.0, 10.0, 0.0], "measuring": [10.0, 0.0, 0.0, 0.0]}


def test_a_short_peak_over_the_budget_is_reported_however_long_the_run() -> None:
    draws = [Draw(float(k), k + 1.0, 10.0, TRAINING) for k in range(10_000)]
    draws.append(Draw(5_000.25, 5_000.5, 90.0, TRAINING))
    way = described_stretches("long", [Stretch(1, 0.0, 1e4, 1.0, tuple(draws))], [["a"]], {1: 0.9}, 0.1, {"a": 5.0})
    (found,) = compared(way, [], 50.0)["ways"]
    assert (found["most_w"], found["over_budget_s"]) == (105.0, 0.25)
    assert len(found["watts"]["at_s"]) == len(found["watts"]["training"]) < 5_000, "the figure stays small"


def test_a_round_without_work_takes_no_time() -> None:
    (nothing,) = stretches([(1, {}, {})], IDLE_W)
    assert (nothing.begin_s, nothing.end_s, nothing.energy_j) == (0.0, 0.0, 0.0)
    assert site_watts([nothing], IDLE_W).extra_w == {"training": [0.0], "measuring": [0.0]}
