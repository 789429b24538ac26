"""`wattfleet agent watch`: what it prints every second, and which values it reports as missing."""

import errno
import json
import os
import shutil
import signal

import pytest

from edge_agent.devices.selection import open_virtual_board
from edge_agent.profiling.known_workload import BUILT_IN, KnownWorkload
from edge_agent.profiling.stored_profile import WorkloadFolders
from tests.fakes.jetson_boards import ORIN_NANO
from tests.fakes.jetson_tree import FakedJetson, open_sysfs
from tests.fixtures.edge_agent import PROFILED
from wattfleet.modes import Workload, array_to_modes


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)


@pytest.fixture
def jetson(tmp_path, as_device):
    faked = FakedJetson(tmp_path / "root", ORIN_NANO)
    as_device(open_sysfs(faked))
    return faked


def lines(ended):
    assert ended.code == 0, ended.err
    return [json.loads(line) for line in ended.out.splitlines()]


def test_a_line_of_json_for_every_second(agent, jetson, tmp_path):
    seen = lines(agent("watch", "--seconds", 3, "--json", "--state-dir", tmp_path))
    assert [sample["at_s"] for sample in seen] == [0, 1, 2, 3]
    assert seen[0]["power_w"] == pytest.approx(7.0)
    assert (seen[0]["temperature_c"], seen[0]["throttled"]) == (49.25, 0)
    assert seen[0]["argument"] == "6,1510400,624750000,2133000000"
    assert seen[0]["expected"] is None and seen[0]["power_ratio"] is None


def test_prediction_stands_beside_observation(agent, profiled_state, as_device):
    board = open_virtual_board(PROFILED, seed=0)
    as_device(board)
    board.run(200)
    (now,) = lines(agent("watch", "--seconds", 0, "--json", "--state-dir", profiled_state))
    assert now["power_ratio"] == pytest.approx(now["power_w"] / now["expected"]["power_w"])
    shown = agent("watch", "--seconds", 0, "--state-dir", profiled_state).out
    assert "while training" in shown and "% of the expected power" in shown
    board.apply(array_to_modes(board.modes)[777])
    (then,) = lines(agent("watch", "--seconds", 0, "--json", "--state-dir", profiled_state))
    assert then["expected"]["minibatch_ms"] != now["expected"]["minibatch_ms"]
    assert then["expected"]["measured"] is False and then["expected"]["power_w_interval"] is not None


def test_the_prediction_of_one_of_several_workloads_is_shown(agent, profiled_state, as_device, tmp_path):
    state = shutil.copytree(profiled_state, tmp_path / "state")
    WorkloadFolders(state).prepare(KnownWorkload(Workload("other")))
    as_device(open_virtual_board(PROFILED, seed=0))
    command = ("watch", "--seconds", 0, "--json", "--state-dir", state)
    (unnamed,) = lines(agent(*command))
    (named,) = lines(agent(*command, "--workload", BUILT_IN))
    assert unnamed["expected"] is None and named["expected"]["measured"] is True


def test_power_that_cannot_be_read_is_missing_and_not_0(agent, jetson, tmp_path):
    for path in jetson.glob("/sys/bus/i2c/drivers/ina3221/*/hwmon/*/curr1_input"):
        jetson.unreadable[path] = errno.EIO
    assert lines(agent("watch", "--seconds", 0, "--json", "--state-dir", tmp_path))[0]["power_w"] is None
    shown = agent("watch", "--seconds", 1, "--state-dir", tmp_path).out
    assert "cannot be read" in shown and "0.0 W" not in shown


def test_a_mode_that_cannot_be_read_hides_nothing_else(agent, jetson, tmp_path):
    jetson.unreadable[f"{jetson.gpu}/max_freq"] = errno.EIO
    (sample,) = lines(agent("watch", "--seconds", 0, "--json", "--state-dir", tmp_path))
    assert sample["mode"] is None and "max_freq: cannot be read" in sample["problem"]
    assert sample["power_w"] == pytest.approx(7.0)
    assert "max_freq: cannot be read" in agent("watch", "--seconds", 0, "--state-dir", tmp_path).out


def test_throttling_is_counted_from_the_beginning_of_the_watch(agent, jetson, tmp_path, monkeypatch):
    def throttle(board):
        board.clock.sleep_s(1)
        jetson.put("/sys/class/hwmon/hwmon1/oc2_event_cnt", 5)

    monkeypatch.setattr("edge_agent.cli.status._wait", throttle)
    seen = lines(agent("watch", "--seconds", 1, "--json", "--state-dir", tmp_path))
    assert [sample["throttled"] for sample in seen] == [0, 2]


def test_without_a_predictor_it_says_what_would_make_one(agent, jetson, tmp_path):
    shown = " ".join(agent("watch", "--seconds", 0, "--state-dir", tmp_path).out.split())
    assert "no mode is measured yet; run `wattfleet agent profile` first" in shown


def test_ctrl_c_ends_it_and_nothing_was_changed(agent, jetson, tmp_path, monkeypatch):
    before = jetson.everything()
    waited = iter(range(3))
    monkeypatch.setattr(
        "edge_agent.cli.status._wait",
        lambda board: next(waited, None) is None and os.kill(os.getpid(), signal.SIGINT),
    )
    ended = agent("watch", "--json", "--state-dir", tmp_path)
    assert len(lines(ended)) == 4
    assert jetson.everything() == before and jetson.written == []


def test_a_time_below_0_is_refused(agent, jetson, tmp_path):
    assert agent("watch", "--seconds", -1, "--state-dir", tmp_path).code == 2
