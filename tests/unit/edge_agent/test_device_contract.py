"""The contract that every kind of device fulfils."""

import json
from abc import ABC, abstractmethod

import numpy as np
import pytest

from edge_agent.devices.device import Device
from edge_agent.devices.virtual.simulated import SimulatedDevice
from tests.fakes.faked_nvpmodel import FakedNvpmodel, open_nvpmodel
from tests.fakes.jetson_boards import AGX_ORIN_JP5, AGX_ORIN_JP6, NANO, ORIN_NANO, XAVIER_AGX
from tests.fakes.jetson_tree import FakedJetson, open_sysfs
from wattfleet.errors import InvalidInputError
from wattfleet.modes import PowerMode, array_to_modes


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
                with pytest.raises(InvalidInputError):
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


class TestSimulated(DeviceContract):
    kind = "orin-nano"
    provenance = "simulated"

    def open(self, folder):
        return SimulatedDevice("orin-nano", 1)


del DeviceContract, NvpmodelContract, SysfsContract
