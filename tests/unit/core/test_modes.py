"""Boards, power modes, workloads with their facts, and the batch sizes that an app can train with."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import (
    BOARDS,
    MAX_BATCH_OPTIONS,
    MAX_WORKLOAD_NAME_CHARACTERS,
    BatchOptions,
    ModeSpace,
    PowerMode,
    Processor,
    Task,
    Workload,
    WorkloadFacts,
    array_to_modes,
    board_named,
    limit_clock_hz,
    modes_to_array,
)

# --- Boards -----------------------------------------------------------------------------------------------------------
# The known boards, compared with figures published by NVIDIA and PowerTrain.


MODE_COUNTS = {"agx-orin": 18_096, "xavier-agx": 29_232, "orin-nano": 1_800, "orin-nx": 5_824}
MAXN = {
    "agx-orin": PowerMode(12, 2_201_600, 1_300_500_000, 3_199_000_000),
    "xavier-agx": PowerMode(8, 2_265_600, 1_377_000_000, 2_133_000_000),
    "orin-nano": PowerMode(6, 1_510_400, 624_750_000, 2_133_000_000),
    "orin-nx": PowerMode(8, 1_984_000, 918_000_000, 3_199_000_000),
}


def test_the_known_boards() -> None:
    assert set(BOARDS) == {*MODE_COUNTS, "rtx-3090", "raspberry-pi-5"}


def test_the_hosts_modes_are_power_limits_or_cores_and_clocks() -> None:
    workstation, pi = board_named("rtx-3090"), board_named("raspberry-pi-5")
    assert list(workstation.presets) == [f"{watts}W" for watts in (100, *range(120, 350, 20), 350)]
    assert set(workstation.presets.values()) == set(array_to_modes(workstation.space.array()))
    assert workstation.presets["350W"] == workstation.space.highest
    assert len(pi.space) == 40 and pi.space.highest == PowerMode(4, 2_400_000, 1_000_000_000, 1_000_000_000)


@pytest.mark.parametrize(("limit", "clock_hz"), [(350, 2_100_000_000), (175, 1_485_000_000), (100, 1_122_000_000)])
def test_the_clock_that_stands_for_a_power_limit(limit: float, clock_hz: int) -> None:
    assert limit_clock_hz(limit, 350, 2_100_000_000) == clock_hz


@pytest.mark.parametrize("kind", MODE_COUNTS)
def test_a_board_has_the_published_number_of_modes_and_highest_mode(kind: str) -> None:
    known = board_named(kind)
    assert known.kind == kind
    assert known.title.startswith("Jetson")
    assert len(known.space) == len(known.space.array()) == MODE_COUNTS[kind]
    assert known.space.highest == MAXN[kind]


@pytest.mark.parametrize("kind", MODE_COUNTS)
def test_clocks_are_in_the_units_of_their_knobs(kind: str) -> None:
    for mode in (board_named(kind).space.lowest, board_named(kind).space.highest):
        assert 0.1 < mode.cpu_khz / 1e6 < 2.5
        assert 0.1 < mode.gpu_hz / 1e9 < 1.5
        assert 0.2 < mode.mem_hz / 1e9 < 3.3


@pytest.mark.parametrize("kind", ["", "agx_orin", "AGX-ORIN", "nano"])
def test_an_unknown_kind_is_refused_with_the_known_ones(kind: str) -> None:
    with pytest.raises(InvalidInputError) as refusal:
        board_named(kind)
    assert repr(kind) in str(refusal.value)
    assert all(known in str(refusal.value) for known in MODE_COUNTS)


# --- Power mode -------------------------------------------------------------------------------------------------------
# Power modes and mode spaces.

SMALL = ModeSpace(
    cores=(4, 2), cpu_khz=(1_000_000, 500_000, 750_000), gpu_hz=(300_000_000,), mem_hz=(2_133_000_000, 204_000_000)
)
KNOB = st.integers(1, 20_000_000_000)


@given(st.lists(st.builds(PowerMode, KNOB, KNOB, KNOB, KNOB), max_size=20))
def test_modes_survive_conversion_to_an_array_and_back(modes: list[PowerMode]) -> None:
    array = modes_to_array(modes)
    assert array.shape == (len(modes), 4)
    assert array_to_modes(array) == modes


def test_a_label_has_cores_and_gigahertz() -> None:
    assert PowerMode(12, 2_201_600, 1_300_500_000, 3_199_000_000).label() == "12c 2.20/1.30/3.20"


def test_a_space_holds_every_combination_once_the_last_knob_fastest() -> None:
    expected = list(
        itertools.product((2, 4), (500_000, 750_000, 1_000_000), (300_000_000,), (204_000_000, 2_133_000_000))
    )
    assert len(SMALL) == len(expected) == 12
    assert array_to_modes(SMALL.array()) == [PowerMode(*values) for values in expected]


def test_a_space_contains_its_own_modes_only() -> None:
    modes = array_to_modes(SMALL.array())
    assert all(mode in SMALL for mode in modes)
    for knob in PowerMode._fields:
        stranger = modes[0]._replace(**{knob: getattr(modes[0], knob) + 1})
        assert stranger not in SMALL


def test_the_highest_and_the_lowest_mode_bound_all_others() -> None:
    array = SMALL.array()
    assert tuple(SMALL.highest) == tuple(array.max(axis=0))
    assert tuple(SMALL.lowest) == tuple(array.min(axis=0))
    assert SMALL.highest in SMALL and SMALL.lowest in SMALL


def test_the_order_of_a_knobs_values_does_not_matter() -> None:
    shuffled = ModeSpace(SMALL.cores[::-1], SMALL.cpu_khz[::-1], SMALL.gpu_hz, SMALL.mem_hz[::-1])
    assert shuffled == SMALL
    assert np.array_equal(shuffled.array(), SMALL.array())


@pytest.mark.parametrize("knob", PowerMode._fields)
@pytest.mark.parametrize("values", [(), (0, 5), (-1,), (3, 3)])
def test_a_knob_without_distinct_positive_values_is_refused_by_name(knob: str, values: tuple[int, ...]) -> None:
    knobs = {name: (1,) for name in PowerMode._fields} | {knob: values}
    with pytest.raises(InvalidInputError, match=f"^{knob}: needs one or more distinct positive values"):
        ModeSpace(**knobs)


# --- Workload ---------------------------------------------------------------------------------------------------------
# Workloads: valid names and facts, and the facts that a device adds to the app's own.


def test_another_batch_is_another_point_of_the_same_workload() -> None:
    told = Workload("resnet18", WorkloadFacts(batch=16, parameters=11.7e6, step_flops=1.7e11))
    seen = told.completed(WorkloadFacts(batch=32, loader_workers=4))
    assert seen == Workload("resnet18", WorkloadFacts(Task.TRAINING, 32, 4, Processor.GPU, 11.7e6, 1.7e11))
    assert seen.name == told.name


def test_a_workload_of_inference_does_not_become_training() -> None:
    with pytest.raises(InvalidInputError, match="is inference, not training: give the other task its own name"):
        Workload("resnet18", WorkloadFacts(Task.INFERENCE)).completed(WorkloadFacts(batch=8))


@pytest.mark.parametrize("name", ["", "  ", "line\nbreak", "bell\x07", "\u202eevil"])
def test_a_name_that_cannot_be_shown_is_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match=r"a workload's name must have 1 to 200 printable characters, not '"):
        Workload(name)


def test_a_name_of_ten_thousand_characters_is_refused_without_repeating_it() -> None:
    with pytest.raises(InvalidInputError) as refused:
        Workload("x" * 10_000)
    assert "one of 10,000 characters" in str(refused.value)
    assert Workload("x" * MAX_WORKLOAD_NAME_CHARACTERS)


def test_a_precision_is_a_short_word() -> None:
    assert WorkloadFacts(precision="bfloat16").precision == "bfloat16"
    for precision in ("", "x" * 41, "float\n32"):
        with pytest.raises(InvalidInputError, match="precision must have 1 to 40 printable characters"):
            WorkloadFacts(precision=precision)


# --- Workload facts ---------------------------------------------------------------------------------------------------
# Facts of a workload, and errors in them.


def test_nothing_is_known_by_default_of_a_training_on_a_gpu() -> None:
    facts = WorkloadFacts()
    assert (facts.task, facts.processor) == (Task.TRAINING, Processor.GPU)
    assert (facts.batch, facts.loader_workers, facts.parameters, facts.step_flops) == (None, None, None, None)


def test_words_name_task_and_processor() -> None:
    facts = WorkloadFacts(task="inference", processor="cpu")  # type: ignore[arg-type]
    assert facts == WorkloadFacts(Task.INFERENCE, processor=Processor.CPU)
    assert f"{facts.task} on {facts.processor}" == "inference on cpu"


@pytest.mark.parametrize(
    ("name", "value"), [("batch", 1), ("loader_workers", 0), ("parameters", 11_689_512), ("step_flops", 8.7e10)]
)
def test_possible_values_are_kept(name: str, value: float) -> None:
    assert getattr(WorkloadFacts(**{name: value}), name) == value  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("batch", 0, "batch must be a whole number of samples, from 1 to 1,000,000, not 0"),
        ("batch", 2.5, "batch must be a whole number"),
        ("batch", True, "batch must be a whole number"),
        ("batch", 10**30, "batch must be a whole number of samples, from 1 to 1,000,000, not 1000"),
        ("loader_workers", -1, "loader_workers must be a whole number of processes, from 0 to 1,000,000, not -1"),
        ("loader_workers", 10**8, "loader_workers must be a whole number of processes, from 0 to 1,000,000, not 1"),
        ("parameters", 0, "parameters must be a finite number above 0, not 0"),
        ("step_flops", -1e9, "step_flops must be a finite number above 0, not -1000000000.0"),
        ("step_flops", float("nan"), "step_flops must be a finite number above 0, not nan"),
        ("step_flops", float("inf"), "step_flops must be a finite number above 0, not inf"),
        ("step_flops", "many", "step_flops must be a finite number above 0, not 'many'"),
    ],
)
def test_impossible_values_are_refused_with_a_remedy(name: str, value: Any, reason: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        WorkloadFacts(**{name: value})
    assert str(caught.value).startswith(reason)
    assert str(caught.value).endswith("correct it, or leave it out if it is unknown")


@pytest.mark.parametrize(("name", "choices"), [("task", "training or inference"), ("processor", "gpu or cpu")])
def test_an_unknown_word_is_refused_with_the_known_ones(name: str, choices: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{name} is 'tpu': give {choices}"):
        WorkloadFacts(**{name: "tpu"})


# --- Batch options ----------------------------------------------------------------------------------------------------
# The batch sizes that an app can train with, and the minibatches per epoch with each of them.

# To reach the same accuracy, a batch size of 64 needs twice as many samples as one of 16.
OPTIONS = BatchOptions((16, 32, 64), (0.5, 0.75, 1.0))


@pytest.mark.parametrize(
    ("base", "batch", "minibatches"),
    [
        (16, 16, 100.0),
        (16, 32, 75.0),  # 1,600 samples become 2,400, in batches of 32
        (16, 64, 50.0),  # 3,200 samples in batches of 64
        (64, 16, 200.0),  # 6,400 samples become 3,200, in batches of 16
        (32, 64, 200 / 3),
    ],
)
def test_minibatches_of_an_epoch_by_hand(base: int, batch: int, minibatches: float) -> None:
    assert OPTIONS.scaled_minibatches(100, base, batch) == pytest.approx(minibatches)


@given(
    st.dictionaries(st.integers(1, 4096), st.integers(1, 1000), min_size=1, max_size=MAX_BATCH_OPTIONS),
    st.integers(1, 10**6),
    st.data(),
)
def test_the_samples_of_an_epoch_keep_their_proportion(known: dict[int, int], count: int, data: st.DataObject) -> None:
    options = BatchOptions.of({batch: samples / 8 for batch, samples in known.items()})
    base, batch = (data.draw(st.sampled_from(sorted(known))) for _ in range(2))
    expected = Fraction(count * base * known[batch], batch * known[base])
    scaled = options.scaled_minibatches(count, base, batch)
    assert scaled == pytest.approx(float(expected), rel=1e-12)
    assert options.scaled_minibatches(scaled, batch, base) == pytest.approx(count, rel=1e-12), "and back"


def test_options_are_read_in_any_order() -> None:
    assert BatchOptions.of({64: 1.0, 16: 0.5, 32: 0.75}) == OPTIONS
    assert 32 in OPTIONS and 48 not in OPTIONS and 0 not in OPTIONS


@pytest.mark.parametrize(
    ("batches", "samples", "error"),
    [
        ((), (), "state 1 to 16 batch sizes, not 0"),
        (tuple(range(1, 18)), (1.0,) * 17, "state 1 to 16 batch sizes, not 17"),
        ((0, 16), (1.0, 1.0), "a whole number of samples, from 1"),
        ((-16,), (1.0,), "a whole number of samples, from 1"),
        ((16.0,), (1.0,), "a whole number of samples, from 1"),
        ((True,), (1.0,), "a whole number of samples, from 1"),
        ((10**30,), (1.0,), "a whole number of samples, from 1"),
        ((32, 16), (1.0, 1.0), "distinct and ascending"),
        ((16, 16), (1.0, 1.0), "distinct and ascending"),
        ((16, 32), (1.0,), "2 batch sizes need as many relative samples, not 1"),
        ((16,), (0.0,), "finite and above 0"),
        ((16,), (-1.0,), "finite and above 0"),
        ((16,), (math.nan,), "finite and above 0"),
        ((16,), (math.inf,), "finite and above 0"),
    ],
)
def test_options_that_cannot_be_are_refused(batches: tuple[int, ...], samples: tuple[float, ...], error: str) -> None:
    with pytest.raises(InvalidInputError, match=error):
        BatchOptions(batches, samples)


def test_the_most_options_there_may_be() -> None:
    most = BatchOptions(tuple(range(1, MAX_BATCH_OPTIONS + 1)), (1.0,) * MAX_BATCH_OPTIONS)
    assert len(most.batches) == MAX_BATCH_OPTIONS == 16


@pytest.mark.parametrize(
    ("batch", "batches", "chooses"),
    [(16, OPTIONS, True), (64, OPTIONS, True), (48, OPTIONS, False), (None, OPTIONS, False), (16, None, False)],
)
def test_a_plan_chooses_only_if_the_app_trains_with_one_of_the_options(
    batch: int | None, batches: BatchOptions | None, chooses: bool
) -> None:
    assert Workload("app", WorkloadFacts(batch=batch), batches).choice == (batches if chooses else None)


def test_a_step_of_another_batch_has_operations_in_proportion() -> None:
    workload = Workload("app", WorkloadFacts(batch=16, parameters=1e6, step_flops=3.2e9), OPTIONS)
    larger = workload.with_batch(64)
    assert larger == Workload("app", WorkloadFacts(batch=64, parameters=1e6, step_flops=12.8e9), OPTIONS)
    assert larger.with_batch(16) == workload
    assert Workload("app", WorkloadFacts(batch=16)).with_batch(64).facts == WorkloadFacts(batch=64)


def test_newer_facts_leave_the_options_as_they_are() -> None:
    workload = Workload("app", WorkloadFacts(batch=16), OPTIONS)
    assert workload.completed(WorkloadFacts(loader_workers=4)).batches == OPTIONS


def test_a_batch_that_hardly_trains_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="1,000 times"):
        BatchOptions((16, 32), (1.0, 1001.0))
    assert BatchOptions((16, 32), (1.0, 1000.0)).relative_to(16, 32) == 1000
