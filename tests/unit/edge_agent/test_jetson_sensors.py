"""Fan, power rails, thermal zones and throttle counters of a Jetson, and their failures."""

import errno

import numpy as np
import pytest

from edge_agent.devices.device import Activity, ModeNotAppliedError
from edge_agent.devices.meters import PolledMeter
from tests.fakes.jetson_boards import (
    AGX_ORIN_JP5,
    FAKED_BOARDS,
    NANO,
    ORIN_NANO,
)
from tests.fakes.jetson_tree import INA_HWMON, INA_IIO, FakedJetson, Ticks, open_sysfs
from wattfleet_io.clock import VirtualClock

BOARDS = pytest.mark.parametrize("board", FAKED_BOARDS, ids=lambda board: board.name)
# How kernels show a CPU policy whose cores are all offline.
OFFLINE_POLICIES = pytest.mark.parametrize(
    "offline_policy", [None, errno.EINVAL, errno.EBUSY], ids=["vanishes", "EINVAL", "EBUSY"]
)


@pytest.fixture
def orin(tmp_path):
    return FakedJetson(tmp_path, AGX_ORIN_JP5)


def test_the_fan_runs_full_while_measuring_and_is_given_back(orin):
    device = open_sysfs(orin)
    with device.measuring():
        assert orin.read(orin.fan) == "255" and not orin.fan_service_runs
    assert orin.read(orin.fan) == "80" and orin.fan_service_runs


@pytest.mark.parametrize("refused", [False, True])
def test_a_fan_whose_service_does_not_start_again_stays_at_full_speed(orin, refused):
    device = open_sysfs(orin)
    kept = device.knobs()
    with device.measuring():
        pass
    orin.run(["systemctl", "stop", "nvfancontrol"], "")
    orin.fan_service_starts = False
    if refused:
        orin.unwritable[orin.fan] = errno.EIO
    with pytest.raises(ModeNotAppliedError, match="systemctl start nvfancontrol: Job .* failed") as error:
        device.restore(kept)
    assert orin.read(orin.fan) == ("80" if refused else "255")
    assert ("wanted 255, the kernel refused it" in str(error.value)) == refused


def test_a_fan_without_its_service_gets_its_speed_back(orin):
    orin.run(["systemctl", "stop", "nvfancontrol"], "")
    orin.put(orin.fan, 120)
    with open_sysfs(orin).measuring():
        assert orin.read(orin.fan) == "255"
    assert orin.read(orin.fan) == "120" and not orin.fan_service_runs


def test_a_fan_that_something_else_turns_down_is_no_condition_to_measure_in(orin):
    device = open_sysfs(orin)
    orin.deaf.add(orin.fan)
    with pytest.raises(ModeNotAppliedError, match="stop the other program that controls the fan"), device.measuring():
        pytest.fail("measured")
    assert orin.fan_service_runs


@pytest.mark.parametrize(
    ("board", "sensor"),
    [
        (AGX_ORIN_JP5, f"{INA_HWMON}/1-0041/hwmon/hwmon4/curr2_input"),
        (ORIN_NANO, f"{INA_HWMON}/1-0040/hwmon/hwmon3/in1_input"),
        (NANO, f"{INA_IIO}/6-0040/iio:device0/in_power0_input"),
    ],
)
def test_a_rail_that_cannot_be_read_makes_the_sample_missing(tmp_path, board, sensor):
    tree = FakedJetson(tmp_path, board)
    device = open_sysfs(tree)
    clock = VirtualClock()
    ticks = Ticks(clock, 4)
    tree.unreadable[sensor] = errno.EIO
    meter = PolledMeter(device.power.read_mw, clock, 0.5, ticks)
    ticks.spent.wait()
    assert np.isnan(meter.stop().power_mw).tolist() == [True] * 5
    del tree.unreadable[sensor]
    assert device.start_meter().stop().power_mw.tolist()[0] == board.power_mw


def test_activity_has_the_fan_and_the_gpu_as_far_as_the_kernel_tells(orin):
    device = open_sysfs(orin)
    assert device.activity() == Activity(device.power.read_mw(), 80 / 255, None)
    orin.put(f"{orin.gpu}/device/load", 250)
    assert device.activity().gpu_use_share == 0.25


def test_a_rail_that_is_not_the_boards_does_not_matter(tmp_path):
    tree = FakedJetson(tmp_path, ORIN_NANO)
    tree.unreadable[f"{INA_HWMON}/1-0040/hwmon/hwmon3/in2_input"] = errno.EIO
    assert open_sysfs(tree).power.read_mw() == ORIN_NANO.power_mw


def test_a_missing_rail_is_named_and_nothing_stands_for_it(orin):
    orin.location(f"{INA_HWMON}/1-0041/hwmon/hwmon4/in2_label").unlink()
    device = open_sysfs(orin)
    assert device.power.missing == ("VDDQ_VDD2_1V8AO",)
    assert np.isnan(device.power.read_mw())


def test_a_meter_samples_at_its_interval_even_when_the_sensor_is_slow():
    clock = VirtualClock()
    ticks = Ticks(clock, 20)

    def slow_mw():
        clock.sleep_s(0.03)
        return 5_000.0

    meter = PolledMeter(slow_mw, clock, 0.2, ticks)
    ticks.spent.wait()
    trace = meter.stop()
    assert np.allclose(trace.at_s, 0.2 * np.arange(21))
    assert (trace.power_mw == 5_000).all()


def test_the_hottest_zone_on_the_chip_counts_where_none_is_named_so(tmp_path):
    tree = FakedJetson(tmp_path, AGX_ORIN_JP5)
    tree.unreadable["/sys/class/thermal/thermal_zone3/temp"] = errno.EAGAIN
    assert open_sysfs(tree).conditions().temperature_c == 48.0


def test_without_any_zone_the_temperature_is_absent(tmp_path):
    tree = FakedJetson(tmp_path, AGX_ORIN_JP5)
    for number in range(4):
        tree.unreadable[f"/sys/class/thermal/thermal_zone{number}/temp"] = errno.EAGAIN
    assert open_sysfs(tree).conditions().temperature_c is None


def test_a_throttle_counter_that_fails_makes_the_count_absent(orin):
    device = open_sysfs(orin)
    orin.put("/sys/class/hwmon/hwmon1/oc2_event_cnt", 5)
    assert device.conditions().throttle_events == 8
    orin.unreadable["/sys/class/hwmon/hwmon1/oc3_event_cnt"] = errno.EIO
    assert device.conditions().throttle_events is None
