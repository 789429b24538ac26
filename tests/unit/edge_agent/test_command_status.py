"""`wattfleet agent status`: the state of the device and its agent, even if parts of it cannot be read."""

import errno
import json
import os
import shutil

import pytest

from edge_agent.exporter import noted
from edge_agent.paths import SESSION_FILE
from edge_agent.profiling.journal import Discarded, ModeRecord, Renewal, RoundRecord, to_line
from edge_agent.session.status import SessionNews
from edge_agent.training.mode_change import BACKUP_FILE, backed_up
from tests.fakes.jetson_boards import NANO, ORIN_NANO
from tests.fakes.jetson_tree import FakedJetson, open_sysfs
from tests.fakes.stored_workloads import only_workload
from tests.fixtures.edge_agent import PROFILED
from wattfleet.modes import PowerMode


@pytest.fixture
def jetson(tmp_path, as_device):
    faked = FakedJetson(tmp_path / "root", ORIN_NANO)
    as_device(open_sysfs(faked))
    return faked


@pytest.fixture
def copied(profiled_state, tmp_path):
    return shutil.copytree(profiled_state, tmp_path / "copied", ignore=shutil.ignore_patterns("*.sock"))


def test_a_jetson_shows_mode_power_and_heat(agent, jetson, tmp_path):
    content = agent("status", "--state-dir", tmp_path, "--json").content
    device = content["device"]
    assert device["argument"] == "6,1510400,624750000,2133000000" and device["provenance"] == "hardware"
    assert device["power_w"] == pytest.approx(7.0)
    assert (device["temperature_c"], device["throttle_events"]) == (49.25, 3)
    assert content["workloads"] == content["problems"] == {}
    shown = agent("status", "--state-dir", tmp_path).out
    for words in ("7.0 W", "49.2 degrees C", "3 times since boot", "no, it has its owner's settings", "none yet"):
        assert words in shown


def test_what_was_measured_and_fitted_is_shown(agent, profiled_state):
    ended = agent("status", "--device", PROFILED, "--state-dir", profiled_state)
    assert ended.code == 0
    assert "12 modes of built-in, minibatch 16 (simulated)" in ended.out
    assert "roofline for built-in, fitted to 12 modes" in ended.out
    content = agent("status", "--device", PROFILED, "--state-dir", profiled_state, "--json").content
    known = content["workloads"]["built-in"]
    assert known["profile"]["measured_modes"] == 12 and known["profile"]["device_id"] == "jetson-1"
    assert known["predictor"]["fitted_to_modes"] == 12 and len(known["predictor"]["digest"]) == 64


def test_the_reason_for_which_there_is_no_session_is_shown(agent, jetson, tmp_path):
    assert "never connected" in agent("status", "--state-dir", tmp_path).out
    news = SessionNews("10.0.0.7:7070", tmp_path / SESSION_FILE)
    news.failed("the coordinator refused this device: orin is connected already; trying again")
    assert "not connected, as no agent runs" in agent("status", "--state-dir", tmp_path).out
    with backed_up(open_sysfs(jetson), tmp_path / "device"):
        ended = agent("status", "--state-dir", tmp_path)
        content = agent("status", "--state-dir", tmp_path, "--json").content
        news.connected()
        connected = agent("status", "--state-dir", tmp_path)
    assert ended.code == 0 and "orin is connected already; trying again" in " ".join(ended.out.split())
    assert content["session"]["problem"].startswith("the coordinator refused this device")
    assert content["session"]["address"] == "10.0.0.7:7070" and content["session"]["unix_s"] > 0
    assert "10.0.0.7:7070, since " in connected.out and ": connected" in connected.out


@pytest.mark.parametrize("content", ["", "[]", "[" * 9000, '{"address": 1, "problem": null}'])
def test_a_damaged_session_file_is_a_problem_and_hides_nothing_else(agent, jetson, tmp_path, content):
    (tmp_path / SESSION_FILE).write_text(content)
    ended = agent("status", "--state-dir", tmp_path)
    assert ended.code == 1 and "session.json:isdamaged" in "".join(ended.out.split()) and "7.0 W" in ended.out


def test_a_sensor_that_is_gone_is_no_power_of_0(agent, jetson, tmp_path):
    for path in jetson.glob("/sys/bus/i2c/drivers/ina3221/*/hwmon/*/curr1_input"):
        jetson.unreadable[path] = errno.EIO
    ended = agent("status", "--state-dir", tmp_path)
    assert ended.code == 0 and "cannot be read" in ended.out and "0.0 W" not in ended.out
    assert agent("status", "--state-dir", tmp_path, "--json").content["device"]["power_w"] is None


def test_a_board_without_counters_says_so(agent, tmp_path, as_device):
    as_device(open_sysfs(FakedJetson(tmp_path / "root", NANO)))
    assert "not counted by this board" in agent("status", "--state-dir", tmp_path).out


def test_a_mode_that_cannot_be_read_hides_nothing_else(agent, jetson, profiled_state):
    jetson.unreadable[f"{jetson.gpu}/max_freq"] = errno.EIO
    ended = agent("status", "--state-dir", profiled_state)
    assert ended.code == 1
    assert "max_freq: cannot be read: Input/output error" in ended.out and "12 modes of" in ended.out


def test_a_line_that_is_just_being_written_is_left_alone(agent, copied):
    path = only_workload(copied) / "profile.jsonl"
    held = path.read_bytes() + b'{"mode": [6, 15'
    path.write_bytes(held)
    content = agent("status", "--device", PROFILED, "--state-dir", copied, "--json").content
    assert content["workloads"]["built-in"]["profile"]["measured_modes"] == 12
    assert path.read_bytes() == held


@pytest.mark.parametrize("line", [0, 3])
def test_a_damaged_profile_is_named_and_hides_nothing_else(agent, copied, line):
    path = only_workload(copied) / "profile.jsonl"
    lines = path.read_text().splitlines()
    lines[line] = lines[line][:20]
    path.write_text("\n".join(lines) + "\n")
    ended = agent("status", "--device", PROFILED, "--state-dir", copied, "--json")
    assert ended.code == 1
    assert ended.content["problems"].keys() == {"profile of built-in"}
    said = ended.content["problems"]["profile of built-in"]
    assert said.startswith(f"{path}, line {line + 1}: is damaged") and "move the file away" in said
    assert ended.content["workloads"]["built-in"]["predictor"]["kind"] == "roofline"


def test_what_a_journal_discarded_and_why_it_was_renewed_is_shown(agent, copied):
    mode = PowerMode(6, 1510400, 624750000, 2133000000)
    records = [Renewal("rounds took 20 % longer", 8), ModeRecord(mode, 200, 9000, 0.1, 0.1, 40, 9, 60)]
    records += [Discarded(mode, "throttled", 3, 5), RoundRecord(mode, 210, 9100)]
    with (only_workload(copied) / "profile.jsonl").open("a") as file:
        file.writelines(json.dumps(to_line(record)) + "\n" for record in records)
    shown = agent("status", "--device", PROFILED, "--state-dir", copied)
    assert shown.code == 0
    words = " ".join(shown.out.split())
    assert "1 mode of" in words and "in 1 min 5 s; 1 disturbed measurement discarded" in words
    assert "restarted: rounds took 20 % longer" in words
    chosen = agent("choose", "--budget-w", 100, "--device", PROFILED, "--state-dir", copied, "--json").content
    assert not chosen["measured"] or chosen["minibatch_ms"] == 210
    assert agent("front", "--device", PROFILED, "--state-dir", copied).code == 0


def test_a_front_is_shown_while_nothing_counts_as_measured(agent, copied):
    with (only_workload(copied) / "profile.jsonl").open("a") as file:
        file.write(json.dumps(to_line(Renewal("another board", 8))) + "\n")
    assert agent("front", "--device", PROFILED, "--state-dir", copied).code == 0


def test_a_damaged_predictor_is_named_and_hides_nothing_else(agent, copied):
    (only_workload(copied) / "predictor" / "manifest.json").write_text("{")
    ended = agent("status", "--device", PROFILED, "--state-dir", copied)
    assert ended.code == 1
    assert "remove the folder" in " ".join(ended.out.split()) and "12 modes of" in ended.out


def test_a_profile_that_has_just_begun_is_none_yet(agent, tmp_path):
    (tmp_path / "profile.jsonl").write_text('{"journal": 1, "dev')
    assert agent("status", "--device", PROFILED, "--state-dir", tmp_path, "--json").content["workloads"] == {}


def test_an_agent_at_work_and_a_change_that_was_left_are_told_apart(agent, jetson, tmp_path):
    with backed_up(open_sysfs(jetson), tmp_path / "device"):
        shown = agent("status", "--state-dir", tmp_path).out
        assert f"in use by process {os.getpid()}, which will restore it" in shown
    (tmp_path / "device" / BACKUP_FILE).write_text(json.dumps({}))
    assert "yes; undo with `wattfleet agent restore`" in agent("status", "--state-dir", tmp_path).out


def test_where_the_agent_serves_its_metrics_is_shown_while_it_runs(agent, jetson, tmp_path):
    url = "http://127.0.0.1:9466/metrics"
    with noted(url, tmp_path):
        assert url not in agent("status", "--state-dir", tmp_path).out, "no agent runs"
        with backed_up(open_sysfs(jetson), tmp_path / "device"):
            assert url in agent("status", "--state-dir", tmp_path).out
            assert agent("status", "--state-dir", tmp_path, "--json").content["metrics"] == {"url": url}
    with backed_up(open_sysfs(jetson), tmp_path / "device"):
        assert url not in agent("status", "--state-dir", tmp_path).out
