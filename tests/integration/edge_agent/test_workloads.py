"""Workloads: found or refused with a reason, in a process of their own, and those that are shipped."""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import types

import psutil
import pytest

from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.profiling.profiled_workload import StoppedError, profiled_workload
from edge_agent.workloads.loading import SHIPPED, StepTimes, open_workload
from edge_agent.workloads.process import WorkloadFailedError, workload_steps
from tests.fakes.boards import RealTimeBoard
from tests.fakes.short_forms import first
from wattfleet.core.errors import InvalidInputError

# --- Workloads --------------------------------------------------------------------------------------------------------
# Workloads: a user's own workload is found, or refused with a reason.


@pytest.fixture
def own(monkeypatch):
    """A user's module whose source a test writes."""
    module = types.ModuleType("own_workload")
    monkeypatch.setitem(sys.modules, "own_workload", module)
    return module


def test_ones_own_workload_gets_minibatch_and_device_and_is_closed_at_the_end(own):
    seen = []

    def mine(minibatch, device):
        try:
            while True:
                seen.append((minibatch, device))
                yield StepTimes(1.0, 2.0) if len(seen) == 1 else None
        finally:
            seen.append("closed")

    own.mine = mine
    with open_workload("own_workload:mine", 32, "cpu") as workload:
        assert seen == []
        assert workload.step() == StepTimes(1.0, 2.0)
        assert workload.step() is None
    assert seen == [(32, "cpu"), (32, "cpu"), "closed"]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("resnet", "unknown workload 'resnet'; use one of resnet18, .* or your own module:function"),
        ("own_workload:", "or your own"),
        ("no_such_module:train", "no module no_such_module; add its folder to PYTHONPATH"),
        ("own_workload:absent", "module own_workload has no absent"),
        ("own_workload:number", "number is a int, not a function"),
        ("own_workload:plain", "returned a NoneType, not a generator"),
        ("own_workload:unnamed", "must take minibatch and device as keyword arguments"),
    ],
)
def test_what_is_no_workload_is_refused_with_what_to_do(own, spec, reason):
    own.number = 3
    own.plain = lambda minibatch, device: None
    own.unnamed = lambda: iter([])
    with pytest.raises(InvalidInputError, match=reason):
        open_workload(spec, 16, "cpu")


def test_a_library_that_a_workload_lacks_is_named(tmp_path, monkeypatch):
    (tmp_path / "lacking_workload.py").write_text("import library_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidInputError, match="library_that_is_not_there is not installed"):
        open_workload("lacking_workload:train", 16, "cpu")


def test_an_empty_minibatch_is_refused():
    with pytest.raises(InvalidInputError, match="must be at least 1"):
        open_workload("lstm", 0, "cpu")


def test_a_workload_that_ends_or_yields_something_else_is_named(own):
    own.short = lambda minibatch, device: iter([None])
    own.odd = lambda minibatch, device: iter([0.25])
    with open_workload("own_workload:short", 16, "cpu") as workload:
        workload.step()
        with pytest.raises(InvalidInputError, match="ended after 1 minibatches"):
            workload.step()
    with open_workload("own_workload:odd", 16, "cpu") as workload, pytest.raises(InvalidInputError, match="a float"):
        workload.step()


def test_the_agent_at_rest_imports_neither_torch_nor_what_was_not_chosen():
    code = (
        "import sys, edge_agent.runtime.agent, edge_agent.cli.commands, edge_agent.workloads.loading;"
        "from wattfleet.flower import power_mode_mod;"
        "print([name for name in ('torch', 'scipy', 'pandas', 'jtop', 'pynvml') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- Workload process -------------------------------------------------------------------------------------------------
# A workload in a process of its own: it trains on request, reports errors, and ends with the profiling.

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


# --- Shipped workloads ------------------------------------------------------------------------------------------------
# The shipped workloads: networks of the stated size that can be trained.

PARAMETERS = {"resnet18": 11_689_512, "mobilenet": 5_483_032, "lstm": 6_238_210, "bert": 28_301_314}


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="the shipped workloads train with torch")


def shipped(name):
    return importlib.import_module(SHIPPED[name].partition(":")[0])


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_networks_have_the_size_they_are_said_to_have(name):
    assert sum(p.numel() for p in shipped(name).network().parameters()) == pytest.approx(PARAMETERS[name], rel=0.01)


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize("name", first(2, SHIPPED))
def test_shipped_workloads_train_and_tell_waiting_from_computing(name):
    steps = getattr(shipped(name), name)(minibatch=2, device="cpu", workers=0)
    for times in itertools.islice(steps, 2):
        assert times.fetch_stall_ms > 0 and times.compute_ms > 0
    steps.close()


def test_training_changes_the_network_with_every_minibatch(torch):
    loop = importlib.import_module("edge_agent.workloads.loop")
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    samples = loop.SyntheticSamples(lambda generator: (torch.rand(4, generator=generator), torch.tensor(1)))
    steps = loop.train(network, samples, 8, "cpu", workers=0)
    seen = []
    for _ in itertools.islice(steps, 3):
        seen.append(network[1].weight.detach().clone())
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])


def test_a_board_without_cuda_says_so(torch):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with open_workload("lstm", 2, "cuda") as workload, pytest.raises(InvalidInputError, match="no CUDA device"):
        workload.step()
