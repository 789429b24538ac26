"""What an agent shows of itself: `wattfleet agent status` and `watch`, the current power, and its metrics."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
import threading
from dataclasses import replace
from datetime import datetime, timezone

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from edge_agent.devices.device import PowerTrace
from edge_agent.devices.meters import PolledMeter, latest_power_mw, power_now_mw
from edge_agent.devices.selection import open_virtual_board
from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.diagnosis import samples
from edge_agent.exporter import AgentCollector, AgentFigures, DeviceFacts, noted
from edge_agent.paths import SESSION_FILE
from edge_agent.profiling.known_workload import BUILT_IN, KnownWorkload
from edge_agent.profiling.stored_profile import WorkloadFolders
from edge_agent.session.status import SessionNews
from edge_agent.training.mode_change import BACKUP_FILE, backed_up
from tests.fakes.agent_settings import only_workload
from tests.fakes.faked_jetson import NANO, ORIN_NANO, FakedJetson, open_sysfs
from tests.fakes.fleets import HOT
from tests.fakes.prometheus import DocumentedMetric, documented_metrics_of_agents, promtool
from tests.fixtures.edge_agent import PROFILED
from wattfleet.common.clock import VirtualClock
from wattfleet.core.duties import KeptDuty
from wattfleet.core.modes import (
    Discarded,
    JournalledRound,
    ModeRecord,
    PowerMode,
    Renewal,
    Workload,
    array_to_modes,
    to_line,
)
from wattfleet_proto.device_state import DeviceState

# --- `status` ---------------------------------------------------------------------------------------------------------
# `wattfleet agent status`: the state of the device and its agent, even if parts of it cannot be read.


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
    records += [Discarded(mode, "throttled", 3, 5), JournalledRound(mode, 210, 9100)]
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


# --- `watch` ----------------------------------------------------------------------------------------------------------
# `wattfleet agent watch`: what it prints every second, and which values it reports as missing.


@pytest.fixture
def no_waiting(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)


def lines(ended):
    assert ended.code == 0, ended.err
    return [json.loads(line) for line in ended.out.splitlines()]


@pytest.mark.usefixtures("no_waiting")
def test_a_line_of_json_for_every_second(agent, jetson, tmp_path):
    seen = lines(agent("watch", "--seconds", 3, "--json", "--state-dir", tmp_path))
    assert [sample["at_s"] for sample in seen] == [0, 1, 2, 3]
    assert seen[0]["power_w"] == pytest.approx(7.0)
    assert (seen[0]["temperature_c"], seen[0]["throttled"]) == (49.25, 0)
    assert seen[0]["argument"] == "6,1510400,624750000,2133000000"
    assert seen[0]["expected"] is None and seen[0]["power_ratio"] is None


@pytest.mark.usefixtures("no_waiting")
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


@pytest.mark.usefixtures("no_waiting")
def test_the_prediction_of_one_of_several_workloads_is_shown(agent, profiled_state, as_device, tmp_path):
    state = shutil.copytree(profiled_state, tmp_path / "state")
    (WorkloadFolders(state).prepare(KnownWorkload(Workload("other"))) / "predictor").mkdir()
    as_device(open_virtual_board(PROFILED, seed=0))
    command = ("watch", "--seconds", 0, "--json", "--state-dir", state)
    (unnamed,) = lines(agent(*command))
    (named,) = lines(agent(*command, "--workload", BUILT_IN))
    assert unnamed["expected"] is None and named["expected"]["measured"] is True


@pytest.mark.usefixtures("no_waiting")
def test_power_that_cannot_be_read_is_missing_and_not_0(agent, jetson, tmp_path):
    for path in jetson.glob("/sys/bus/i2c/drivers/ina3221/*/hwmon/*/curr1_input"):
        jetson.unreadable[path] = errno.EIO
    assert lines(agent("watch", "--seconds", 0, "--json", "--state-dir", tmp_path))[0]["power_w"] is None
    shown = agent("watch", "--seconds", 1, "--state-dir", tmp_path).out
    assert "cannot be read" in shown and "0.0 W" not in shown


@pytest.mark.usefixtures("no_waiting")
def test_a_mode_that_cannot_be_read_hides_nothing_else_that_is_watched(agent, jetson, tmp_path):
    jetson.unreadable[f"{jetson.gpu}/max_freq"] = errno.EIO
    (sample,) = lines(agent("watch", "--seconds", 0, "--json", "--state-dir", tmp_path))
    assert sample["mode"] is None and "max_freq: cannot be read" in sample["problem"]
    assert sample["power_w"] == pytest.approx(7.0)
    assert "max_freq: cannot be read" in agent("watch", "--seconds", 0, "--state-dir", tmp_path).out


@pytest.mark.usefixtures("no_waiting")
def test_throttling_is_counted_from_the_beginning_of_the_watch(agent, jetson, tmp_path, monkeypatch):
    def throttle(board):
        board.clock.sleep_s(1)
        jetson.put("/sys/class/hwmon/hwmon1/oc2_event_cnt", 5)

    monkeypatch.setattr("edge_agent.cli.status._wait", throttle)
    seen = lines(agent("watch", "--seconds", 1, "--json", "--state-dir", tmp_path))
    assert [sample["throttled"] for sample in seen] == [0, 2]


@pytest.mark.usefixtures("no_waiting")
def test_without_a_predictor_it_says_what_would_make_one(agent, jetson, tmp_path):
    shown = " ".join(agent("watch", "--seconds", 0, "--state-dir", tmp_path).out.split())
    assert "no mode is measured yet; run `wattfleet agent profile` first" in shown


@pytest.mark.usefixtures("no_waiting")
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


@pytest.mark.usefixtures("no_waiting")
def test_a_time_below_0_is_refused(agent, jetson, tmp_path):
    assert agent("watch", "--seconds", -1, "--state-dir", tmp_path).code == 2


# --- Power now --------------------------------------------------------------------------------------------------------
# The current power: the wait for a first sample, missing values, and watches that last hours.


class AnnouncedMeter:
    """A meter with a fixed trace, of which it shows the samples up to now, or up to its stop."""

    def __init__(self, clock, at_s, power_mw):
        self.clock, self.end_s = clock, math.inf
        self.trace = PowerTrace(np.array(at_s, dtype=float), np.array(power_mw, dtype=float))

    def read(self):
        seen = self.trace.at_s <= min(self.clock.now_s(), self.end_s)
        return PowerTrace(self.trace.at_s[seen], self.trace.power_mw[seen])

    def stop(self):
        self.end_s = min(self.end_s, self.clock.now_s())
        return self.read()


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
def board():
    return SimulatedDevice("orin-nano", 1)


def test_the_first_sample_is_waited_for(clock):
    assert latest_power_mw(AnnouncedMeter(clock, [0.5, 1.0], [7_000, 8_000]), clock) == 7_000
    assert 0.5 <= clock.now_s() < 0.7


def test_a_counter_of_energy_is_waited_for_until_it_tells_a_power(clock):
    assert latest_power_mw(AnnouncedMeter(clock, [0, 0.2], [math.nan, 7_000]), clock) == 7_000


@pytest.mark.parametrize("trace", [([], []), ([0], [math.nan]), ([0, 0.2], [math.nan, math.nan])])
def test_power_that_does_not_come_is_missing_before_long(clock, trace):
    assert math.isnan(latest_power_mw(AnnouncedMeter(clock, *trace), clock))
    assert clock.now_s() < 2


def test_the_last_sample_of_a_dead_sampler_is_not_the_power_of_now(clock):
    meter = AnnouncedMeter(clock, [0, 1], [7_000, 8_000])
    clock.sleep_s(2.5)
    assert latest_power_mw(meter, clock) == 8_000
    clock.sleep_s(1)
    assert math.isnan(latest_power_mw(meter, clock))


def test_a_board_whose_meter_announces_later_has_a_power(board):
    board.start_meter = lambda: AnnouncedMeter(board.clock, [board.clock.now_s() + 0.5], [7_000])
    assert power_now_mw(board) == 7_000
    board.start_meter = lambda: AnnouncedMeter(board.clock, [board.clock.now_s() + 0.5], [7_000])
    with_power = next(samples(board, None, 0, lambda: None))
    assert with_power.power_w == 7


def test_a_sampler_that_dies_while_it_is_watched_shows_as_missing(board):
    board.start_meter = lambda: AnnouncedMeter(board.clock, [0, 1], [7_000, 8_000])
    looks = samples(board, None, 5, lambda: board.clock.sleep_s(1))
    assert [look.power_w for look in looks] == [7, 8, 8, 8, None, None]


def test_a_watch_of_hours_copies_no_trace_of_hours(board):
    copied, meters = [], []

    class CountingMeter(AnnouncedMeter):
        def read(self):
            trace = super().read()
            copied.append(len(trace.at_s))
            return trace

    def start_meter():
        begin_s = board.clock.now_s()
        meters.append(CountingMeter(board.clock, begin_s + np.arange(0, 10_000, 0.2), np.full(50_000, 7_000)))
        return meters[-1]

    board.start_meter = start_meter
    looks = list(samples(board, None, 3600, lambda: board.clock.sleep_s(1)))
    assert len(looks) == 3601 and all(look.power_w == 7 for look in looks)
    assert max(copied) < 2_000
    assert all(math.isfinite(meter.end_s) for meter in meters), "every meter was stopped"


def test_an_unexpected_error_costs_a_sample_and_not_the_meter(clock, caplog):
    answers, spent = iter([5_000.0, ValueError("garbled"), ZeroDivisionError(), 6_000.0]), threading.Event()

    class Ticks(threading.Event):
        def wait(self, timeout=None):
            clock.sleep_s(timeout)
            if clock.now_s() > 0.7:
                spent.set()
                return super().wait()
            return False

    def read_mw():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    meter = PolledMeter(read_mw, clock, 0.2, Ticks())
    assert spent.wait(10)
    assert np.array_equal(meter.stop().power_mw, [5_000, np.nan, np.nan, 6_000], equal_nan=True)
    assert caplog.text.count("Traceback") == 1 and "garbled" in caplog.text


# --- Agent collector --------------------------------------------------------------------------------------------------
# The metrics that an agent exports: all documented names, known values, and no sample where a value is unknown.

KEPT = KeptDuty("camera", 500, 0.95, 29.5, 12, 2, (*[1] * 11, *[0] * 6), 1500.0, 350.0, 4, 0.5, 1)
BUSY = AgentFigures(HOT, DeviceState.PROFILING, 7, 20, True, 2, 5, 30.0, KEPT)
IDLE = AgentFigures(None, DeviceState.ENROLLED, 0, None, False, 0, 0, None, None)
EXPIRES = datetime(2026, 5, 1, tzinfo=timezone.utc)


def registry_of(figures: AgentFigures, expires_at: datetime | None = EXPIRES) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(AgentCollector(DeviceFacts("orin", "agx-orin", "hardware"), lambda: figures, lambda: expires_at))
    return registry


def exported(figures: AgentFigures, expires_at: datetime | None = EXPIRES) -> dict[str, float]:
    text = generate_latest(registry_of(figures, expires_at)).decode()
    samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
    return {each.name: each.value for each in samples if "le" not in each.labels}


def test_the_documentation_lists_every_metric_of_an_agent_as_it_is_exported() -> None:
    found = [
        DocumentedMetric(
            family.name + ("_total" if family.type == "counter" else ""),
            family.type,
            frozenset(family.samples[0].labels) - {"le"},
            family.documentation,
        )
        for family in registry_of(BUSY).collect()
    ]
    in_order = sorted(found, key=lambda each: each.name)
    assert sorted(documented_metrics_of_agents(), key=lambda each: each.name) == in_order


def test_prometheus_finds_no_fault_with_an_agents_metrics() -> None:
    for figures in (BUSY, IDLE):
        promtool("check", "metrics", text=generate_latest(registry_of(figures)).decode())


def test_every_sensor_is_exported_in_base_units() -> None:
    found = exported(BUSY)
    assert found["wattfleet_board_power_watts"] == 42.5
    assert found["wattfleet_board_temperature_celsius"] == 71
    assert found["wattfleet_board_online_cores"] == 4
    assert found["wattfleet_board_cpu_clock_hertz"] == 1_036_800_000
    assert found["wattfleet_board_gpu_clock_hertz"] == 510_000_000
    assert found["wattfleet_board_memory_clock_hertz"] == 2_133_000_000
    assert (found["wattfleet_board_fan_ratio"], found["wattfleet_board_gpu_use_ratio"]) == (0.5, 0.9)
    assert found["wattfleet_board_energy_joules_total"] == 1_200
    assert found["wattfleet_board_throttle_events_total"] == 3
    assert found["wattfleet_board_power_readable"] == 1


def test_the_agents_own_state_is_exported() -> None:
    found = exported(BUSY)
    assert found["wattfleet_agent_connected"] == 1
    assert (found["wattfleet_agent_profiled_modes"], found["wattfleet_agent_modes_to_measure"]) == (7, 20)
    assert (found["wattfleet_agent_granted_watts"], found["wattfleet_agent_trainings_total"]) == (30, 5)
    assert found["wattfleet_agent_waiting_reports"] == 2
    assert found["wattfleet_agent_certificate_expiry_timestamp_seconds"] == EXPIRES.timestamp()
    [state] = [
        each.labels
        for family in registry_of(BUSY).collect()
        if family.name == "wattfleet_agent_state"
        for each in family.samples
    ]
    assert state == {"state": "profiling"}
    assert found["wattfleet_agent_duty_requests_total"] == 12 and found["wattfleet_agent_duty_missed_total"] == 2
    assert found["wattfleet_agent_duty_latency_seconds_count"] == 11


def test_what_is_unknown_has_no_sample_and_is_no_zero() -> None:
    known = {
        *("wattfleet_agent_info", "wattfleet_build_info", "wattfleet_agent_state", "wattfleet_agent_connected"),
        *("wattfleet_agent_waiting_reports", "wattfleet_agent_profiled_modes", "wattfleet_agent_trainings_total"),
        "wattfleet_board_power_readable",
    }
    found = exported(IDLE, None)
    assert set(found) == known
    assert found["wattfleet_board_power_readable"] == found["wattfleet_agent_connected"] == 0
    blind = exported(replace(BUSY, sample=replace(HOT, power_w=None, gpu_use_share=0.0)))
    assert "wattfleet_board_power_watts" not in blind and blind["wattfleet_board_gpu_use_ratio"] == 0
