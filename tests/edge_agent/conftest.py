"""The agent's commands as a shell sees them, and a device that was profiled."""

import json
import sys
import threading
from dataclasses import dataclass

import pytest

import reference_models
from edge_agent.config import AgentConfig
from edge_agent.devices.selection import open_soft_board
from edge_agent.paths import device_folder
from edge_agent.profiled_workload import soft_workload
from edge_agent.readiness import make_ready
from wattfleet import cli

PROFILED = "simulated:orin-nano"


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def content(self):
        return json.loads(self.out)


@pytest.fixture
def agent(monkeypatch, capsys):
    """Run `wattfleet agent` with some arguments, errors included."""
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["wattfleet", "agent", *map(str, arguments)])
        capsys.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        shown = capsys.readouterr()
        return Ended(code, shown.out, shown.err)

    return run


@pytest.fixture(scope="session")
def profiled_state(tmp_path_factory):
    """The state directory of an agent that profiled a simulated Orin Nano."""
    folder = tmp_path_factory.mktemp("profiled")
    config = AgentConfig(
        "jetson-1",
        "nowhere:1",
        folder,
        device_folder(folder),
        folder / "agent.sock",
        minibatches_per_epoch=2000,
        seed=0,
    )
    reference, board = reference_models.load("agx_orin_resnet18"), open_soft_board(PROFILED, seed=0)
    make_ready(
        config, board, soft_workload(board), reference, 12, lambda progress: None, threading.Event()
    ).learner.close()
    return folder


@pytest.fixture
def as_device(monkeypatch):
    """Let the commands find this device, whatever they are told to open."""

    def use(device):
        monkeypatch.setattr("edge_agent.devices.selection.open_device", lambda *_, **__: device)

    return use
