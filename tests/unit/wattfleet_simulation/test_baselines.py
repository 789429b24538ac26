"""What rounds would have cost with other methods, compared with sums by hand of the boards' true values."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from edge_agent.devices.mode_names import presets_of
from edge_agent.devices.selection import open_virtual_board
from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.devices.virtual.virtual_board import VirtualBoard, step_times_s
from wattfleet.modes import PowerMode, Workload, WorkloadFacts, array_to_modes
from wattfleet.prediction import warmup_s
from wattfleet_simulation.baselines import (
    MAXN,
    PLAIN_FLOWER,
    PRESETS,
    TrueBoard,
    compared,
    random_draw,
    summary,
    true_boards,
)
from wattfleet_simulation.devices import DEFAULT_FLEET, device_specs
from wattfleet_simulation.digits_app.task import Minibatches, device_data
from wattfleet_simulation.settings import SimulatedApp

EPOCHS, MINIBATCHES, IDLE_W = 2.0, 40, 6.0


@pytest.fixture(scope="module")
def boards() -> dict[str, TrueBoard]:
    kinds = {"orin": "agx-orin", "nano": "orin-nano", "nx": "orin-nx"}
    return {
        name: TrueBoard(open_virtual_board(f"simulated:{kind}", 3), Workload("any"), MINIBATCHES, IDLE_W)
        for name, kind in kinds.items()
    }


def mean_ms(board: VirtualBoard, mode: tuple[int, ...], workload: Workload) -> float:
    """The mean of a minibatch's skewed time: its times at all quantiles of the jitter, weighted by their density."""
    assert isinstance(board, SimulatedDevice)
    deviations = np.linspace(-8, 8, 16_001)
    density = np.exp(-(deviations**2) / 2)
    times_s = step_times_s(board.load(PowerMode(*map(int, mode)), workload), deviations)
    return 1e3 * float((times_s * density).sum() / density.sum())


def cost(board: TrueBoard, mode: tuple[int, ...], minibatches: float = EPOCHS * MINIBATCHES) -> tuple[float, float]:
    """Seconds and watts of a training in one mode."""
    modes = np.array([mode])
    milliwatts = board.board.truth(modes, board.workload)[1]
    step_ms = mean_ms(board.board, mode, board.workload)
    start_s = float(warmup_s(modes, np.array([step_ms]), board.board.mean_first_gcycles)[0])
    return start_s + minibatches * step_ms / 1e3, float(milliwatts[0]) / 1e3


def test_maxn_is_the_highest_clocks_of_the_same_devices(boards: dict[str, TrueBoard]) -> None:
    found = compared(boards, ["nano", "orin"], EPOCHS, 1.0, 0)[MAXN]
    parts = [cost(boards[name], tuple(boards[name].board.modes.max(axis=0))) for name in ("nano", "orin")]
    assert found == pytest.approx(
        {
            "duration_s": max(seconds for seconds, _ in parts),
            "site_w": IDLE_W + sum(watts for _, watts in parts),
            "training_j": sum(seconds * watts for seconds, watts in parts),
            "over_budget_share": 1.0,
        }
    )


def test_plain_flower_is_the_mean_of_all_draws_in_maxn(boards: dict[str, TrueBoard]) -> None:
    alone = [compared(boards, [name], EPOCHS, 1e3, 0)[MAXN] for name in boards]
    found = compared(boards, ["orin"], EPOCHS, 1e3, 0)[PLAIN_FLOWER]
    assert found is not None
    assert found["duration_s"] == pytest.approx(np.mean([each["duration_s"] for each in alone if each is not None]))


def test_plain_flower_draws_as_many_devices_and_the_others_idle(boards: dict[str, TrueBoard]) -> None:
    in_maxn = {name: cost(each, tuple(each.board.modes.max(axis=0))) for name, each in boards.items()}
    draws = [[in_maxn[name] for name in pair] for pair in itertools.combinations(boards, 2)]
    site_w = [IDLE_W + sum(watts for _, watts in draw) for draw in draws]
    budget_w = sorted(site_w)[1]  # one of the three draws exceeds this
    assert compared(boards, ["orin", "nx"], EPOCHS, budget_w, 0)[PLAIN_FLOWER] == pytest.approx(
        {
            "duration_s": np.mean([max(seconds for seconds, _ in draw) for draw in draws]),
            "site_w": np.mean(site_w),
            "training_j": np.mean([sum(seconds * watts for seconds, watts in draw) for draw in draws]),
            "over_budget_share": 1 / 3,
        }
    )


def test_presets_are_the_fastest_combination_within_the_budget(boards: dict[str, TrueBoard]) -> None:
    chosen, budget_w = ["nano", "nx"], 45.0
    costs = []
    for name in chosen:
        board = boards[name].board
        offered = set(array_to_modes(board.modes))
        costs.append([cost(boards[name], mode) for mode in presets_of(board).values() if mode in offered])
    within = [
        (max(seconds for seconds, _ in combination), site_w, sum(seconds * watts for seconds, watts in combination))
        for combination in itertools.product(*costs)
        if (site_w := IDLE_W + sum(watts for _, watts in combination)) <= budget_w
    ]
    found = compared(boards, chosen, EPOCHS, budget_w, 0)[PRESETS]
    assert found is not None and within
    assert found["duration_s"] == pytest.approx(min(within)[0]) and found["over_budget_share"] == 0
    assert any((found["duration_s"], found["site_w"], found["training_j"]) == pytest.approx(each) for each in within)
    assert compared(boards, chosen, EPOCHS, 10.0, 0)[PRESETS] is None, "no combination keeps 10 W"


APP, SEED = SimulatedApp("perceptron", 32), 3
STATED = Workload("any", WorkloadFacts(parameters=9_610))


@pytest.fixture(scope="module")
def truth() -> dict[str, TrueBoard]:
    """The demo's boards with an app, none of which has trained."""
    opened = {
        device_id: open_virtual_board(spec, 1000 * SEED + k)
        for k, (device_id, spec) in enumerate(device_specs(DEFAULT_FLEET, []))
    }
    return true_boards(APP, STATED, SEED, opened, dict.fromkeys(opened, IDLE_W))


def counted(app: SimulatedApp, partition: int, devices: int) -> int:
    """The minibatches of an epoch that a device trains, one by one."""
    return sum(1 for _ in Minibatches(device_data(partition, devices, SEED), app.batch_size, 0))


def test_boards_that_never_trained_count_with_their_own_epochs_and_minibatches(truth: dict[str, TrueBoard]) -> None:
    lengths = [counted(APP, partition, len(truth)) for partition in range(len(truth))]
    assert [board.minibatches_per_epoch for board in truth.values()] == lengths
    assert len(set(lengths)) == len(lengths), "every device has its own"
    for board, length in zip(truth.values(), lengths, strict=True):
        # What the board itself needs for its first epoch of minibatches of 32, up to its noise.
        fresh = board.board.restarted(7)
        fresh.apply(PowerMode(*map(int, board.highest.modes[0])))
        fresh.pace(Workload("any", WorkloadFacts(parameters=9_610, batch=32)))
        fresh.run(1)
        begin_s = fresh.clock.now_s()
        fresh.run(length)
        assert fresh.clock.now_s() - begin_s == pytest.approx(board.highest.epoch_s[0], rel=0.02)


def test_plain_flower_is_compared_with_the_true_lengths_of_all_boards(truth: dict[str, TrueBoard]) -> None:
    chosen = ["agx-orin-0", "agx-orin-1"]
    found = compared(truth, chosen, EPOCHS, 1e3, 0)[PLAIN_FLOWER]
    in_maxn = [
        cost(board, tuple(board.board.modes.max(axis=0)), EPOCHS * counted(APP, partition, len(truth)))
        for partition, board in enumerate(truth.values())
    ]
    draws = list(itertools.combinations(in_maxn, len(chosen)))
    assert found is not None
    assert found["duration_s"] == pytest.approx(np.mean([max(seconds for seconds, _ in draw) for draw in draws]))
    joules = [sum(seconds * watts for seconds, watts in draw) for draw in draws]
    assert found["training_j"] == pytest.approx(np.mean(joules))


def test_a_random_draw_gets_the_same_modes_and_true_lengths_as_the_selection(truth: dict[str, TrueBoard]) -> None:
    def fastest_s(devices: Sequence[str], budget_w: float) -> float:
        """The shortest round of two devices, by trying all pairs of modes that are Pareto-optimal."""
        one, other = (truth[each].best for each in devices)
        site_w = one.power_w[:, None] + other.power_w + IDLE_W * (len(truth) - len(devices))
        own_s, other_s = (front.warmup_s + EPOCHS * front.epoch_s for front in (one, other))
        return float(np.maximum(own_s[:, None], other_s)[site_w <= budget_w].min())

    chosen, budget_w = ("agx-orin-0", "orin-nx-0"), 60.0
    found = random_draw(truth, chosen, EPOCHS, budget_w, 0)
    durations_s = [fastest_s(pair, budget_w) for pair in itertools.combinations(truth, 2)]
    assert (found["draws"], found["over_budget"]) == (15, 0)
    assert found["selected_duration_s"] == pytest.approx(fastest_s(chosen, budget_w))
    assert found["mean_duration_s"] == pytest.approx(np.mean(durations_s))
    assert found["worst_duration_s"] == pytest.approx(max(durations_s))


def test_draws_from_many_devices_are_uniform(boards: dict[str, TrueBoard]) -> None:
    many = {f"nano-{number:02}": boards["nano"] for number in range(24)}
    many["orin"] = boards["orin"]
    # One board differs, and is in half of all sets of 12 or 13; the first sets in order would never have it.
    costs = [compared(many, chosen, EPOCHS, 1e3, 0)[MAXN] for chosen in (list(many)[:12], [*list(many)[:11], "orin"])]
    without, with_it = (each["training_j"] for each in costs if each is not None)
    drawn = compared(many, list(many)[:12], EPOCHS, 1e3, 0)[PLAIN_FLOWER]
    assert drawn is not None
    share = (drawn["training_j"] - without) / (with_it - without)
    assert 0.36 < share < 0.6


def test_the_summary_is_about_observed_rounds_alone() -> None:
    way = {"duration_s": 10.0, "site_w": 50.0, "training_j": 400.0, "over_budget_share": 1.0}
    seen = {
        "training_j": 300.0,
        "observed_duration_s": 12.0,
        "observed_site_w": 30.0,
        "site_budget_held": True,
        "baselines": {PLAIN_FLOWER: way, MAXN: way, PRESETS: None},
    }
    slow = {name: {**way, "duration_s": 99.0} for name in (PLAIN_FLOWER, MAXN, PRESETS)}
    unseen = [{**seen, figure: None, "baselines": slow} for figure in ("training_j", "observed_duration_s")]
    own, plain, maxn, presets = summary([seen, *unseen])
    assert (own["rounds"], own["duration_s"], own["training_j"], own["over_budget_share"]) == (1, 12.0, 300.0, 0.0)
    assert plain["duration_s"] == maxn["duration_s"] == 10.0
    assert (presets["rounds"], presets["duration_s"]) == (0, None)


def test_the_summary_is_the_mean_of_the_rounds() -> None:
    rounds = [
        {
            "training_j": joules,
            "observed_duration_s": seconds,
            "observed_site_w": watts,
            "site_budget_held": held,
            "baselines": {
                PLAIN_FLOWER: {
                    "duration_s": 2 * seconds,
                    "site_w": 50.0,
                    "training_j": 400.0,
                    "over_budget_share": share,
                },
                MAXN: {"duration_s": 8.0, "site_w": 2 * watts, "training_j": joules / 2, "over_budget_share": 1.0},
                PRESETS: None
                if held
                else {"duration_s": 7.0, "site_w": 9.0, "training_j": 5.0, "over_budget_share": 0.0},
            },
        }
        for joules, seconds, watts, held, share in ((100.0, 4.0, 20.0, True, 0.5), (300.0, 8.0, 40.0, False, 0.25))
    ]
    columns = ("duration_s", "site_w", "training_j", "over_budget_share", "rounds")
    assert [tuple(row[name] for name in columns) for row in summary(rounds)] == [
        (6.0, 30.0, 200.0, 0.5, 2),
        (12.0, 50.0, 400.0, 0.375, 2),
        (8.0, 60.0, 100.0, 1.0, 2),
        (7.0, 9.0, 5.0, 0.0, 1),
    ]
