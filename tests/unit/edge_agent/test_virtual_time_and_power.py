import numpy as np
import pytest

from edge_agent.devices.virtual.physics import DeviationField
from edge_agent.devices.virtual.virtual_board import PowerTimeline
from wattfleet.modes import BOARDS
from wattfleet_io.clock import VirtualClock


def test_virtual_time_passes_only_by_sleeping():
    clock = VirtualClock()
    assert clock.now_s() == 0
    clock.sleep_s(1.5)
    clock.sleep_s(0)
    assert clock.now_s() == 1.5


@pytest.mark.parametrize("seconds", [-1, float("nan")])
def test_virtual_time_does_not_run_back(seconds):
    clock = VirtualClock()
    with pytest.raises(ValueError):
        clock.sleep_s(seconds)
    assert clock.now_s() == 0


def at(timeline, *times_s):
    return timeline.at(np.array(times_s, dtype=float))


def test_power_approaches_its_target_and_never_passes_it():
    timeline = PowerTimeline(0.0, 8000.0)
    timeline.aim(10.0, 18_000.0)
    assert at(timeline, 0, 5, 10).tolist() == [8000, 8000, 8000]
    rise = at(timeline, *np.linspace(10, 60, 200))
    assert (np.diff(rise) >= 0).all() and rise.max() <= 18_000
    # As in the Orin Nano's logs: about 60 % of the rise at 0.7 s, and all of it after 3 to 4 s.
    assert 8000 + 10_000 * 0.5 < at(timeline, 10.7)[0] < 8000 + 10_000 * 0.7
    assert at(timeline, 14)[0] > 0.98 * 18_000


def test_a_later_aim_replaces_what_was_to_follow():
    timeline, uninterrupted = PowerTimeline(0.0, 8000.0), PowerTimeline(0.0, 8000.0)
    uninterrupted.aim(1.0, 18_000.0)
    for begin_s in (1.0, 1.5, 2.0):
        timeline.aim(begin_s, 18_000.0)
        timeline.aim(begin_s + 0.5, 8000.0)
    times_s = np.linspace(0, 2.5, 50)
    assert timeline.at(times_s) == pytest.approx(uninterrupted.at(times_s))
    assert at(timeline, 4)[0] < at(uninterrupted, 4)[0]


def test_what_is_forgotten_decides_on_nothing_later():
    timeline, whole = PowerTimeline(0.0, 8000.0), PowerTimeline(0.0, 8000.0)
    for begin_s in range(1, 10):
        for each in (timeline, whole):
            each.aim(float(begin_s), 8000.0 + 1000.0 * (begin_s % 3))
        timeline.forget_before(begin_s - 0.5)
    times_s = np.linspace(8.5, 15, 50)
    assert timeline.at(times_s).tolist() == whole.at(times_s).tolist()


def test_a_misfit_field_has_the_distribution_that_was_asked_for():
    space = BOARDS["agx-orin"].space.array()
    levels = np.linspace(0.005, 0.995, 100)
    quantiles = np.sign(levels - 0.5) * np.abs(2 * levels - 1) ** 4 * 0.4
    field = DeviationField(space, levels, quantiles, np.random.default_rng(0))
    values = field.at(space)
    inner = slice(5, 95)
    assert np.quantile(values, levels)[inner] == pytest.approx(quantiles[inner], abs=0.03)
    assert values.min() >= quantiles[0] and values.max() <= quantiles[-1]


def test_misfit_fields_of_two_seeds_are_unlike():
    space = BOARDS["orin-nano"].space.array()
    levels = np.linspace(0.01, 0.99, 50)
    a, b = (DeviationField(space, levels, levels - 0.5, np.random.default_rng(seed)).at(space) for seed in (1, 2))
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.5
