"""The contract that every kind of virtual device fulfils."""

import itertools
import json
from abc import ABC, abstractmethod

import numpy as np
import pytest

from edge_agent.devices.virtual.simulated import ReplayDevice, SimulatedDevice
from wattfleet.errors import InvalidInputError
from wattfleet.modes import PowerMode, array_to_modes, modes_to_array


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
            assert device.clock.now_s() - begin_s > 1
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
