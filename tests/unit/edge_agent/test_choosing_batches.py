"""The front over modes and batch sizes, and apps that train with a batch size other than the planned one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest

import reference_models
from edge_agent.devices.selection import open_virtual_board
from edge_agent.learning.fitting import FittingHere
from edge_agent.learning.online_learner import OnlineLearner
from edge_agent.learning.transfer import Transfer
from edge_agent.profiling.journal import Journal, JournalHeader
from edge_agent.profiling.known_workload import KnownWorkload
from tests.fakes.fitting_of_batches import POWER_LOG_SD, Table
from tests.fakes.scripted_device import ScriptedDevice
from wattfleet.choosing import MAX_FRONT_POINTS, Front
from wattfleet.errors import InvalidInputError
from wattfleet.modes import BatchOptions, PowerMode, Profile, Workload, WorkloadFacts, modes_to_array
from wattfleet.prediction import restore_predictor

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


@pytest.mark.parametrize("seed", range(20))
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
