"""The current power: the wait for a first sample, missing values, and watches that last hours."""

import math
import threading

import numpy as np
import pytest

from edge_agent.devices.device import PowerTrace
from edge_agent.devices.meters import PolledMeter, latest_power_mw, power_now_mw
from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.diagnosis import samples
from wattfleet_io.clock import VirtualClock


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
