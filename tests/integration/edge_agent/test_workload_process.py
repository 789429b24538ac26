"""A workload in a process of its own: it trains on request, reports errors, and ends with the profiling."""

import os
import signal
import threading

import psutil
import pytest

from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.profiling.profiled_workload import StoppedError, profiled_workload
from edge_agent.workloads.loading import StepTimes
from edge_agent.workloads.process import WorkloadFailedError, workload_steps
from tests.integration.edge_agent.test_training import RealTimeBoard
from wattfleet.errors import InvalidInputError

OWN = """
import os
from edge_agent.workloads.loading import StepTimes

def train(*, minibatch, device):
    print("what a library prints")
    while True:
        yield StepTimes(float(minibatch), float(os.getpid()))

def silent(*, minibatch, device):
    while True:
        yield

def dies(*, minibatch, device):
    os._exit(7)
    yield

def short(*, minibatch, device):
    yield
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_process_workload.py").write_text(OWN)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))


def test_it_trains_when_asked_and_is_gone_at_the_end():
    with workload_steps("own_process_workload:train", 16, "cpu")() as step:
        first, second = step(), step()
        assert first == second and first.fetch_stall_ms == 16.0
        process = psutil.Process(int(first.compute_ms))
        assert process.pid != os.getpid()
    assert not process.is_running()


def test_a_workload_that_tells_no_times_apart():
    with workload_steps("own_process_workload:silent", 16, "cpu")() as step:
        assert step() is None


def test_it_imports_nothing_from_the_folder_that_the_agent_was_started_in(tmp_path, monkeypatch):
    folder = tmp_path / "a_users"
    folder.mkdir()
    for module in ("torch", "numpy", "json"):
        (folder / f"{module}.py").write_text("import os; os._exit(66)")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", f"{os.environ['PYTHONPATH']}{os.pathsep}")
    with workload_steps("own_process_workload:train", 16, "cpu")() as step:
        assert psutil.Process(int(step().compute_ms)).cwd() == "/"


def test_a_folder_that_is_named_from_here_is_still_searched(tmp_path, monkeypatch):
    (tmp_path / "own_process_workload.py").rename(tmp_path / "named_from_here.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([".", os.environ["PYTHONPATH"]]))
    with workload_steps("named_from_here:silent", 16, "cpu")() as step:
        assert step() is None


def test_what_is_wrong_with_a_workload_is_said_by_the_agent():
    with workload_steps("own_process_workload:short", 16, "cpu")() as step:
        assert step() is None
        with pytest.raises(InvalidInputError, match="ended after 1 minibatches"):
            step()
    with workload_steps("own_process_workload:absent", 16, "cpu")() as step:
        with pytest.raises(InvalidInputError, match="has no absent"):
            step()


def test_a_workload_that_dies_does_not_take_the_agent_with_it():
    with workload_steps("own_process_workload:dies", 16, "cpu")() as step:
        with pytest.raises(WorkloadFailedError, match="ended with exit code 7"):
            step()
    with workload_steps("own_process_workload:train", 16, "cpu")() as step:
        os.kill(int(step().compute_ms), signal.SIGKILL)
        with pytest.raises(WorkloadFailedError, match="exit code -9"):
            step()


def test_hardware_needs_a_workload_and_a_virtual_device_takes_none():
    with pytest.raises(InvalidInputError, match="pass --workload resnet18, .*module:function"):
        profiled_workload(RealTimeBoard(), None, 16, "cuda")
    with pytest.raises(InvalidInputError, match="unknown workload 'resnet'; use one of resnet18"):
        profiled_workload(RealTimeBoard(), "resnet", 16, "cuda")
    with pytest.raises(InvalidInputError, match="omit --workload"):
        profiled_workload(SimulatedDevice("orin-nano", 1), "resnet18", 16, "cuda")


def test_the_own_workload_names_the_profile():
    own = profiled_workload(RealTimeBoard(), "own_process_workload:train", 8, "cpu")
    assert own.trained == ("own_process_workload:train", 8)
    virtual = profiled_workload(SimulatedDevice("orin-nano", 1), None, 16, "cpu")
    assert virtual.trained is None


def test_a_profile_that_is_to_stop_trains_no_further_minibatch():
    stopping = threading.Event()
    own = profiled_workload(RealTimeBoard(), "own_process_workload:train", 8, "cpu").stopped_by(stopping)
    with own.open_steps() as step:
        assert isinstance(step(), StepTimes)
        stopping.set()
        with pytest.raises(StoppedError):
            step()
