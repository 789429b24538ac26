"""The expected cost of profiling methods, against PowerTrain's published times and a simulated board."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

import reference_models
from edge_agent.devices.selection import open_virtual_board
from edge_agent.learning.profiling_plan import advised_profile, board_figures
from edge_agent.profiling.journal import Journal, JournalHeader
from edge_agent.profiling.mode_measurement import measuring_s
from edge_agent.profiling.profiler import Profiler
from wattfleet.choosing import ProfilingMethod, WorkloadChanges, compare_methods
from wattfleet.errors import InvalidInputError
from wattfleet.modes import BOARDS, ModeSpace, array_to_modes, modes_to_array

REFERENCE = reference_models.load("agx_orin_resnet18")
ORIN = BOARDS["agx-orin"].space
# Section 2.5: even core counts, every other CPU frequency except the two lowest, and all GPU and memory frequencies.
PUBLISHED = ModeSpace(ORIN.cores[1::2], ORIN.cpu_khz[2::2], ORIN.gpu_hz, ORIN.mem_hz)

# Table 1: hours of training, how often the workload changes, the solution, and the minutes to collect its data.
TABLE_1 = {
    "training once on a large dataset": (72, WorkloadChanges.NEVER, "brute force", (1200, 1800)),
    "fine-tuning": (3, WorkloadChanges.RARELY, "neural network, 100 modes", (20, 50)),
    "continuous learning": (1, WorkloadChanges.RARELY, "transfer", (10, 20)),
    "federated learning": (None, WorkloadChanges.OFTEN, "transfer", (10, 20)),
}


def test_brute_force_takes_the_published_hours() -> None:
    board = board_figures(REFERENCE, "agx-orin", PUBLISHED.array())
    assert len(board.modes) == 4368
    hours = board.mode_s.sum() / 3600
    # "over 14 h for ResNet" (section 3.3); table 1 states the range over all workloads.
    assert 14 < hours < TABLE_1["training once on a large dataset"][3][1] / 60


def test_fifty_random_modes_take_the_published_minutes() -> None:
    board = board_figures(REFERENCE, "agx-orin", PUBLISHED.array())
    minutes = 50 * board.mode_s.mean() / 60
    low, high = TABLE_1["continuous learning"][3]
    assert low < minutes < high


@pytest.mark.parametrize("scenario", ["continuous learning", "federated learning"])
@pytest.mark.parametrize("kind", ["agx-orin", "orin-nano"])
def test_table_1_transfers_where_training_is_short_or_changes_often(scenario: str, kind: str) -> None:
    hours, changes, solution, _ = TABLE_1[scenario]
    board = board_figures(REFERENCE, kind, BOARDS[kind].space.array())
    # Table 1 does not state the hours of federated learning, so several are tried.
    for training_h in (hours,) if hours else (0.5, 5, 50, 500):
        assert str(compare_methods(board, training_h, changes).recommended.method) == solution


def test_in_all_scenarios_longer_training_deserves_at_least_as_many_modes() -> None:
    board = board_figures(REFERENCE, "agx-orin", ORIN.array())
    known = sorted((hours, changes) for hours, changes, _, _ in TABLE_1.values() if hours)
    modes = [compare_methods(board, hours, changes).recommended.modes for hours, changes in known]
    assert modes == sorted(modes)


def test_the_estimate_is_near_what_a_simulated_board_takes(tmp_path: Path) -> None:
    board = open_virtual_board("simulated:orin-nano", seed=0)
    header = JournalHeader("a", board.board_kind, board.provenance, "resnet18", 16)
    modes = array_to_modes(board.modes[:: len(board.modes) // 20])
    with Journal.open(tmp_path / "profile.jsonl", header) as journal, nullcontext(board.step) as step:
        records = list(Profiler(board).profile(modes, step, journal))
    measured = modes_to_array(record.mode for record in records)
    expected = measuring_s(measured, np.array([record.minibatch_ms for record in records]))
    # Slow modes, whose times vary most, take up to 40 minibatches.
    assert expected.sum() == pytest.approx(sum(record.seconds for record in records), rel=0.3)


def test_times_are_scaled_to_the_stated_minibatch() -> None:
    board = board_figures(REFERENCE, "agx-orin", ORIN.array(), minibatch_ms=1000)
    highest = int(board.modes.sum(axis=1).argmax())
    assert board.predicted.minibatch_ms[highest] == pytest.approx(1000)
    # 7e9 cycles of warm-up at 2.2 GHz take 3.2 s; 20 minibatches take 20 s.
    assert board.mode_s[highest] == pytest.approx(3.2 + 20, abs=0.1)
    unscaled = board_figures(REFERENCE, "agx-orin", ORIN.array())
    assert board.predicted.minibatch_ms / unscaled.predicted.minibatch_ms == pytest.approx(
        np.full(len(board.modes), 1000 / unscaled.predicted.minibatch_ms[highest])
    )


@pytest.mark.parametrize("minibatch_ms", [0.0, -5.0, float("nan"), float("inf")])
def test_a_minibatch_that_takes_no_time_is_refused(minibatch_ms: float) -> None:
    with pytest.raises(InvalidInputError, match="--minibatch-ms must be finite and above 0"):
        board_figures(REFERENCE, "agx-orin", ORIN.array(), minibatch_ms)


def test_a_profile_always_measures_something_and_searches_for_known_budgets() -> None:
    board = board_figures(REFERENCE, "orin-nano", BOARDS["orin-nano"].space.array())
    unknown, known = (advised_profile(board, 0.01, WorkloadChanges.OFTEN, budgets).recommended for budgets in (0, 1))
    assert (unknown.method, unknown.modes) == (ProfilingMethod.TRANSFER, 5)
    assert known.method is ProfilingMethod.BINARY_SEARCH
