"""Fitting in this process and in a process of its own: the same results, the same errors, and it always ends."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

import reference_models
from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.learning.fitting import FittingHere
from edge_agent.learning.fitting_process import ANSWERS_WITHIN_S, FittingFailedError, fitting_process
from edge_agent.learning.transfer import Transfer, UnusableReferenceError
from edge_agent.profiling.journal import JournalHeader
from edge_agent.profiling.profiled_workload import StoppedError
from wattfleet.choosing import SamplingSettings, spread_modes
from wattfleet.modes import Profile, modes_to_array
from wattfleet.prediction import pack_artefact, read_artefact, restore_predictor
from wattfleet_io.child_process import lower_priority, python_process

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

    monkeypatch.setattr("wattfleet_io.child_process.python_process", suspended)
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
        "import threading, time; from tests.integration.edge_agent.test_fitting import elsewhere, the_process\n"
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
