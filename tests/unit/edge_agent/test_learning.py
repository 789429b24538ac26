"""How a device learns a workload: batch sizes, transfers from references, and the expected cost of methods."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest

import reference_models
from edge_agent.devices.selection import open_virtual_board
from edge_agent.learning.fitting import Fitting, FittingHere
from edge_agent.learning.online_learner import OnlineLearner
from edge_agent.learning.profiling_plan import advised_profile, board_figures
from edge_agent.learning.transfer import Transfer, references_of
from edge_agent.profiling.journal import Journal
from edge_agent.profiling.known_workload import KnownWorkload
from edge_agent.profiling.mode_measurement import measuring_s
from edge_agent.profiling.profiler import Profiler
from tests.fakes.boards import ScriptedDevice
from tests.fakes.fittings import POWER_LOG_SD, BatchFitting, Table
from tests.fakes.short_forms import first
from wattfleet.core.choosing import MAX_FRONT_POINTS, Front, WorkloadChanges, compare_methods
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import (
    BOARDS,
    BatchOptions,
    FittedWorkload,
    JournalHeader,
    ModeArray,
    ModeSpace,
    PowerMode,
    Profile,
    ProfilingMethod,
    Workload,
    WorkloadFacts,
    array_to_modes,
    modes_to_array,
)
from wattfleet.core.prediction import Artefact, RooflinePredictor, pack_artefact, predictor_class, restore_predictor

# --- Learning batches -------------------------------------------------------------------------------------------------
# Learning a workload when the app's batch size or measurements of other devices become known later.


W_PER_SAMPLE = 0.6


def hungry_for_large_batches(known: KnownWorkload, modes: ModeArray) -> Fitting:
    """A fitting that predicts power in proportion to the batch size, in any mode."""
    watts = W_PER_SAMPLE * 1e3 * (known.workload.facts.batch or 0)
    return BatchFitting(modes, np.full(len(modes), watts), np.full(len(modes), 100.0))


def test_modes_are_measured_within_the_watts_of_the_batch_that_is_trained_now(tmp_path: Path) -> None:
    device = ScriptedDevice()
    known = KnownWorkload(Workload("app", WorkloadFacts(batch=16)), 500)

    @contextmanager
    def open_fitting(known: KnownWorkload) -> Iterator[Fitting]:
        yield hungry_for_large_batches(known, device.modes)

    with Journal.open(tmp_path / "profile.jsonl", JournalHeader("orin", "scripted", "hardware", "app", 16)) as journal:
        with open_fitting(known) as fitting:
            fitted = fitting.fit(Profile.of(()), 0)
        learner = OnlineLearner(device, None, journal, open_fitting, fitted, 2, known, 0, lambda kept: None)
        limit_w = 1.2 * 16 * W_PER_SAMPLE
        assert learner.productive(limit_w).measuring
        learner.loader_seen(32, 2, 250)
        assert not learner.productive(limit_w).measuring, "twice the watts are more than the round has"
        assert learner.productive(2 * limit_w).measuring


def test_a_granted_mode_is_lowered_if_other_devices_show_more_watts(tmp_path: Path) -> None:
    device = ScriptedDevice()
    known = KnownWorkload(Workload("app", WorkloadFacts(batch=16)), 500)
    power_mw = np.full(len(device.modes), 10e3)

    @contextmanager
    def open_fitting(known: KnownWorkload) -> Iterator[Fitting]:
        yield BatchFitting(device.modes, power_mw.copy(), np.linspace(100.0, 200.0, len(device.modes)))

    with Journal.open(tmp_path / "profile.jsonl", JournalHeader("orin", "scripted", "hardware", "app", 16)) as journal:
        with open_fitting(known) as fitting:
            fitted = fitting.fit(Profile.of(()), 0)
        learner = OnlineLearner(device, None, journal, open_fitting, fitted, 2, known, 0, lambda kept: None)
        granted, lower = array_to_modes(device.modes)[0], array_to_modes(device.modes)[-1]
        assert learner.granted_mode(granted, 15.0) == granted
        power_mw[:-1] = 30e3
        learner.refit()
        with pytest.raises(InvalidInputError, match="use the same front"):
            learner.granted_mode(granted, 15.0)
        learner.others_measured()
        learner.learn_from_others()
        assert learner.granted_mode(granted, 15.0) == lower
        assert learner.granted_mode(lower, 15.0) == lower
        with pytest.raises(InvalidInputError, match="use the same front"):
            learner.granted_mode(granted, 5.0)


# --- Choosing batches -------------------------------------------------------------------------------------------------
# The front over modes and batch sizes, and apps that train with a batch size other than the planned one.

HEADER = JournalHeader("orin", "scripted", "hardware", "app", 16)
# To reach the same accuracy, a batch size of 64 needs twice as many samples as one of 16.
RELATIVE = {16: 0.5, 32: 0.75, 64: 1.0}
OPTIONS = BatchOptions.of(RELATIVE)
# Minibatches per epoch. 200 batches of 16 set the samples, scaled by the relative samples of each batch size.
MINIBATCHES = {16: 200.0, 32: 150.0, 64: 100.0}
APP = Workload("app", WorkloadFacts(batch=16), OPTIONS)
MODES = [PowerMode(cores, 1_000_000, gpu_hz * 10**8, 2 * 10**9) for cores in (2, 4) for gpu_hz in range(3, 9)]
PLANNED = math.exp(NormalDist().inv_cdf(0.95) * POWER_LOG_SD)


class Bench:
    """A learner on a scripted board with twelve modes."""

    def __init__(self, folder: Path) -> None:
        self.journal = Journal.open(folder / "profile.jsonl", HEADER)
        self.device = ScriptedDevice()
        self.device.modes = modes_to_array(MODES)
        self.table = Table.drawn(0, len(MODES), (16, 32, 48, 64))

    def learner(self, known: KnownWorkload = KnownWorkload(APP, 200), table: Table | None = None) -> OnlineLearner:  # noqa: B008 - frozen
        self.table = table or self.table
        open_fitting = self.table.opener()
        with open_fitting(known) as fitting:
            fitted = fitting.fit(Profile.of(()), 0)
        return OnlineLearner(self.device, None, self.journal, open_fitting, fitted, 9, known, 0, lambda kept: None)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.journal.close()


Setting = tuple[PowerMode, int]


def all_settings(table: Table) -> dict[Setting, tuple[float, float]]:
    """Seconds per epoch and planned watts of each mode with each batch size."""
    return {
        (mode, batch): (
            float(table.minibatch_ms[batch][k]) * MINIBATCHES[batch] / 1e3,
            float(table.power_mw[batch][k]) / 1e3 * PLANNED,
        )
        for k, mode in enumerate(MODES)
        for batch in RELATIVE
    }


def points(front: Front) -> dict[Setting, tuple[float, float]]:
    batches = [None] * len(front) if front.batch is None else front.batch.tolist()
    values = zip(front.epoch_s.tolist(), front.planned_w.tolist(), strict=True)
    return {(front.mode(k), batch): each for k, (batch, each) in enumerate(zip(batches, values, strict=True))}


def assert_same_points(one: Front, other: Front) -> None:
    assert set(points(one)) == set(points(other))
    for setting, values in points(one).items():
        assert values == pytest.approx(points(other)[setting]), setting


# --- the front ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", first(5, range(20)))
@pytest.mark.parametrize("trained", RELATIVE)
def test_the_front_equals_the_comparison_of_all_modes_and_batches(bench: Bench, seed: int, trained: int) -> None:
    table = Table.drawn(seed, len(MODES), (16, 32, 64))
    known = KnownWorkload(APP.with_batch(trained), round(MINIBATCHES[trained]))
    found, workload = bench.learner(known, table).predicted_front()
    known_settings = all_settings(table)
    optimal = {
        setting: own
        for setting, own in known_settings.items()
        if not any(other != own and other[0] <= own[0] and other[1] <= own[1] for other in known_settings.values())
    }
    assert len(optimal) <= MAX_FRONT_POINTS
    assert set(points(found)) == set(optimal)
    for setting, values in points(found).items():
        assert values == pytest.approx(optimal[setting]), setting
    assert workload == known.workload


def test_an_epoch_of_unknown_length_counts_100_minibatches_of_the_largest_batch(bench: Bench) -> None:
    """200 minibatches of 16 make as much progress as 100 of 64."""
    assert_same_points(
        bench.learner(KnownWorkload(APP)).predicted_front()[0],
        bench.learner(KnownWorkload(APP, 200)).predicted_front()[0],
    )


def test_an_app_with_a_batch_that_is_no_option_has_a_front_over_modes_alone(bench: Bench) -> None:
    learner = bench.learner(KnownWorkload(APP.with_batch(48), 200))
    assert learner.predicted_front()[0].batch is None
    for (mode, _), (epoch_s, _) in points(learner.predicted_front()[0]).items():
        assert epoch_s == pytest.approx(bench.table.minibatch_ms[48][MODES.index(mode)] * 200 / 1e3)


def test_one_fit_counts_for_all_batches(bench: Bench) -> None:
    learner = bench.learner()
    before = learner.predicted_front()[0]
    for batch in (64, 32, 16):
        learner.trains_with(batch)
        assert learner.known.workload.facts.batch == bench.journal.batch == batch
        assert learner.minibatches_per_epoch == MINIBATCHES[batch]
        assert not learner.is_outdated
        assert_same_points(learner.predicted_front()[0], before)
    assert bench.table.fits == 1


@pytest.mark.parametrize("batch", [0, 48, 128])
def test_a_plan_that_chose_no_option_changes_nothing(bench: Bench, batch: int) -> None:
    learner = bench.learner()
    before = learner.known
    learner.trains_with(batch)
    assert learner.known == before


def test_the_granted_mode_is_judged_by_the_watts_of_its_batch(bench: Bench) -> None:
    learner = bench.learner()
    for batch, least in ((16, 64), (64, 16)):
        watts = {each: bench.table.power_mw[each] / 1e3 for each in (batch, least)}
        at = int(np.argmax(watts[batch] - watts[least]))
        limit_w = float(watts[least][at]) + 0.01
        learner.trains_with(least)
        assert learner.granted_mode(MODES[at], limit_w) == MODES[at]
        learner.trains_with(batch)
        with pytest.raises(InvalidInputError, match="more than the limit"):
            learner.granted_mode(MODES[at], limit_w)


# --- apps that train with another batch size ----------------------------------------------------------------------


def test_an_app_that_ignores_its_plan_is_offered_no_batch(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    learner = bench.learner()
    learner.trains_with(64)
    assert learner.loader_seen(16, 2, 200)
    assert "the app trains with batches of 16 samples instead of batches of 64 samples: its plans" in caplog.text
    assert learner.known.workload.batches is None
    assert (learner.known.workload.facts.batch, learner.minibatches_per_epoch) == (16, 200)
    assert learner.is_outdated
    learner.refit_if_outdated()
    assert learner.predicted_front()[0].batch is None
    for (mode, _), (epoch_s, _) in points(learner.predicted_front()[0]).items():
        assert epoch_s == pytest.approx(bench.table.minibatch_ms[16][MODES.index(mode)] * 200 / 1e3)
    learner.announced(APP)
    assert learner.known.workload.batches is None, "announced again after every reconnection"


def test_an_app_that_trains_as_planned_keeps_its_options(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    learner = bench.learner()
    for batch in (64, 32, 16, 64):
        learner.trains_with(batch)
        learner.loader_seen(batch, 2, int(MINIBATCHES[batch]))
        assert learner.known.workload.batches == OPTIONS
    assert "will not choose a batch size" not in caplog.text


@pytest.mark.parametrize(
    "corrected",
    [
        lambda learner: learner.announced(
            Workload("app", WorkloadFacts(batch=16), BatchOptions.of({16: 0.5, 64: 1.0}))
        ),
        lambda learner: learner.loader_seen(16, 2, 200, takes_planned_batch=True),
    ],
    ids=["other options are announced", "the app asks for its batch"],
)
def test_a_corrected_app_is_offered_batches_again(bench: Bench, corrected: Callable[[OnlineLearner], None]) -> None:
    learner = bench.learner()
    learner.announced(APP)
    learner.trains_with(64)
    learner.loader_seen(16, 2, 200)
    assert learner.known.workload.batches is None
    corrected(learner)
    learner.refit_if_outdated()
    assert {batch for _, batch in points(learner.predicted_front()[0])} <= set(RELATIVE)
    assert learner.known.workload.choice == learner.known.workload.batches is not None


def test_options_that_are_announced_later_are_fitted_once(bench: Bench) -> None:
    learner = bench.learner(KnownWorkload(Workload("app", WorkloadFacts(batch=16)), 200))
    assert learner.predicted_front()[0].batch is None
    learner.announced(APP)
    assert learner.is_outdated
    front, workload = learner.predicted_front()
    assert front.batch is None and workload.batches is None, "of what was fitted, until it is fitted again"
    learner.refit_if_outdated()
    assert set(points(learner.predicted_front()[0])) <= set(all_settings(bench.table))
    learner.announced(APP)
    assert not learner.is_outdated and bench.table.fits == 2


def test_a_run_without_a_choice_withdraws_the_options(bench: Bench) -> None:
    learner = bench.learner()
    learner.announced(Workload("app"))
    learner.refit_if_outdated()
    assert learner.known.workload.batches is None and learner.predicted_front()[0].batch is None


# --- memory -------------------------------------------------------------------------------------------------------


def test_a_batch_that_did_not_fit_leaves_the_front(bench: Bench) -> None:
    learner = bench.learner()
    learner.announced(APP)
    learner.trains_with(64)
    assert learner.out_of_memory()
    learner.refit_if_outdated()
    assert learner.predicted_front()[0].batch is not None and 64 not in learner.predicted_front()[0].batch
    assert set(points(learner.predicted_front()[0])) <= {each for each in all_settings(bench.table) if each[1] < 64}
    learner.announced(APP)
    assert learner.known.offered_batches == (16, 32)
    learner.trains_with(64)
    assert learner.known.workload.facts.batch == 32, "a plan of before is not trained with"


def test_memory_says_nothing_of_an_app_that_has_one_batch(bench: Bench) -> None:
    known = KnownWorkload(Workload("app", WorkloadFacts(batch=16)), 200)
    learner = bench.learner(known)
    assert not learner.out_of_memory()
    assert learner.known == known


# --- fits ---------------------------------------------------------------------------------------------------------


def test_a_fit_predicts_each_batch_that_a_plan_may_choose() -> None:
    reference = reference_models.load("agx_orin_resnet18")
    header = JournalHeader("orin", "agx-orin", "hardware", "resnet18-imagenet", 16)
    modes = open_virtual_board("simulated:agx-orin", 1).modes[::500]
    here = FittingHere(Transfer((reference,), header, 100, batches=(8, 16, 64)), modes)
    fitted = here.fit(Profile.of(()), 0)
    predictor = restore_predictor(fitted.artefact)
    assert list(fitted.by_batch) == [8, 16, 64]
    for batch, prediction in fitted.by_batch.items():
        expected = predictor.predict(modes, np.full(len(modes), batch))
        assert prediction.minibatch_ms == pytest.approx(expected.minibatch_ms)
        assert prediction.power_mw == pytest.approx(expected.power_mw)
    assert fitted.by_batch[16].minibatch_ms == pytest.approx(fitted.prediction.minibatch_ms)
    assert (fitted.by_batch[64].minibatch_ms > 2 * fitted.by_batch[8].minibatch_ms).all(), "eight times the samples"
    assert FittingHere(Transfer((reference,), header, 100), modes).fit(Profile.of(()), 0).by_batch == {}


# --- Transfer ---------------------------------------------------------------------------------------------------------
# Transfers from several references to one device.

SHIPPED = reference_models.load("agx_orin_resnet18")
BERT_HEADER = JournalHeader("jetson-07", "agx-orin", "hardware", "bert", 16)
FACTS = WorkloadFacts(batch=16)
TWO_MODES = np.array([[4, 2_201_600, 1_300_500_000, 3_199_000_000], [12, 729_600, 306_000_000, 2_133_000_000]], float)
PROFILE = Profile(TWO_MODES, np.array([40.0, 160.0]), np.array([30_000.0, 14_000.0]))


def known_profile() -> Profile:
    """Ten modes whose measurements equal the shipped reference's predictions."""
    modes = np.array([[4, 2_201_600, clock * 1e6, 3_199_000_000] for clock in np.linspace(306, 1300, 10)])
    predicted = known(SHIPPED).predict(modes)
    return Profile(modes, predicted.minibatch_ms, predicted.power_mw)


def another_reference() -> Artefact:
    fitted = RooflinePredictor.fit(PROFILE, known(SHIPPED), FACTS)
    return pack_artefact(fitted, FittedWorkload("speech", 16, 10), "agx-orin", {}, {}, FACTS)


def known(artefact: Artefact) -> RooflinePredictor:
    predictor = restore_predictor(artefact, BOARDS["agx-orin"])
    assert isinstance(predictor, RooflinePredictor)
    return predictor


def test_several_references_are_mixed_and_named_in_the_fitted_predictor() -> None:
    references = (SHIPPED, another_reference())
    transfer = Transfer(references, BERT_HEADER, 100)
    fitted = transfer.fitted(PROFILE, transfer.priors())
    mixed = RooflinePredictor.fit_mixed(PROFILE, [known(each) for each in references], FACTS)
    assert (
        fitted.save() == mixed.save() != Transfer((SHIPPED,), BERT_HEADER, 100).fitted(PROFILE, [known(SHIPPED)]).save()
    )
    assert references_of(transfer.packed(fitted, 2)) == [each.digest for each in references]
    assert references_of(Transfer((), BERT_HEADER, 100).packed(fitted, 2)) == []


def test_a_further_reference_of_another_kind_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    of_trees = predictor_class("tree").fit(known_profile(), None, FACTS)
    other = pack_artefact(of_trees, FittedWorkload("speech", 16, 10), "agx-orin", {}, {}, FACTS)
    with caplog.at_level(logging.ERROR):
        (prior,) = Transfer((SHIPPED, other), BERT_HEADER, 100).priors()
    assert isinstance(prior, RooflinePredictor)
    assert f"the reference {other.digest[:12]} is not used: it cannot be mixed with the first" in caplog.text


# --- Method advice ----------------------------------------------------------------------------------------------------
# The expected cost of profiling methods, against PowerTrain's published times and a simulated board.

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
