"""`wattfleet agent selftest`: what it finds on boards that work, and on boards on which something does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing, nullcontext

import pytest

import edge_agent.selftest
from edge_agent.devices.sysfs import mode_argument
from edge_agent.selftest import report_row, result_of, selftest
from edge_agent.training.mode_change import apply_with_backup
from tests.fakes.faked_jetson import JETSONS, LOCK, ORIN_NANO, XAVIER_AGX, FakedJetson, open_sysfs
from tests.fakes.polling import until

MINUTES_10 = 600.0


class WorkingJetson(FakedJetson):
    """A Jetson whose first rail follows the number of cores and their clock, as if they were busy."""

    follows = True

    def read(self, path):
        text = super().read(path)
        if not self.follows or not path.endswith(("curr1_input", "in_power0_input", "power1_input")):
            return text
        online = sum(
            super(WorkingJetson, self).read(core) == "1" for core in self.glob("/sys/devices/system/cpu/*/online")
        )
        khz = int(super().read(f"{self.policy(0)}/scaling_max_freq"))
        return str(round(int(text) * (1 + 0.1 * online * khz / self.board.cpu_khz[-1])))


class InterruptedJetson(WorkingJetson):
    """A Jetson whose owner presses Ctrl-C at the next write to it."""

    presses_ctrl_c = False

    def write(self, path, text):
        if self.presses_ctrl_c:
            self.presses_ctrl_c = False
            signal.raise_signal(signal.SIGINT)
        super().write(path, text)


@pytest.fixture
def tree(tmp_path):
    return WorkingJetson(tmp_path / "root", ORIN_NANO)


def findings_of(device, folder, limit_s=MINUTES_10):
    begun_s = device.clock.now_s()
    findings = list(selftest(device, folder, limit_s, lambda cores: nullcontext()))
    assert device.clock.now_s() - begun_s <= limit_s + 10
    return findings, {finding.topic: finding for finding in findings}


@pytest.mark.parametrize("board", JETSONS, ids=lambda board: board.name)
def test_a_board_that_works_is_said_to_and_is_as_before(tmp_path, board):
    tree = WorkingJetson(tmp_path / "root", board)
    before, device = tree.everything(), open_sysfs(tree)
    findings, found = findings_of(device, tmp_path / "device")
    assert [finding for finding in findings if finding.level != "ok"] == [] and result_of(findings) == "works"
    assert f"1 to {board.cores}: set and read back" in found["cores"].found
    assert {"CPU", "GPU", "memory", "power", "fan", "restored"} <= set(found)
    assert tree.everything() == before and not list((tmp_path / "device").glob("*.json"))
    assert report_row(device, "0.1.0", findings).startswith(f"| {board.model} ({board.kind}) | Jetson Linux ")


@pytest.mark.parametrize(
    ("board", "deaf", "topic"),
    [
        (ORIN_NANO, "/sys/class/devfreq/17000000.gpu/max_freq", "GPU"),
        (ORIN_NANO, "/sys/devices/system/cpu/cpu5/online", "cores"),
        (ORIN_NANO, f"{LOCK}/rate", "memory"),
        (XAVIER_AGX, "/sys/devices/system/cpu/cpufreq/policy0/scaling_max_freq", "CPU"),
    ],
    ids=["GPU", "cores", "memory", "CPU"],
)
def test_a_knob_that_does_not_follow_is_named(tmp_path, board, deaf, topic):
    tree = WorkingJetson(tmp_path / "root", board)
    tree.deaf.add(deaf)
    before = tree.everything()
    findings, found = findings_of(open_sysfs(tree), tmp_path / "device")
    assert found[topic].level == "fails" and deaf in found[topic].found
    assert "wattfleet agent describe" in found[topic].advice
    assert found["restored"].level == "ok" and tree.everything() == before
    row = report_row(open_sysfs(tree), "0.1.0", findings)
    assert "fails: " in row and topic in row


def test_watts_that_do_not_follow_the_clocks_are_wrong_rails(tree, tmp_path):
    tree.follows = False
    power = findings_of(open_sysfs(tree), tmp_path / "device")[1]["power"]
    assert power.level == "fails" and "does not follow the clocks" in power.found and "rails" in power.advice


def test_watts_of_no_jetson_and_watts_that_cannot_be_read_fail(tree, tmp_path):
    (current,) = tree.glob("/sys/bus/i2c/drivers/ina3221/*/hwmon/*/curr1_input")
    tree.put(current, 1_400_000)
    assert "is not what a Jetson draws" in findings_of(open_sysfs(tree), tmp_path / "device")[1]["power"].found
    tree.location(current).unlink()
    power = findings_of(open_sysfs(tree), tmp_path / "device")[1]["power"]
    assert power.level == "fails" and "wattfleet agent doctor" in power.advice


def test_it_ends_in_time_and_says_that_it_did_not_try_everything(tree, tmp_path):
    findings, found = findings_of(open_sysfs(tree), tmp_path / "device", limit_s=12.0)
    assert found["time"].level == "limited" and "more --minutes" in found["time"].advice
    assert "GPU" not in found and found["restored"].level == "ok" and result_of(findings) == "not finished"


def test_a_hot_board_is_not_driven_on(tree, tmp_path):
    zone = next(path for path in tree.glob("/sys/class/thermal/*/type") if tree.read(path) == "tj-thermal")
    tree.put(zone.replace("type", "temp"), 91_000)
    found = findings_of(open_sysfs(tree), tmp_path / "device")[1]
    assert "91 degrees" in found["temperature"].found and "GPU" not in found


def test_what_is_not_restored_is_said(tree, tmp_path):
    device = open_sysfs(tree)
    found = {}
    for finding in selftest(device, tmp_path / "device", MINUTES_10, lambda cores: nullcontext()):
        found[finding.topic] = finding
        if finding.topic == "lowest mode":
            tree.deaf.add(f"{tree.gpu}/max_freq")
    assert found["restored"].level == "fails" and "max_freq" in found["restored"].found


def test_a_mode_that_was_applied_before_is_undone(tree, tmp_path):
    before, device = tree.everything(), open_sysfs(tree)
    apply_with_backup(device, mode_argument(device.space.lowest), tmp_path / "device")
    assert findings_of(open_sysfs(tree), tmp_path / "device")[1]["restored"].level == "ok"
    assert tree.everything() == before


def test_one_that_is_ended_early_restores_the_board(tree, tmp_path):
    before = tree.everything()
    with closing(selftest(open_sysfs(tree), tmp_path / "device", MINUTES_10, lambda cores: nullcontext())) as running:
        next(running)
        assert tree.everything() != before
    assert tree.everything() == before


@pytest.mark.parametrize("while_restored", [False, True])
def test_ctrl_c_restores_the_board(agent, as_device, tmp_path, monkeypatch, while_restored):
    tree = InterruptedJetson(tmp_path / "root", ORIN_NANO)
    before, function = tree.everything(), "_restored" if while_restored else "_tried"
    called = getattr(edge_agent.selftest, function)

    def then_interrupted(*arguments):
        tree.presses_ctrl_c = True
        return called(*arguments)

    monkeypatch.setattr("edge_agent.selftest.busy_cores", lambda cores: nullcontext())
    monkeypatch.setattr(edge_agent.selftest, function, then_interrupted)
    as_device(open_sysfs(tree))
    tried = agent("selftest", "--device", f"sysfs:{tree.location('/')}", "--state-dir", tmp_path / "state")
    assert not tree.presses_ctrl_c and tree.everything() == before
    assert tried.code == (0 if while_restored else 130)
    assert ("restored" in tried.out) if while_restored else ("stopped; device restored" in tried.err)


def test_the_command_says_what_works_and_fails_with_what_does_not(agent, as_device, tree, tmp_path, monkeypatch):
    monkeypatch.setattr("edge_agent.selftest.busy_cores", lambda cores: nullcontext())
    as_device(open_sysfs(tree))
    options = ("--device", f"sysfs:{tree.location('/')}", "--state-dir", tmp_path / "state")
    worked = agent("selftest", *options)
    assert worked.code == 0 and "This board: works (9 ok)." in worked.out
    assert "(orin-nano) | Jetson Linux 36.2.0 |" in worked.out and "| works | <your name>, <date> |" in worked.out
    tree.deaf.add(f"{tree.gpu}/max_freq")
    as_device(open_sysfs(tree))
    failed = agent("selftest", "--json", *options)
    assert failed.code == 1 and not failed.content["works"] and "fails: GPU" in failed.content["row"]


def test_cores_are_busy_only_as_long_as_the_test_runs():
    script = """
import os, sys
from edge_agent.selftest import busy_cores
with busy_cores(1):
    print(open(f"/proc/self/task/{os.getpid()}/children").read(), flush=True)
    if sys.argv[1] == "killed":
        os._exit(0)
"""
    for end in ("ends", "killed"):
        command = [sys.executable, "-c", script, end]
        child = int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
        until(lambda child=child: not os.path.exists(f"/proc/{child}"))
