"""Fitting, and online learning: rounds join the profile, drift is detected, and repeated measuring is bounded."""

from __future__ import annotations

import copy
import functools
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

import reference_models
from edge_agent.devices.device import Activity, KnobNotReachedError
from edge_agent.devices.host import HostDevice, PhysicalBoard
from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.learning.fitting import FittingHere
from edge_agent.learning.fitting_process import ANSWERS_WITHIN_S, FittingFailedError, fitting_process
from edge_agent.learning.online_learner import Observed, OnlineLearner, most_modes
from edge_agent.learning.profiling_plan import profile_device
from edge_agent.learning.transfer import Transfer, UnusableReferenceError
from edge_agent.paths import PREDICTOR_DIRECTORY
from edge_agent.profiling.journal import Journal
from edge_agent.profiling.known_workload import BUILT_IN, UNNAMED, KnownWorkload
from edge_agent.profiling.mode_measurement import DEFAULT_LIMITS, ExcludedModes
from edge_agent.profiling.profiled_workload import StoppedError, built_in_workload
from edge_agent.profiling.profiler import ProductiveProfiler
from edge_agent.profiling.stored_profile import chosen_workload
from edge_agent.runtime.readiness import prepare_device
from edge_agent.training.training import TrainingRunner
from edge_agent.workloads.loading import StepTimes
from tests.fakes.agent_settings import agent_settings
from tests.fakes.boards import MODE, PARKED, RealTimeBoard, Trained
from tests.fakes.faked_host import FakedPi, in_virtual_time, open_pi, open_workstation
from tests.fakes.faked_nvml import FakeGpu, FakeNvml
from tests.fakes.running_agent import BoardThatBecomesSlower
from tests.fakes.short_forms import first
from wattfleet.common.child_process import lower_priority, python_process
from wattfleet.core.choosing import SamplingSettings, spread_modes
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import (
    Discarded,
    JournalHeader,
    JournalledRound,
    PowerMode,
    Profile,
    Workload,
    WorkloadFacts,
    array_to_modes,
    modes_to_array,
)
from wattfleet.core.prediction import DriftRule, pack_artefact, read_artefact, restore_predictor, warmup_s

# --- Fitting ----------------------------------------------------------------------------------------------------------
# Fitting in this process and in a process of its own: the same results, the same errors, and it always ends.


REFERENCE = read_artefact(Path(reference_models.__file__).parent / "agx_orin_resnet18")
HEADER = JournalHeader("bench", "orin-nano", "simulated", "resnet18-imagenet", 16)
TRANSFER = Transfer((REFERENCE,), HEADER, 100)
BOARD = SimulatedDevice("orin-nano", 1)
MODES = BOARD.modes
NOTHING = modes_to_array([])


def here(transfer=TRANSFER):
    return lambda: nullcontext(FittingHere(transfer, MODES))


def elsewhere(transfer=TRANSFER, stopping=None, answers_within_s=ANSWERS_WITHIN_S):
    return fitting_process(transfer, MODES, stopping or threading.Event(), answers_within_s)


def true_profile(count):
    modes = spread_modes(MODES, count, 0)
    return Profile(modes, *BOARD.truth(modes))


@pytest.mark.parametrize("opened", [here, elsewhere])
def test_what_is_fitted_predicts_the_device_and_says_what_to_measure_next(opened):
    profile = true_profile(12)
    with opened()() as fitting:
        fitted = fitting.fit(profile, 12)
        chosen = fitting.next_modes(profile, SamplingSettings(limit=20, batch=3, tolerance=0), NOTHING)
        others = fitting.next_modes(profile, SamplingSettings(limit=20, batch=3, tolerance=0), chosen)
    true_ms, _ = BOARD.truth(MODES)
    assert np.median(np.abs(fitted.prediction.minibatch_ms / true_ms - 1)) < 0.1
    assert fitted.artefact.details.figures["profiled_modes"] == 12
    assert 1 <= len(chosen) <= 3
    assert not {tuple(mode) for mode in others} & {tuple(mode) for mode in chosen}


def test_another_process_fits_the_same():
    profile = true_profile(8)
    with here()() as one, elsewhere()() as other:
        ours, theirs = one.fit(profile, 8), other.fit(profile, 8)
    assert ours.artefact == theirs.artefact
    assert np.array_equal(ours.prediction.power_mw, theirs.prediction.power_mw)


@pytest.mark.parametrize("opened", [here, elsewhere])
def test_a_reference_that_cannot_be_used_is_named_as_such(opened):
    strange = pack_artefact(restore_predictor(REFERENCE), REFERENCE.details.workload, "agx-orin", {}, {})
    object.__setattr__(strange, "details", replace(strange.details, predictor="oracle"))
    with pytest.raises(UnusableReferenceError, match="unknown predictor 'oracle': installed are roofline"):
        with opened(replace(TRANSFER, references=(strange,)))() as fitting:
            fitting.fit(true_profile(8), 8)


def the_process():
    (found,) = [
        child for child in psutil.Process().children() if "edge_agent.learning.fitting_process" in child.cmdline()
    ]
    return found


def test_a_process_that_is_killed_is_reported_with_its_exit_code():
    with elsewhere()() as fitting:
        the_process().send_signal(signal.SIGKILL)
        with pytest.raises(FittingFailedError, match="exit code -9"):
            fitting.fit(true_profile(8), 8)


def test_a_process_that_fails_otherwise_says_why_in_the_log(capfd):
    with elsewhere()() as fitting, pytest.raises(FittingFailedError, match="exit code 1; see its own message"):
        fitting.fit("no profile", 8)
    assert "Traceback" in capfd.readouterr().err


def test_fitting_takes_no_longer_than_it_may_and_ends_once_the_agent_stops():
    before = set(psutil.Process().children())
    with pytest.raises(FittingFailedError, match="not fitted within 0 s"), elsewhere(answers_within_s=0.0)() as fitting:
        fitting.fit(true_profile(8), 8)
    assert set(psutil.Process().children()) <= before
    stopping = threading.Event()
    with pytest.raises(StoppedError), elsewhere(stopping=stopping)() as fitting:
        hanging = the_process()
        hanging.suspend()
        threading.Timer(0.2, stopping.set).start()
        fitting.fit(true_profile(8), 8)
    assert not hanging.is_running()


def test_a_request_that_nobody_reads_takes_no_longer_than_it_may(monkeypatch):
    large = np.tile(MODES, (40, 1))

    def suspended(module):
        started = python_process(module)
        psutil.Process(started.pid).suspend()
        return started

    monkeypatch.setattr("wattfleet.common.child_process.python_process", suspended)
    stopping = threading.Event()
    threading.Timer(0.2, stopping.set).start()
    with pytest.raises(StoppedError), fitting_process(TRANSFER, large, stopping)():
        pass
    with pytest.raises(FittingFailedError, match="not fitted"):
        with fitting_process(TRANSFER, large, threading.Event(), 0.2)():
            pass


def test_a_service_that_may_not_give_way_fits_all_the_same(monkeypatch):
    def denied(increment):
        raise PermissionError("the unit filters setpriority")

    monkeypatch.setattr(os, "nice", denied)
    lower_priority()


def test_a_process_ends_with_an_agent_that_was_killed():
    program = (
        "import threading, time; from tests.integration.edge_agent.test_learning import elsewhere, the_process\n"
        "with elsewhere()() as fitting: print(the_process().pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as agent:
        fits = psutil.Process(int(agent.stdout.readline()))
        os.kill(agent.pid, signal.SIGKILL)
    psutil.wait_procs([fits], timeout=30)
    assert not fits.is_running()


def test_an_agent_that_is_ready_and_has_learnt_holds_no_scipy(tmp_path):
    program = f"""
import sys, threading
from pathlib import Path
import edge_agent.runtime.agent, edge_agent.cli.commands, reference_models
from edge_agent.settings import AgentSettings, DeviceSettings, ProfileSettings
from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.profiling.profiled_workload import built_in_workload
from edge_agent.runtime.readiness import prepare_device
from edge_agent.learning.online_learner import Observed
folder, device = Path({str(tmp_path)!r}), SimulatedDevice("orin-nano", 1)
settings = AgentSettings(
    device=DeviceSettings(spec="simulated:orin-nano", id="bench", state_dir=folder),
    profile=ProfileSettings(minibatches_per_epoch=100),
)
reference, stopping = reference_models.load("agx_orin_resnet18"), threading.Event()
workload = built_in_workload(device.step)
ready = prepare_device(settings, device, workload, [reference], 6, lambda progress: None, stopping)
learner = ready.workloads.learner("")
learner.observe(Observed(ready.parked, 100.0, 5.0))
learner.productive(60.0)
ready.due_fronts()
print(sorted(name for name in sys.modules if name in ("scipy", "torch", "pandas")))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.stdout == "[]\n", done.stderr


# --- Learning ---------------------------------------------------------------------------------------------------------
# Online learning: rounds are added to the profile, drift is detected, and repeated measuring is bounded.

PER_EPOCH = 500
KNOWN = KnownWorkload(Workload(BUILT_IN, WorkloadFacts(batch=16)), PER_EPOCH)
LIMIT = 16


class TrainsByItself(PhysicalBoard):
    """A board that, like a real one, is not informed when work is done."""

    def __init__(self, board):
        self.board = board

    def __getattr__(self, name):
        return getattr(self.board, name)


@functools.cache
def profiled(seed):
    """A board after profiling, with the fitted predictor and the journal; created once for all tests."""
    device = BoardThatBecomesSlower("orin-nano", seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.jsonl"
        with Journal.open(path, HEADER) as journal:
            fitting = FittingHere(Transfer((REFERENCE,), HEADER, PER_EPOCH), device.modes)
            open_steps = built_in_workload(device.step).open_steps
            fitted = profile_device(device, open_steps, journal, fitting, LIMIT, 0, lambda progress: None)
        return device, fitted, path.read_bytes()


class Bench:
    """A simulated board with a journal, a learner and trainings."""

    def __init__(self, path, seed=1, rule=DriftRule(modes=8), more=0, before_fit=lambda: None):  # noqa: B008 - frozen
        restarts = path.exists()
        self.device, fitted, journal = copy.deepcopy(profiled(seed))
        self.kept = []
        if restarts:
            self.device = BoardThatBecomesSlower("orin-nano", seed)
        else:
            path.write_bytes(journal)
        self.journal = Journal.open(path, HEADER)
        open_steps = built_in_workload(self.device.step).open_steps
        fitting = FittingHere(Transfer((REFERENCE,), HEADER, PER_EPOCH), self.device.modes)
        if restarts:
            most = most_modes(self.journal, LIMIT)
            fitted = profile_device(self.device, open_steps, self.journal, fitting, most, 0, lambda progress: None)
        self.learner = OnlineLearner(
            self.device,
            open_steps,
            self.journal,
            lambda known: before_fit() or nullcontext(fitting),
            fitted,
            LIMIT + more,
            KNOWN,
            0,
            self.kept.append,
            rule,
        )
        self.watch = self.watch_of(self.device)

    def watch_of(self, device):
        parked = array_to_modes(self.device.modes)[0]
        return TrainingRunner(device, parked)

    def some_front_mode(self, rng):
        front = self.learner.predicted_front()[0]
        return front.mode(int(rng.integers(len(front))))

    def round(self, mode):
        self.watch.start(self.learner, mode, 1.0, 60.0)
        return self.learner.observe(self.watch.finish())


@pytest.fixture
def bench(tmp_path):
    made = Bench(tmp_path / "profile.jsonl")
    yield made
    made.learner.close()


def test_what_a_round_showed_joins_the_profile_and_is_marked_as_such(bench):
    measured = len(bench.journal.records)
    mode = array_to_modes(bench.device.modes)[1234]
    assert bench.round(mode) is None
    assert bench.journal.measurements[-1].mode == mode
    assert bench.learner.profiled_modes == measured == len(bench.journal.records)
    assert len(bench.kept) == 2 and bench.kept[-1].details.figures["profiled_modes"] == measured


def test_an_observation_makes_the_prediction_of_its_mode_better(bench):
    mode = array_to_modes(bench.device.modes)[1234]
    at = modes_to_array([mode])
    before = restore_predictor(bench.kept[-1]).predict(at)
    bench.round(mode)
    after = restore_predictor(bench.kept[-1]).predict(at)
    true_ms, _ = bench.device.truth(at)
    assert abs(after.minibatch_ms[0] / true_ms[0] - 1) < 0.05
    assert after.time_log_sd[0] < before.time_log_sd[0]


@pytest.mark.parametrize("trains_by_itself", [True, False])
def test_a_trainings_start_is_counted_once(bench, trains_by_itself):
    epochs, minibatches = 0.2, 100
    watch = bench.watch_of(TrainsByItself(bench.device)) if trains_by_itself else bench.watch
    rng = np.random.default_rng(1)
    for _ in range(8):
        watch.start(bench.learner, bench.some_front_mode(rng), epochs, 60.0)
        if trains_by_itself:
            bench.device.run(minibatches)
        assert bench.learner.observe(watch.finish()) is None
    front = bench.learner.predicted_front()[0]
    true_s = bench.device.truth(front.modes)[0] / 1e3
    true_warmup_s = warmup_s(front.modes, true_s * 1e3, bench.device.mean_first_gcycles)
    off = (front.warmup_s + epochs * front.epoch_s) / (true_warmup_s + minibatches * true_s) - 1
    assert abs(np.median(off)) < 0.05


@pytest.mark.parametrize("seed", first(1, [1, 2]))
def test_a_board_that_stays_as_it_is_is_not_measured_anew(tmp_path, seed):
    bench = Bench(tmp_path / "profile.jsonl", seed)
    rng = np.random.default_rng(seed)
    alarms = [bench.round(bench.some_front_mode(rng)) for _ in range(12)]
    assert alarms == [None] * 12
    bench.learner.close()


def test_presets_are_predicted_as_the_modes_of_the_front_are(bench):
    front = bench.learner.predicted_front()[0]
    measured = bench.journal.measurements[0].mode
    unknown = PowerMode(3, 5, 7, 9)
    found = bench.learner.predicted_presets({"first": front.mode(0), "known": measured, "none of this board": unknown})
    assert [each.name for each in found] == ["first", "known"]
    first, known = found
    for name in ("epoch_s", "power_w", "epoch_log_sd", "power_log_sd", "warmup_s"):
        assert getattr(first.front, name)[0] == pytest.approx(getattr(front, name)[0]), name
    assert (known.front.mode(0), known.is_measured) == (measured, True)
    assert first.is_measured is (front.mode(0) in {each.mode for each in bench.journal.measurements})


def test_a_board_that_became_slower_is_noticed_and_measured_anew_within_bounds(bench):
    rng = np.random.default_rng(0)
    bench.device.slowdown = 1.6
    rounds = 0
    reason = None
    while reason is None:
        reason = bench.round(bench.some_front_mode(rng))
        rounds += 1
        assert rounds <= 8
    assert "took longer" in reason
    old = len(bench.kept)
    bench.learner.reprofile(lambda progress: None)
    assert len(bench.journal.records) == 8
    assert len(bench.kept) == old + 1
    modes = bench.device.modes[::97]
    predicted, (true_ms, _) = restore_predictor(bench.kept[-1]).predict(modes), bench.device.truth(modes)
    assert np.median(np.abs(predicted.minibatch_ms / (1.6 * true_ms) - 1)) < 0.12


def test_interrupted_remeasurement_continues_within_its_bound_after_a_restart(tmp_path):
    bench = Bench(tmp_path / "profile.jsonl", rule=DriftRule(outside=1, of_last=1, modes=8))
    mode = array_to_modes(bench.device.modes)[1234]
    assert "took longer" in bench.learner.observe(Observed(mode, 1e6, 20.0))

    def stop_after_three(progress):
        if progress.done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.learner.reprofile(stop_after_three)
    bench.learner.close()
    again = Bench(tmp_path / "profile.jsonl")
    assert len(again.journal.records) == 8
    again.learner.close()


def test_a_front_holds_no_mode_that_the_board_does_not_bear(tmp_path):
    bench = Bench(tmp_path / "profile.jsonl")
    front = bench.learner.predicted_front()[0]
    hopeless = front.mode(len(front) // 2)
    with Journal.open(tmp_path / "left.jsonl", HEADER) as journal:
        for record in bench.journal.records:
            if not (modes_to_array([record.mode]) >= hopeless).all():
                journal.append(record)
        for _ in range(DEFAULT_LIMITS.attempts):
            journal.append(Discarded(hopeless, "92 degrees", 3, 5.0, overloaded=True))
        fitting = FittingHere(Transfer((REFERENCE,), HEADER, PER_EPOCH), bench.device.modes)
        fitted = fitting.fit(Profile.of(journal.measurements), len(journal.records))

        left = OnlineLearner(
            bench.device, None, journal, lambda known: nullcontext(fitting), fitted, LIMIT, KNOWN, 0, lambda kept: None
        ).predicted_front()[0]
    assert not (left.modes >= hopeless).all(axis=1).any()
    assert (front.modes >= hopeless).all(axis=1).any()
    bench.learner.close()


def test_productive_modes_keep_the_rounds_watts(tmp_path):
    device = SimulatedDevice("orin-nano", 1)
    with Journal.open(tmp_path / "profile.jsonl", HEADER) as journal:
        open_steps = built_in_workload(device.step).open_steps
        fitting = FittingHere(Transfer((REFERENCE,), HEADER, PER_EPOCH), device.modes)
        fitted = profile_device(device, open_steps, journal, fitting, 6, 0, lambda progress: None)
        learner = OnlineLearner(
            device, open_steps, journal, lambda known: nullcontext(fitting), fitted, 50, KNOWN, 0, lambda kept: None
        )
        limit_w = 9.0
        while (profiler := learner.productive(limit_w)).measuring and len(journal.records) < 12:
            for _ in profiler.profiled(range(3000), device.step):
                pass
            learner.refit()
        measured = modes_to_array(record.mode for record in journal.records[6:])
        _, true_mw = device.truth(measured)
        assert len(measured) > 0
        assert (true_mw < 1.1 * limit_w * 1e3).all()
        assert not learner.productive(0.0).measuring
        assert not any(isinstance(one, JournalledRound) for one in journal.records)


def test_a_value_that_trainings_never_reach_is_no_longer_offered(bench):
    learner = bench.learner
    measured_khz = {record.mode.cpu_khz for record in bench.journal.records}
    mode = next(mode for mode in array_to_modes(bench.device.modes) if mode.cpu_khz not in measured_khz)
    for _ in range(DEFAULT_LIMITS.attempts):
        assert ExcludedModes.of(bench.journal).allows(bench.device.modes).all()
        learner.knob_was_not_reached(mode, KnobNotReachedError("the CPU stands at 115 MHz", "cpu_khz"))
    assert bench.journal.discarded[-1].reason == "the CPU stands at 115 MHz"
    allowed = bench.device.modes[ExcludedModes.of(bench.journal).allows(bench.device.modes)]
    assert mode.cpu_khz not in allowed[:, 1] and len(allowed) > 0


def test_trainings_that_are_too_short_to_measure_a_mode_are_observed(tmp_path):
    learner = Bench(tmp_path / "profile.jsonl", more=5).learner
    assert not learner.productive(60.0, minibatches=10).measuring
    assert learner.productive(60.0, minibatches=100).measuring
    learner.training_was_too_short(100)
    tried = [learner.productive(60.0, minibatches=100).measuring for _ in range(5)]
    assert tried == [False] * 4 + [True], "the next modes may take less time"
    learner.training_was_too_short(100)
    assert learner.productive(60.0, minibatches=101).measuring


def test_the_app_waits_for_no_fit_that_cannot_choose_a_mode(tmp_path):
    opened = []
    bench = Bench(tmp_path / "profile.jsonl", more=5, before_fit=lambda: opened.append("a fit"))
    assert not bench.learner.productive(0.01).measuring, "no mode is affordable"
    assert len(opened) <= 1
    assert not bench.learner.productive(0.01).measuring
    assert len(opened) <= 1
    bench.round(array_to_modes(bench.device.modes)[1234])
    opened.clear()
    assert (
        not Bench(tmp_path / "complete.jsonl", before_fit=lambda: opened.append("a fit"))
        .learner.productive(60.0)
        .measuring
    )
    assert opened == []
    bench.learner.close()


@pytest.mark.parametrize("error", [StoppedError(), FittingFailedError("exit code 1")])
def test_a_fit_that_fails_or_is_stopped_leaves_the_round_its_own_mode(tmp_path, error):
    def fails():
        raise error

    bench = Bench(tmp_path / "profile.jsonl", more=5, before_fit=fails)
    assert not bench.learner.productive(60.0).measuring
    bench.learner.close()


def test_an_agent_that_measures_few_modes_first_leaves_the_others_to_the_rounds(tmp_path):
    settings = agent_settings(tmp_path / "state", "bench", minibatches_per_epoch=PER_EPOCH, modes_first=6)
    device = SimulatedDevice("orin-nano", 1)
    ready = prepare_device(
        settings, device, built_in_workload(device.step), [REFERENCE], 20, lambda progress: None, threading.Event()
    )
    (report,) = ready.due_fronts()
    assert ready.workloads.profiled_modes == report.profiled_modes == 6
    assert ready.workloads.learner(UNNAMED).productive(60.0).measuring
    ready.workloads.close()
    kept = read_artefact(chosen_workload(tmp_path / "state").folder / PREDICTOR_DIRECTORY)
    assert kept.details.figures["profiled_modes"] == 6
    with pytest.raises(ValueError, match="modes_first"):
        agent_settings(tmp_path / "state", modes_first=-1)


# --- Shared training --------------------------------------------------------------------------------------------------
# Trainings with interleaved requests: reported to the coordinator, but not learned as times of a training alone.


class SharedBoard:
    """A board whose trainings take twice as long while it is shared."""

    def __init__(self) -> None:
        self.shared_with: str | None = None
        self.board = RealTimeBoard()
        self.watch = TrainingRunner(self.board, PARKED, sharing=lambda: self.shared_with)

    def start(self) -> None:
        self.watch.start(Trained(500, self.measures), MODE, epochs=1, power_limit_w=60)

    def measures(self, power_limit_w: float) -> ProductiveProfiler:
        raise AssertionError("the app's times contain the waiting for requests")

    def finish(self) -> Observed | None:
        self.board.clock.sleep_s(60.0 if self.shared_with is None else 120.0)
        return self.watch.finish()


@pytest.fixture
def shared() -> SharedBoard:
    return SharedBoard()


@pytest.mark.parametrize(("whom", "epoch_s"), [(None, 60.0), ("camera", 120.0)])
def test_an_observation_says_whether_it_was_beside_requests(
    shared: SharedBoard, whom: str | None, epoch_s: float
) -> None:
    shared.shared_with = whom
    shared.start()
    observed = shared.finish()
    assert observed is not None
    assert (observed.is_shared, observed.epoch_s) == (whom is not None, pytest.approx(epoch_s, rel=0.05))


@pytest.mark.parametrize(("before", "after"), [(None, "camera"), ("camera", None), ("camera", "radar")])
def test_a_duty_that_changes_during_a_training_leaves_no_observation(
    shared: SharedBoard, before: str | None, after: str | None
) -> None:
    shared.shared_with = before
    shared.start()
    shared.shared_with = after
    assert shared.finish() is None


def test_no_modes_are_measured_during_a_training_beside_requests(shared: SharedBoard) -> None:
    shared.shared_with = "camera"
    shared.start()
    assert not shared.watch.minibatches_ended([], paused=False)
    shared.shared_with = None
    shared.start()
    shared.shared_with = "camera"
    assert not shared.watch.minibatches_ended([StepTimes(1.0, 1.0)], paused=False)


def test_a_board_does_not_seem_slower_after_rounds_beside_requests(tmp_path: Path) -> None:
    """Each round takes three times as long as alone, which would otherwise count as drift after a few rounds."""
    bench = Bench(tmp_path / "profile.jsonl")
    mode = array_to_modes(bench.device.modes)[1234]
    alone = bench.learner._fitted.at(mode, bench.learner.known).minibatch_ms[0]  # noqa: SLF001 - before any round
    records, front = len(bench.journal.measurements), bench.learner.predicted_front()[0]
    per_epoch = bench.learner.minibatches_per_epoch
    for _ in range(6):
        observed = Observed(mode, 3 * float(alone) * per_epoch / 1e3, 9.0, is_shared=True)
        assert bench.learner.observe(observed) is None
    assert len(bench.journal.measurements) == records
    assert np.array_equal(bench.learner.predicted_front()[0].epoch_s, front.epoch_s)
    reasons = [bench.learner.observe(Observed(mode, observed.epoch_s, 9.0)) for _ in range(6)]
    assert any(reasons), "without requests, the same observations show a board that has become slower"
    bench.learner.close()


# --- Whole trainings --------------------------------------------------------------------------------------------------
# Apps without minibatches, such as those of scikit-learn or XGBoost: a whole training is what is observed.


@pytest.fixture
def without_loader(tmp_path: Path) -> Iterator[OnlineLearner]:
    """A learner of a workload of which nothing is known but its name."""
    device, fitting = SimulatedDevice("orin-nano", 3), FittingHere(TRANSFER, MODES)
    journal = Journal.open(tmp_path / "profile.jsonl", HEADER)
    known, nothing = KnownWorkload(Workload("trees", WorkloadFacts())), Profile.of(())
    learner = OnlineLearner(
        device,
        None,
        journal,
        lambda known: nullcontext(fitting),
        fitting.fit(nothing, 0),
        LIMIT,
        known,
        0,
        lambda artefact: None,
    )
    yield learner
    learner.close()


def whole_training(mode: PowerMode, true: SimulatedDevice, noise: float) -> Observed:
    """An epoch that takes as long as 1,730 of the board's minibatches and another 12 s."""
    step_ms, power_mw = (each.item() for each in true.truth(modes_to_array([mode])))
    return Observed(mode, (1.73 * step_ms + 12.0) * noise, power_mw * noise / 1e3)


def test_whole_trainings_predict_the_next_ones_in_other_modes(without_loader: OnlineLearner) -> None:
    rng, true = np.random.default_rng(5), SimulatedDevice("orin-nano", 3)
    missed = []
    for limit_w in (11.0, 7.0, 13.0, 8.5, 10.0, 12.0, 7.7, 9.0):
        front, _ = without_loader.predicted_front()
        affordable = np.flatnonzero(front.power_w <= limit_w)
        chosen = int(affordable[-1] if len(affordable) else 0)
        mode = front.mode(chosen)
        observed = whole_training(mode, true, float(np.exp(rng.normal(0, 0.02))))
        missed.append(abs(float(front.epoch_s[chosen]) / observed.epoch_s - 1))
        assert without_loader.observe(observed) is None, "it does not count as drift"
    assert missed[0] > 0.5, "the first one is planned for another length"
    assert np.median(missed[2:]) < 0.2 and np.median(missed[4:]) < 0.1
    assert without_loader.known.is_length_estimated and without_loader.profiled_modes == 0


def test_minibatches_that_an_app_reports_later_replace_whole_trainings(without_loader: OnlineLearner) -> None:
    true = SimulatedDevice("orin-nano", 3)
    front, _ = without_loader.predicted_front()
    without_loader.observe(whole_training(front.mode(0), true, 1.0))
    assert len(without_loader._journal.measurements) == 1  # noqa: SLF001
    without_loader.loader_seen(16, 0, 250)
    assert (without_loader.minibatches_per_epoch, without_loader.is_length_estimated) == (250, False)
    assert not without_loader._journal.measurements  # noqa: SLF001


def test_a_length_that_is_stated_otherwise_does_not_mix_with_whole_trainings(without_loader: OnlineLearner) -> None:
    true = SimulatedDevice("orin-nano", 3)
    front, _ = without_loader.predicted_front()
    without_loader.observe(whole_training(front.mode(0), true, 1.0))
    estimated = without_loader.known
    assert estimated.completed(WorkloadFacts(batch=16), 500).minibatches_per_epoch == estimated.minibatches_per_epoch
    with pytest.raises(InvalidInputError, match="minibatches_per_epoch must be"):
        without_loader.loader_seen(16, 0, 2**40)
    assert len(without_loader._journal.measurements) == 1, "a wrong report loses nothing"  # noqa: SLF001


def test_a_loader_without_a_length_counts_once_a_mode_is_measured(without_loader: OnlineLearner) -> None:
    true = SimulatedDevice("orin-nano", 3)
    front, _ = without_loader.predicted_front()
    without_loader.loader_seen(16, 2, None)
    without_loader.observe(whole_training(front.mode(0), true, 1.0))
    assert without_loader.known.minibatches_per_epoch is None
    assert not without_loader._journal.measurements  # noqa: SLF001


def test_what_is_estimated_is_known_as_such_after_a_restart() -> None:
    known = KnownWorkload(Workload("trees", WorkloadFacts())).with_estimated_length(173.0, 0.1)
    assert known.minibatches_per_epoch == 1730
    again = KnownWorkload.from_content(known.content())
    assert again == known and again.is_length_estimated
    with pytest.raises(TypeError, match="is_length_estimated is not true or false"):
        KnownWorkload.from_content({**known.content(), "is_length_estimated": 1})


# --- Hosts ------------------------------------------------------------------------------------------------------------
# A workstation and a Raspberry Pi prepare like a board: they measure modes, learn, and report a front with them.


def opened_workstation(folder: Path) -> HostDevice:
    gpu = FakeGpu(power_mw=1_000_000)  # it draws its whole limit
    return open_workstation(folder, FakeNvml(gpu))


def opened_pi(folder: Path) -> HostDevice:
    return open_pi(FakedPi(folder))


@pytest.mark.parametrize("opened", [opened_workstation, opened_pi])
def test_a_host_measures_learns_and_reports_a_front(tmp_path: Path, opened: Callable[[Path], HostDevice]) -> None:
    device = in_virtual_time(opened(tmp_path / "root"))

    def speed(mode: PowerMode) -> float:
        return mode.cores * mode.cpu_khz * mode.gpu_hz / 1e15

    def step() -> None:
        device.clock.sleep_s(0.5 / speed(device.current_mode()) ** 0.5)

    if device.nvml is None:
        device.activity = lambda: Activity(2e3 + 1e2 * speed(device.current_mode()))
    settings = agent_settings(tmp_path / "state", "bench", minibatches_per_epoch=PER_EPOCH, modes_first=6)
    ready = prepare_device(
        settings, device, built_in_workload(step), [REFERENCE], 20, lambda progress: None, threading.Event()
    )
    (report,) = ready.due_fronts()
    assert ready.workloads.profiled_modes == report.profiled_modes == 6
    front, _ = ready.workloads.learner(UNNAMED).predicted_front()
    offered = set(array_to_modes(device.modes))
    assert len(front.modes) > 1 and set(array_to_modes(front.modes)) <= offered
    assert device.current_mode() == ready.parked == array_to_modes(device.modes)[0]
    ready.workloads.close()
