"""What rounds would have cost with other methods, compared with sums by hand of the boards' true values."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from edge_agent.devices.mode_names import presets_of
from edge_agent.devices.selection import open_virtual_board
from wattfleet.modes import Workload, array_to_modes
from wattfleet.prediction import warmup_s
from wattfleet_simulation.baselines import MAXN, PLAIN_FLOWER, PRESETS, TrueBoard, compared, summary

EPOCHS, MINIBATCHES, IDLE_W = 2.0, 40, 6.0


@pytest.fixture(scope="module")
def boards() -> dict[str, TrueBoard]:
    kinds = {"orin": "agx-orin", "nano": "orin-nano", "nx": "orin-nx"}
    return {
        name: TrueBoard(open_virtual_board(f"simulated:{kind}", 3), Workload("any"), MINIBATCHES, IDLE_W)
        for name, kind in kinds.items()
    }


def cost(board: TrueBoard, mode: tuple[int, ...]) -> tuple[float, float]:
    """Seconds and watts of a training in one mode."""
    modes = np.array([mode])
    milliseconds, milliwatts = board.board.truth(modes, board.workload)
    start_s = float(warmup_s(modes, milliseconds, board.board.mean_first_gcycles)[0])
    return start_s + EPOCHS * MINIBATCHES * float(milliseconds[0]) / 1e3, float(milliwatts[0]) / 1e3


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
