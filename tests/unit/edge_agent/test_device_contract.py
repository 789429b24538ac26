"""The contracts that every kind of device and of virtual device fulfils, and how `--device` selects one."""

from __future__ import annotations

import itertools
import json
import sys
import types
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
import pytest

from edge_agent.devices.device import Device
from edge_agent.devices.jtop import JtopDevice
from edge_agent.devices.nvml import GpuLimitError
from edge_agent.devices.selection import folder_of_device, open_device, open_virtual_board
from edge_agent.devices.virtual.simulated import ReplayDevice, SimulatedDevice
from tests.fakes.faked_host import FakedPi, open_pi, open_workstation
from tests.fakes.faked_jetson import (
    AGX_ORIN_JP5,
    AGX_ORIN_JP6,
    NANO,
    ORIN_NANO,
    XAVIER_AGX,
    FakedJetson,
    FakedNvpmodel,
    open_nvpmodel,
    open_sysfs,
)
from tests.fakes.faked_nvml import FakeGpu, FakeNvml
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import PowerMode, array_to_modes, modes_to_array

# --- Device contract --------------------------------------------------------------------------------------------------
# The contract that every kind of device fulfils.


class DeviceContract(ABC):
    kind: str
    provenance = "hardware"

    @abstractmethod
    def open(self, folder) -> Device:
        """Open a device in its state after start-up."""

    @pytest.fixture
    def device(self, tmp_path):
        return self.open(tmp_path)

    @pytest.fixture
    def some_modes(self, device):
        rows = np.random.default_rng(0).choice(len(device.modes), 6, replace=False)
        lowest, highest = device.modes.min(axis=0), device.modes.max(axis=0)
        return array_to_modes(np.vstack([device.modes[rows], [lowest], [highest], [lowest]]))

    def test_it_says_what_it_is(self, device):
        assert (device.board_kind, device.provenance) == (self.kind, self.provenance)

    def test_its_modes_are_distinct_and_it_starts_in_one_of_them(self, device):
        modes = array_to_modes(device.modes)
        assert len(set(modes)) == len(modes) > 0
        assert device.current_mode() in modes

    def test_it_tells_its_power_and_shares_of_fan_and_gpu(self, device):
        activity = device.activity()
        assert activity.power_mw > 0
        assert all(0 <= each <= 1 for each in (activity.fan_share, activity.gpu_use_share) if each is not None)

    def test_every_applied_mode_is_read_back(self, device, some_modes):
        for mode in some_modes:
            device.apply(mode)
            assert device.current_mode() == mode
            assert device.differences(mode) == []
            assert all(device.differences(other) for other in some_modes if other != mode)

    def test_applying_a_mode_again_changes_nothing(self, device, some_modes):
        device.apply(some_modes[0])
        before = device.knobs()
        device.apply(some_modes[0])
        assert device.knobs() == before

    def test_a_mode_it_does_not_offer_is_refused_and_nothing_changes(self, device):
        before = device.knobs()
        with pytest.raises(InvalidInputError, match="does not offer"):
            device.apply(PowerMode(3, 123_456, 1_000_000_007, 204_000_000))
        assert device.knobs() == before

    def test_what_was_in_force_is_restored_by_another_process(self, device, some_modes):
        first = device.current_mode()
        kept = json.loads(json.dumps(dict(device.knobs())))
        for mode in some_modes:
            device.apply(mode)
        device.restore(kept)
        assert device.current_mode() == first
        assert device.knobs() == kept

    def test_a_set_mode_is_restored_too(self, device, some_modes):
        device.apply(some_modes[0])
        kept = device.knobs()
        for mode in some_modes[1:]:
            device.apply(mode)
            device.restore(kept)
            assert device.current_mode() == some_modes[0]

    @pytest.mark.parametrize("knobs", [{}, {"mode": "none"}, {"gpu/max_hz": "1"}])
    def test_knobs_of_something_else_are_refused_and_nothing_changes(self, device, knobs):
        before = device.knobs()
        with pytest.raises(InvalidInputError, match="cannot restore"):
            device.restore(knobs)
        assert device.knobs() == before

    def test_one_knob_too_few_or_no_number_is_refused_and_nothing_changes(self, device):
        before = dict(device.knobs())
        for name in before:
            for spoiled in ({key: value for key, value in before.items() if key != name}, {**before, name: "x"}):
                if name.startswith("policy/") and not name.startswith("policy/0/") and name not in spoiled:
                    continue
                # A GPU without a limit may have been put in since the others' were read.
                with pytest.raises((InvalidInputError, GpuLimitError)):
                    device.restore(spoiled)
        assert device.knobs() == before

    def test_measuring_leaves_no_trace_even_when_it_fails(self, device):
        before = device.knobs()
        with device.measuring():
            pass
        with pytest.raises(ZeroDivisionError), device.measuring():
            raise ZeroDivisionError
        assert device.knobs() == before

    def test_power_is_sampled_in_order_until_the_meter_is_stopped(self, device):
        meter = device.start_meter()
        first = meter.read()
        device.clock.sleep_s(3)
        trace = meter.stop()
        assert len(trace.at_s) == len(trace.power_mw) >= len(first.at_s) >= 1
        assert (np.diff(trace.at_s) >= 0).all() and (trace.power_mw > 0).all()
        device.clock.sleep_s(3)
        assert np.array_equal(meter.read().at_s, trace.at_s)

    def test_conditions_are_plausible_or_absent(self, device):
        conditions = device.conditions()
        assert conditions.temperature_c is None or 0 < conditions.temperature_c < 110
        assert conditions.throttle_events is None or conditions.throttle_events >= 0


class SysfsContract(DeviceContract):
    board: object

    @property
    def kind(self):
        return self.board.kind

    def open(self, folder):
        return open_sysfs(FakedJetson(folder, self.board))

    def test_its_mode_space_is_what_its_kernel_lists(self, device):
        assert len(device.modes) == self.board.modes
        assert device.current_mode() == device.space.highest

    def test_its_power_and_temperature_are_those_of_the_right_sensors(self, device):
        assert device.start_meter().stop().power_mw[0] == self.board.power_mw
        assert device.conditions().temperature_c == self.board.hottest_c
        assert device.conditions().throttle_events == (sum(self.board.throttled) if self.board.throttled else None)

    def test_its_software_is_known(self, device):
        assert device.identity.jetpack == self.board.jetpack
        assert device.identity.model == self.board.model


class TestAgxOrinJetPack5(SysfsContract):
    board = AGX_ORIN_JP5


class TestAgxOrinJetPack6(SysfsContract):
    board = AGX_ORIN_JP6


class TestOrinNano(SysfsContract):
    board = ORIN_NANO


class TestXavierAgx(SysfsContract):
    board = XAVIER_AGX


class TestNano(SysfsContract):
    board = NANO


class NvpmodelContract(DeviceContract):
    board: object

    @property
    def kind(self):
        return self.board.kind

    def open(self, folder):
        tree = FakedJetson(folder / "root", self.board)
        return open_nvpmodel(tree, FakedNvpmodel(tree), folder / "state")


class TestNvpmodelOnAgxOrinJetPack5(NvpmodelContract):
    board = AGX_ORIN_JP5


class TestNvpmodelOnOrinNano(NvpmodelContract):
    board = ORIN_NANO


class TestWorkstation(DeviceContract):
    kind = "rtx-3090"

    def open(self, folder):
        return open_workstation(folder, FakeNvml())


class TestServerOfTwoDifferentGpus(DeviceContract):
    kind = "server"

    def open(self, folder):
        other = FakeGpu("GPU-1111", "NVIDIA RTX A5000", 230_000, 230_000, 100_000, 230_000)
        library = FakeNvml(FakeGpu(limit_mw=230_000), other)
        return open_workstation(folder, library, 'kind = "server"\nmodes = "gpu-power"\nrest_w = 90')


class TestRaspberryPi(DeviceContract):
    kind = "raspberry-pi-5"

    def open(self, folder):
        return open_pi(FakedPi(folder))


class TestSimulated(DeviceContract):
    kind = "orin-nano"
    provenance = "simulated"

    def open(self, folder):
        return SimulatedDevice("orin-nano", 1)


del DeviceContract, NvpmodelContract, SysfsContract


# --- Virtual devices --------------------------------------------------------------------------------------------------
# The contract that every kind of virtual device fulfils.


class VirtualDeviceContract(ABC):
    provenance: str

    @abstractmethod
    def open(self, seed):
        """Open a device in its initial state."""

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.folder = tmp_path

    @pytest.fixture
    def device(self):
        return self.open(seed=1)

    @pytest.fixture
    def some_modes(self, device):
        rows = np.random.default_rng(0).choice(len(device.modes), 5, replace=False)
        return array_to_modes(device.modes[rows])

    def truth_at(self, device, mode):
        minibatch_ms, power_mw = device.truth(modes_to_array([mode]))
        return float(minibatch_ms[0]), float(power_mw[0])

    def test_it_trains_by_itself_and_names_the_provenance_of_its_figures(self, device):
        assert device.built_in_workload() is not None and not device.mode_persists
        assert device.provenance == self.provenance

    def test_it_starts_in_a_mode_it_offers_with_its_clock_at_zero(self, device):
        assert device.current_mode() in array_to_modes(device.modes)
        assert device.clock.now_s() == 0

    def test_an_applied_mode_is_read_back(self, device, some_modes):
        for mode in some_modes:
            device.apply(mode)
            assert device.current_mode() == mode

    def test_what_was_in_force_is_restored_by_another_process(self, device, some_modes):
        first, second = some_modes[:2]
        device.apply(first)
        kept = json.loads(json.dumps(dict(device.knobs())))
        device.apply(second)
        device.restore(kept)
        assert device.current_mode() == first

    @pytest.mark.parametrize("knobs", [{}, {"mode": "none"}, {"mode": "[1, 2]"}, {"mode": "[3, 123, 456, 789]"}])
    def test_knobs_of_something_else_are_refused(self, device, knobs):
        before = device.current_mode()
        with pytest.raises(InvalidInputError):
            device.restore(knobs)
        assert device.current_mode() == before

    def test_a_mode_it_does_not_offer_is_refused_and_nothing_changes(self, device):
        before = device.current_mode()
        with pytest.raises(InvalidInputError, match="does not offer"):
            device.apply(PowerMode(3, 123_456, 1_000_000_007, 204_000_000))
        assert device.current_mode() == before

    def test_its_truth_is_finite_and_positive_for_every_mode(self, device):
        for values in device.truth(device.modes):
            assert values.shape == (len(device.modes),)
            assert np.isfinite(values).all() and (values > 0).all()

    def test_the_first_minibatch_takes_seconds_and_the_others_scatter_around_the_truth(self, device, some_modes):
        for mode in some_modes:
            minibatch_ms, _ = self.truth_at(device, mode)
            device.apply(mode)
            begin_s = device.clock.now_s()
            device.step()
            assert device.clock.now_s() - begin_s > 0.5
            times_ms = []
            for _ in range(400):
                begin_s = device.clock.now_s()
                device.step()
                times_ms.append(1e3 * (device.clock.now_s() - begin_s))
            assert np.median(times_ms) == pytest.approx(minibatch_ms, rel=0.04)
            assert np.std(times_ms) > 0

    def test_a_run_in_one_go_takes_as_long_as_its_steps(self, some_modes):
        at_once, stepwise = self.open(seed=3), self.open(seed=3)
        for mode in some_modes:
            at_once.apply(mode)
            stepwise.apply(mode)
            at_once.run(30)
            for _ in range(30):
                stepwise.step()
            assert at_once.clock.now_s() == pytest.approx(stepwise.clock.now_s(), rel=1e-9)

    def test_power_rises_when_training_begins_settles_at_the_truth_and_falls_back(self, device, some_modes):
        for mode in some_modes:
            minibatch_ms, power_mw = self.truth_at(device, mode)
            device.apply(mode)
            device.clock.sleep_s(10)
            resting = device.start_meter()
            device.clock.sleep_s(30)
            idle_mw = np.median(resting.stop().power_mw)
            device.step()
            begin_s, meter = device.clock.now_s(), device.start_meter()
            device.run(1 + round(60e3 / minibatch_ms))
            end_s = device.clock.now_s()
            device.clock.sleep_s(60)
            trace = meter.stop()
            settled = (trace.at_s > begin_s + 5) & (trace.at_s < end_s)
            rested = trace.at_s > end_s + 5
            assert np.median(trace.power_mw[settled]) == pytest.approx(power_mw, rel=0.03)
            assert np.median(trace.power_mw[rested]) == pytest.approx(idle_mw, rel=0.03)
            # With a misfit, the power may be so close to idle that noise hides the rise.
            if power_mw > 1.15 * idle_mw:
                assert trace.power_mw[0] < np.quantile(trace.power_mw[settled], 0.25)

    def test_samples_are_irregular_and_the_first_stands_twice(self, device):
        device.clock.sleep_s(5)
        meter = device.start_meter()
        device.clock.sleep_s(600)
        trace = meter.stop()
        gaps_s = np.diff(trace.at_s)
        assert trace.at_s[0] == 5 and gaps_s[0] == 0 and trace.power_mw[0] == trace.power_mw[1]
        assert (gaps_s[1:] > 0.5).all() and gaps_s[2:].std() > 0.03
        assert 1.0 < np.median(gaps_s) < 1.6
        assert np.isfinite(trace.power_mw).all()

    def test_samples_do_not_depend_on_when_they_are_read(self):
        often, once = self.open(seed=4), self.open(seed=4)
        meters = often.start_meter(), once.start_meter()
        for _ in range(50):
            often.run(3)
            once.run(3)
            meters[0].read()
        a, b = (meter.stop() for meter in meters)
        assert np.array_equal(a.at_s, b.at_s) and np.array_equal(a.power_mw, b.power_mw)

    def test_a_stopped_meter_sees_nothing_more(self, device):
        meter = device.start_meter()
        device.clock.sleep_s(20)
        stopped = meter.stop()
        device.run(50)
        assert np.array_equal(meter.read().at_s, stopped.at_s)

    def test_everything_follows_from_the_seed(self, some_modes):
        traces = []
        for seed in (5, 5, 6):
            device = self.open(seed)
            meter = device.start_meter()
            for mode in some_modes:
                device.apply(mode)
                device.run(20)
            traces.append((device.clock.now_s(), meter.stop().power_mw.tolist()))
        assert traces[0] == traces[1]
        assert traces[0] != traces[2]

    def test_it_trains_no_negative_number_of_minibatches(self, device):
        with pytest.raises(ValueError):
            device.run(-1)
        device.run(0)
        assert device.clock.now_s() == 0


class TestSimulatedDevice(VirtualDeviceContract):
    provenance = "simulated"

    def open(self, seed):
        return SimulatedDevice("orin-nano", seed)


class TestSimulatedWorkstation(VirtualDeviceContract):
    provenance = "simulated"

    def open(self, seed):
        return SimulatedDevice("rtx-3090", seed)


class TestReplayDevice(VirtualDeviceContract):
    provenance = "replayed"

    def open(self, seed):
        path = self.folder / "lab.csv"
        rows = [
            f"{cores},{cpu},{gpu},2133000000,{4e11 / gpu + 2e8 / (cores * cpu):.4f},{5000 + 800 * cores + gpu / 1e5}"
            for cores, cpu, gpu in itertools.product((2, 4, 6), (729_600, 1_510_400), (306_000_000, 624_750_000))
        ]
        path.write_text("cores,cpu_khz,gpu_hz,mem_hz,minibatch_ms,power_mw\n" + "\n".join(rows) + "\n")
        return ReplayDevice(path, seed)


del VirtualDeviceContract


# --- Device selection -------------------------------------------------------------------------------------------------

CHOICES = (
    "auto, sysfs, sysfs:<folder>, nvpmodel, jtop, host, description:<file>.toml,"
    " simulated:agx-orin, simulated:orin-nano, simulated:orin-nx, simulated:xavier-agx, simulated:rtx-3090,"
    " simulated:raspberry-pi-5, simulated:<kind>:real-time, replay:<file>.csv"
)


def test_a_simulated_board_by_its_kind():
    device = open_device("simulated:orin-nx", seed=1)
    assert (device.board_kind, device.provenance) == ("orin-nx", "simulated")


def test_a_replayed_profile_by_its_file(tmp_path):
    path = tmp_path / "odd:name.csv"
    path.write_text("cores,cpu_khz,gpu_hz,mem_hz,minibatch_ms,power_mw\n2,1036800,306000000,2133000000,352.7,12928\n")
    device = open_device(f"replay:{path}", seed=1)
    assert (device.board_kind, device.provenance) == ("replay:odd:name", "replayed")


def test_a_jetson_by_the_folder_that_holds_its_files(tmp_path):
    FakedJetson(tmp_path, XAVIER_AGX)
    device = open_device(f"sysfs:{tmp_path}", seed=1)
    assert (device.board_kind, device.provenance) == ("xavier-agx", "hardware")
    before = device.knobs()
    with device.measuring():
        device.apply(device.space.lowest)
    device.restore(before)
    assert device.knobs() == before


@pytest.mark.parametrize("spec", ["auto", "sysfs"])
def test_this_machine_where_it_is_a_jetson(tmp_path, spec):
    FakedJetson(tmp_path, ORIN_NANO)
    assert open_device(spec, seed=1, root=tmp_path).board_kind == "orin-nano"


def test_a_machine_that_is_no_jetson_is_told_so(tmp_path):
    with pytest.raises(InvalidInputError, match="not a Jetson"):
        open_device("sysfs", seed=1, root=tmp_path)


@pytest.mark.parametrize("spec", ["auto", "host"])
def test_a_machine_that_is_no_jetson_is_measured_as_it_is(tmp_path, spec, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    online = tmp_path / "sys/devices/system/cpu/online"
    online.parent.mkdir(parents=True)
    online.write_text("0-3")
    assert open_device(spec, seed=1, root=tmp_path).board_kind == "host"


def test_jtop_reads_the_jetson_that_the_kernels_files_set(tmp_path, monkeypatch):
    FakedJetson(tmp_path, ORIN_NANO)
    announcing = types.SimpleNamespace(
        start=lambda: None, ok=lambda: True, power={"tot": {"power": 9000, "name": "VDD_IN"}}, fan={}
    )
    library = types.SimpleNamespace(jtop=lambda interval: announcing, JtopException=OSError)
    monkeypatch.setitem(sys.modules, "jtop", library)
    device = open_device("jtop", seed=1, root=tmp_path)
    assert isinstance(device, JtopDevice) and device.board_kind == "orin-nano"
    assert array_to_modes(device.modes) == array_to_modes(open_device("sysfs", seed=1, root=tmp_path).modes)


def test_agents_that_keep_their_state_apart_still_meet_at_a_boards_lock(tmp_path):
    FakedJetson(tmp_path, ORIN_NANO)
    folders = {
        folder_of_device(spec, tmp_path / state, tmp_path)
        for spec, state in (("sysfs", "one"), ("auto", "two"), (f"sysfs:{tmp_path}", "three"))
    }
    assert folders == {tmp_path / "var/lib/wattfleet/device"}


def test_what_is_never_set_keeps_its_lock_with_its_state(tmp_path):
    for spec in ("simulated:orin-nano", "host", "auto"):
        assert folder_of_device(spec, tmp_path, root=tmp_path) == tmp_path / "device"


def test_only_virtual_boards_have_to_be_told_that_work_is_done(tmp_path):
    with pytest.raises(InvalidInputError, match="unknown device 'sysfs'; choose one of simulated:agx-orin"):
        open_virtual_board("sysfs", seed=1)


@pytest.mark.parametrize(
    "spec", ["simulated:tx2", "simulated:", "simulated", "jtop:agx-orin", "", "replay:", "agx-orin", "sysfs:", "auto:"]
)
def test_anything_else_is_answered_with_the_choices(spec):
    with pytest.raises(InvalidInputError) as refused:
        open_device(spec, seed=1)
    assert repr(spec) in str(refused.value) and CHOICES in str(refused.value)
    with pytest.raises(InvalidInputError, match="unknown device"):
        folder_of_device(spec, Path("state"))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidInputError, match="nowhere.csv: no such file"):
        open_device(f"replay:{tmp_path}/nowhere.csv", seed=1)
