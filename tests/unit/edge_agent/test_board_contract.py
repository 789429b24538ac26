"""The contract that every supported Jetson fulfils: checked, profiled, set and restored, with its fan always safe.

The boards are those of the table in docs/devices.md, as trees of kernel files that react to writes.
"""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path

import numpy as np
import pytest

from edge_agent.devices.device import PowerTrace
from edge_agent.devices.jetson.board import shipped_boards
from edge_agent.devices.sysfs import mode_argument
from edge_agent.profiling.journal import Journal
from edge_agent.profiling.profiler import Profiler
from edge_agent.training.mode_change import backed_up
from tests.fakes.faked_jetson import (
    AGX_ORIN_JP5,
    AGX_ORIN_JP6,
    JETSONS,
    FakedJetson,
    FakedNvpmodel,
    conf_text,
    open_nvpmodel,
    open_sysfs,
)
from wattfleet.core.modes import JournalHeader, PowerMode

ROOT = Path(__file__).parents[3]
BOARDS = pytest.mark.parametrize("board", [*JETSONS, AGX_ORIN_JP5, AGX_ORIN_JP6], ids=lambda board: board.name)
STEP_S = 0.25


class WatchedJetson(FakedJetson):
    """A Jetson that notes when nothing cools it: its fan is off, and its service does not run."""

    def __init__(self, root, board):
        self.left_uncooled: list[str] = []
        # Kernels of JetPack 7 do not show the limits of a policy whose cores are offline.
        super().__init__(root, board, errno.EBUSY if board.jetpack == 7 else errno.EINVAL)

    def write(self, path, text):
        super().write(path, text)
        if self.board.has_fan and not self.fan_service_runs and self.fan_share() == 0:
            self.left_uncooled.append(path)

    def fan_share(self):
        enabled = int(self.location(f"{self.fan}_enable").read_text()) if self.exists(f"{self.fan}_enable") else 1
        return int(self.location(self.fan).read_text()) / 255 if enabled else 0


@pytest.fixture
def tree(tmp_path, board):
    jetson = WatchedJetson(tmp_path / "root", board)
    jetson.put("/etc/nvpmodel.conf", conf_text(jetson))
    return jetson


@pytest.fixture
def run(agent, tree, tmp_path):
    options = ("--device", f"sysfs:{tree.location('/')}", "--state-dir", tmp_path / "state")
    return lambda command, *arguments: agent(command, *arguments, *options)


def in_virtual_time(device):
    """Let the device's meter sample in virtual time, without a thread."""

    class Meter:
        def __init__(self):
            self.begin_s = device.clock.now_s()

        def read(self):
            at_s = np.arange(self.begin_s, device.clock.now_s() + 1e-9, 0.2)
            return PowerTrace(at_s, np.full(len(at_s), device.power.read_mw()))

        stop = read

    device.start_meter = Meter
    return device


def some_modes(device):
    rows = np.random.default_rng(0).choice(len(device.modes), 3, replace=False)
    spread = [PowerMode(*map(int, row)) for row in device.modes[rows]]
    return [*spread, device.space.lowest, device.space.highest]


@BOARDS
def test_a_board_is_checked_profiled_set_and_restored(run, tree, board, as_device, tmp_path):
    before = tree.everything()
    found = {finding["topic"]: finding for finding in run("doctor", "--json").content["findings"]}
    assert [topic for topic, each in found.items() if each["level"] == "fails"] == []
    assert board.model in found["board"]["found"] and board.kind in found["board"]["found"]
    assert f"{board.power_mw / 1e3:.1f} W now" in found["power"]["found"]
    assert f"{board.modes:,} modes" in found["device"]["found"]

    device = in_virtual_time(open_sysfs(tree))
    modes = some_modes(device)
    seen = []

    def step():
        device.clock.sleep_s(STEP_S)
        seen.append((device.current_mode(), tree.fan_share() if board.has_fan else 1))

    header = JournalHeader("bench", board.kind, "hardware", "app", 16, device.basis)
    with Journal.open(tmp_path / "profile.jsonl", header) as journal, backed_up(device, tmp_path / "device"):
        records = list(Profiler(device).profile(modes, step, journal))
    assert [record.mode for record in records] == modes
    assert {mode for mode, _ in seen} == set(modes) and {share for _, share in seen} == {1}
    assert all(record.power_mw == board.power_mw for record in records)
    assert tree.everything() == before

    as_device(device)
    for mode in modes:
        assert run("apply", mode_argument(mode)).code == 0
        assert PowerMode(**run("status", "--json").content["device"]["mode"]) == mode
    assert run("restore").code == 0
    assert tree.everything() == before
    assert tree.left_uncooled == []


@BOARDS
def test_a_board_is_set_by_nvpmodel_whatever_its_exit_status(tree, board, tmp_path):
    nvpmodel = FakedNvpmodel(tree)
    nvpmodel.mood = "works-but-fails"
    device = open_nvpmodel(tree, nvpmodel, tmp_path / "state")
    before, kept = tree.everything(), json.loads(json.dumps(dict(device.knobs())))
    for mode in some_modes(device):
        device.apply(mode)
        assert device.current_mode() == mode
    assert device.apply_preset("15W") == device.presets["15W"]
    device.restore(kept)
    assert tree.everything() == before


@BOARDS
def test_the_service_may_write_every_file_that_sets_a_mode(tree, board):
    unit = (ROOT / "edge_agent/systemd/wattfleet-agent.service").read_text()
    writable = [path.removeprefix("-") for line in re.findall(r"ReadWritePaths=(.*)", unit) for path in line.split()]
    device = open_sysfs(tree)
    parts = device.cpu, device.gpu, device.memory, device.fan
    written = [path for part in parts for path in part.written_files()]
    assert [path for path in written if not any(path.startswith(f"{folder}/") for folder in writable)] == []


# --- The table of boards ----------------------------------------------------------------------------------------------


def table_of_boards():
    """The rows of the table in docs/devices.md by their product."""
    page = (ROOT / "docs/devices.md").read_text()
    section = page.split("## Supported boards")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {row[0]: row[1:] for row in rows[2:]}


def test_the_documented_boards_are_those_of_this_contract():
    assert list(table_of_boards()) == [board.name for board in JETSONS]
    products = {product.removesuffix(" Super") for product in table_of_boards()}
    assert products == {module for board in shipped_boards() for module in board.modules}


@pytest.mark.parametrize("board", JETSONS, ids=lambda board: board.name)
def test_what_is_documented_of_a_board_is_what_is_found_on_it(tree, board):
    kind, power, memory, fan = table_of_boards()[board.name]
    device = open_sysfs(tree)
    assert kind == f"`{device.board_kind}`"
    assert power == " + ".join(device.power.rails)
    held = "held" if device.memory.is_held else "fixed"
    assert memory == f"{held}, up to {device.space.highest.mem_hz / 1e6:.0f} MHz"
    assert fan == ("full speed while measuring" if device.fan.exists else "not controlled")
