"""Workloads: a user's own workload is found, or refused with a reason."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from edge_agent.workloads.loading import StepTimes, open_workload
from wattfleet.errors import InvalidInputError


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
        "from wattfleet_flower import power_mode_mod;"
        "print([name for name in ('torch', 'scipy', 'pandas', 'jtop', 'pynvml') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
