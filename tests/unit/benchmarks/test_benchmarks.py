"""The benchmarks: how they judge choices, divide rounds into stages, and draw the tables of documents."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.hosts import KINDS, errors_of, start_of
from benchmarks.joint.boards import NETWORKS, Unit, limits_mw, true_table, undominated
from benchmarks.joint.compare import BASELINE, FASTEST, OURS, Case, ProxyCase, time_energy_power
from benchmarks.joint.promising import measure_promising
from benchmarks.joint.runs import BATCHES, SEEDS, read_runs
from benchmarks.joint.summary import figures, proxy_matrix, ratios
from benchmarks.joint.tasks import TASKS, pooled, sequences
from benchmarks.round_overhead.timeline import STAGES, Seen, round_seconds, stage_seconds
from benchmarks.second_workload import MODES, needed
from benchmarks.table_pictures import draw_choices, draw_errors, numbers, tables_of
from wattfleet.core.choosing import (
    BatchEfficiency,
    JointTable,
    KnownModes,
    PowerLimit,
    TrainingObjective,
    choose_jointly,
    highest_safe_gpu_hz,
)
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import PowerMode

# --- Joint choice of mode and batch size ------------------------------------------------------------------------------
# The benchmark that chooses mode and batch size together: cases, limits, dominated rows and summary figures.


def case(method: str, time_s: float, energy_j: float, seed: int = 0, power_w: float = 9.0) -> Case:
    return Case("agx-orin", "resnet-mnist", seed, 0, 10.0, method, "a mode", 16, time_s, energy_j, power_w)


def test_time_and_energy_follow_from_the_minibatches_of_a_run() -> None:
    # 8,000 samples are 500 minibatches of 16, of 40 ms each, at 10 W.
    assert time_energy_power(40.0, 10_000.0, 16, 8_000) == pytest.approx((20.0, 200.0, 10.0))


def test_dominated_rows_change_no_choice() -> None:
    rng = np.random.default_rng(0)
    batch = np.repeat([8, 32, 128], 40)
    minibatch_ms, power_mw = rng.uniform(10, 90, 120) * batch, rng.uniform(5_000, 20_000, 120)
    table = true_table(rng.uniform(1, 9, (120, 4)).round(), minibatch_ms, power_mw, batch)
    samples = {8: 0.6, 32: 0.8, 128: 1.0}
    efficiency = BatchEfficiency("m", tuple(samples), tuple(samples.values()), (0.0,) * 3, "test")
    needed = np.array([samples[each] for each in batch.tolist()])
    kept = undominated(table)
    assert len(kept.known.modes) < len(table.known.modes)
    for limit_mw in (6_000, 9_000, 20_000):
        within = power_mw <= limit_mw
        least_time = (minibatch_ms / batch * needed)[within].min()
        least_energy = (minibatch_ms / batch * needed * power_mw)[within].min()
        limit = PowerLimit(limit_mw)
        assert choose_jointly(kept, efficiency, limit).sample_ms == pytest.approx(least_time)
        thrifty = choose_jointly(kept, efficiency, limit, TrainingObjective.LEAST_ENERGY)
        assert thrifty.sample_uj == pytest.approx(least_energy)


def test_ratios_compare_choices_of_the_same_place() -> None:
    cases = [
        *(case(BASELINE, 30, 300), case(OURS, 11, 110), case(FASTEST, 10, 120)),
        *(case(BASELINE, 40, 400, seed=1), case(OURS, 20, 100, seed=1, power_w=11.0), case(FASTEST, 20, 90, seed=1)),
    ]
    (row,) = [each for each in figures(ratios(cases), lambda one: (one.method,)) if each["method"] == OURS]
    assert row["sooner"]["mean"] == pytest.approx((30 / 11 + 2) / 2)
    assert row["energy"]["mean"] == pytest.approx((110 / 300 + 100 / 400) / 2)
    assert row["behind_pct"]["mean"] == pytest.approx(5.0)
    assert row["behind_pct"]["sd"] == pytest.approx(10 / 2**0.5)
    assert row["over_limit"] == 1
    assert row["worst_excess_pct"] == pytest.approx(10.0)


def test_the_proxy_matrix_has_the_mean_of_each_pair() -> None:
    found = proxy_matrix([ProxyCase("a", "b", 2.0), ProxyCase("a", "b", 4.0), ProxyCase("b", "b", 0.0)])
    assert found == {"a": {"b": 3.0}, "b": {"b": 0.0}}


def test_every_training_keeps_each_limit_at_the_cap_of_the_baselines() -> None:
    unit = Unit("orin-nano", 0)
    tables = [training.gpu_clock for training in unit.trainings.values()]
    limits = limits_mw([unit])
    assert limits == sorted(limits)
    for limit_mw in limits:
        cap_gpu_hz = highest_safe_gpu_hz(tables, PowerLimit(limit_mw))
        for table in tables:
            at_cap = table.known.modes[:, 2] == cap_gpu_hz
            assert at_cap.sum() == len(BATCHES)
            assert (table.known.power_mw[at_cap] <= limit_mw).all()


def test_a_profile_states_the_true_time_and_power() -> None:
    unit = Unit("orin-nano", 1)
    rows = unit.profiled("mobilenet", PowerLimit(limits_mw([unit])[2])).rows
    assert len(rows) < len(BATCHES) * 5
    for row in rows:
        true_ms, true_mw = unit.truth("mobilenet", row.mode, row.batch)
        assert (row.minibatch_ms, row.power_mw) == (true_ms, true_mw)


def test_each_task_has_another_data_set_as_its_proxy() -> None:
    assert {task.name: task.proxy for task in TASKS if task.network == "resnet"} == {
        "resnet-fashion": "resnet-mnist",
        "resnet-mnist": "resnet-fashion",
    }
    assert {task.network for task in TASKS} == set(NETWORKS)


def test_images_are_means_of_four_pixels() -> None:
    image = np.zeros((1, 28, 28), dtype=np.uint8)
    image[0, 2:4, 4:6] = [[255, 255], [255, 0]]
    found = pooled(image)
    assert found.shape == (1, 14, 14)
    assert found[0, 1, 2] == pytest.approx(0.5)
    assert (np.delete(found.ravel(), 16) == -1).all()


def test_labels_of_a_text_are_the_characters_that_follow() -> None:
    x, y = sequences(np.arange(100), 4, 10)
    assert x[:, 0].tolist() == [0, 29, 59, 89]
    assert (y == x + 1).all()


def test_the_committed_runs_cover_every_task_batch_and_seed() -> None:
    runs = read_runs()
    assert set(runs) == {task.name for task in TASKS}
    for each in runs.values():
        medians = {batch: sorted(samples)[SEEDS // 2] for batch, samples in each.samples.items()}
        expected = [medians[batch] / medians[BATCHES[-1]] for batch in BATCHES]
        assert each.efficiency.relative_samples == pytest.approx(expected)


def test_a_run_that_never_reached_its_target_is_refused(tmp_path: Path) -> None:
    samples: dict[str, list[int | None]] = {str(batch): [1_000] * SEEDS for batch in BATCHES}
    samples["16"][3] = None
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"tasks": {"resnet-mnist": {"samples": samples}}}))
    with pytest.raises(InvalidInputError, match="resnet-mnist lacks a run"):
        read_runs(path)


def test_promising_predictions_are_measured_until_one_keeps_the_limit() -> None:
    # A faster mode draws more power. The predictions are 10 % too low, and their standard deviation is also 10 %.
    gpu_hz = np.arange(1.0, 11.0)
    true_mw = 1_000 * gpu_hz
    known = KnownModes(
        np.column_stack([np.ones(10), np.ones(10), gpu_hz, np.ones(10)]),
        100 / gpu_hz,
        0.9 * true_mw,
        np.full(10, 0.05),
        np.full(10, 0.1),
        np.zeros(10, dtype=bool),
        np.full(10, 8),
    )
    asked = []

    def measure(mode: PowerMode, batch: int) -> tuple[float, float]:
        asked.append(mode.gpu_hz)
        return 100 / mode.gpu_hz, 1_000.0 * mode.gpu_hz

    efficiency = BatchEfficiency("m", (8,), (1.0,), (0.0,), "test")
    limit = PowerLimit(7_400.0)
    before = choose_jointly(JointTable(known), efficiency, limit).chosen.mode.gpu_hz
    better, count = measure_promising(JointTable(known), efficiency, limit, 5, measure)
    # Mode 8 is predicted at 7.2 W but draws 8 W. Mode 7 keeps the limit, and no faster mode is as likely to keep it.
    assert (before, asked, count) == (6, [8, 7], 2)
    assert choose_jointly(better, efficiency, limit).chosen.mode.gpu_hz == 7


# --- Round timeline ---------------------------------------------------------------------------------------------------
# The benchmark that divides a round into stages, on times written by hand.


def test_the_stages_of_the_slowest_node_add_up_to_the_round() -> None:
    rounds = [
        {
            "pushed_s": 100.0,
            "pulled_s": 110.0,
            "nodes": [
                {"started_s": 101.0, "called_s": 102.0, "trained_s": 103.0},
                {"started_s": 104.0, "called_s": 106.5, "trained_s": 107.5},
            ],
        }
    ]
    logs = [Seen([95.0, 100.5], [97.0, 103.5]), Seen([95.5, 103.0], [97.5, 108.0])]
    stages = stage_seconds(rounds, logs)
    assert list(stages.values()) == pytest.approx([3.0, 1.0, 2.5, 1.0, 0.5, 2.0])
    assert tuple(stages) == STAGES
    assert round_seconds(rounds) == [10.0]


# --- Second workload --------------------------------------------------------------------------------------------------
# The benchmark of how many measured modes a board's first workload saves for its second one.


def test_a_constant_saving_is_found_from_the_errors() -> None:
    # The error is 40 / n, or 20 / n with the first workload: half the modes give the same error.
    found = needed([40 / n for n in MODES], [20 / n for n in MODES])
    assert found[0] == MODES[0], "fewer modes were not measured"
    assert found[1:] == pytest.approx([n / 2 for n in MODES[1:]])


def test_errors_that_are_never_reached_are_named() -> None:
    found = needed([5, 4, 3, 2, 1], [6, 5, 4, 3, 2])
    assert found[-1] is None
    assert found[:-1] == pytest.approx([5, 10, 25, 50])


# --- Table pictures ---------------------------------------------------------------------------------------------------
# Figures drawn from the tables of a document: which tables and numbers are read.

ERRORS = """
## Errors

| to MobileNetV3, AGX Orin | n = 5 | 10 | 50 |
|---|---|---|---|
| `roofline`, the default | 5.9 / 2.2 | 4.1 / 1.7 | |
| `powertrain` as published (4.2) | | 26.7 / – | 15.7 / 5.2 (14.5 / 5.6 in figure 6) |
"""

CHOICES = """
### ResNet-18 on the Orin Nano (reference: another)

| method | N | median | mean | over | by 1 W |
|---|---|---|---|---|---|
| `wattfleet` | 10 | 1 | 4 | 7 | 0.5 |
| `wattfleet` | 50 | 0 | 2 | 6 | 0 |
| `binary-search`, shared | 50 | 9 | 9 | 9 | 9 |
| `binary-search`, each budget alone | 5 to 7 | 3 | 8 | 0 | 0 |

## Which method when

| method | modes | slower, % | over |
|---|---|---|---|
| `transfer` | 0 | 275.6 | 0 |
| `transfer` | 5 | 12.2 | 0.5 |
| `binary-search` | 12; 11 | 8.3 | 0 |
"""


@pytest.mark.parametrize(
    ("cell", "found"),
    [
        ("", []),
        ("5.9 / 2.2", [5.9, 2.2]),
        ("26.7 / –", [26.7, None]),
        ("15.7 / 5.2 (14.5 / 5.6 in figure 6)", [15.7, 5.2]),
        ("18,096", [18096]),
        ("–", [None]),
        ("below 20 / –", [None, None]),
    ],
)
def test_a_cell_has_the_numbers_that_a_reader_sees(cell: str, found: list[float | None]) -> None:
    assert numbers(cell) == found


def test_each_error_is_drawn_at_its_number_of_modes() -> None:
    time, power = draw_errors(tables_of(ERRORS)).axes
    drawn = {line.get_label(): np.array(line.get_xydata()).tolist() for line in time.lines}
    assert drawn["Wattfleet's predictor"] == [[5, 5.9], [10, 4.1]]
    assert drawn["PowerTrain as published"] == [[10, 26.7], [50, 15.7]]
    assert np.array(power.lines[2].get_xydata()).tolist() == [[50, 5.2]], "a dash is no error"


def test_choices_are_drawn_at_the_row_of_their_method() -> None:
    penalty, broken, losses = draw_choices(tables_of(CHOICES)).axes
    rows = {
        label.get_text(): place for place, label in zip(penalty.get_yticks(), penalty.get_yticklabels(), strict=True)
    }
    (nano,) = (points for line in penalty.lines if (points := np.array(line.get_xydata()).tolist()))
    shown = ("Wattfleet, 10 modes", "Wattfleet, 50 modes", "binary search, each budget")
    assert nano == [[penalty_pct, rows[name]] for penalty_pct, name in zip((4, 2, 8), shown, strict=True)]
    (over,) = (watts for line in broken.lines if (watts := np.array(line.get_xdata()).tolist()))
    assert over == [0.5, 0, 0]
    drawn = {line.get_label(): np.array(line.get_xydata()).tolist() for line in losses.lines}
    assert drawn["transfer"] == [[5, 12.2]], "the choice without measurements is left out"
    assert drawn["binary search for one budget"] == [[12, 8.3]]


# --- Hosts ------------------------------------------------------------------------------------------------------------
# The start of the shipped reference on machines that are no Jetsons.


@pytest.mark.parametrize(("kind", "measured_ms"), [("rtx-3090", 15.48), ("raspberry-pi-5", 6369.0)])
def test_the_one_known_time_of_a_host_is_in_the_interval_predicted_for_it(kind: str, measured_ms: float) -> None:
    start = start_of(kind, measured_ms)
    assert start.least_ms < measured_ms < start.most_ms
    assert start.predicted_ms / 3 < measured_ms < 3 * start.predicted_ms


@pytest.mark.parametrize("kind", KINDS)
def test_three_modes_of_a_host_are_enough_for_a_fifth(kind: str) -> None:
    found = [errors_of(kind, 3, seed) for seed in range(3)]
    assert np.median([each.time_pct for each in found]) < 20
    assert np.median([each.power_pct for each in found]) < 20
