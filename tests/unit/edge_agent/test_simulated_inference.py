import numpy as np
import pytest

from edge_agent.devices.virtual.physics import inference_parameters
from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.profiling.profiler import Profiler
from wattfleet.modes import BOARDS, Task, Workload, WorkloadFacts, modes_to_array, read_profile
from wattfleet.prediction.roofline import power_mw, settings_of, step_time_ms

BATCHES = (1, 4, 16, 32, 64)
CORPORA = {"mobilenetv3": "agx_orin_mobilenetv3_inference.csv", "resnet": "agx_orin_resnet_inference.csv"}


def served(name, batch, **facts):
    return Workload(name, WorkloadFacts(Task.INFERENCE, batch=batch, **facts))


def off(simulated, measured):
    return np.abs(simulated / measured - 1)


@pytest.mark.data
@pytest.mark.parametrize("name", CORPORA)
def test_inference_is_near_the_real_board_but_not_the_same(corpora, name):
    real = read_profile(corpora / CORPORA[name])
    device = SimulatedDevice("agx-orin", 0)
    for batch in BATCHES:
        rows = real.rows(real.batch == batch)
        batch_ms, serving_mw = device.truth(rows.modes, served(name, batch))
        assert 0.01 < np.median(off(batch_ms, rows.minibatch_ms)) < 0.10
        assert 0.01 < np.median(off(serving_mw, rows.power_mw)) < 0.14


@pytest.mark.data
@pytest.mark.parametrize(("name", "time_mape", "power_mape"), [("mobilenetv3", 0.08, 0.07), ("resnet", 0.06, 0.06)])
def test_the_physics_of_inference_has_the_stated_errors(corpora, name, time_mape, power_mape):
    real, fitted = read_profile(corpora / CORPORA[name]), inference_parameters(name)
    settings = settings_of(real.modes, real.batch)
    assert off(step_time_ms(fitted.time, settings), real.minibatch_ms).mean() < time_mape
    assert off(power_mw(fitted.power, fitted.time, settings), real.power_mw).mean() < power_mape


@pytest.mark.parametrize("name", [*CORPORA, "another"])
@pytest.mark.parametrize("kind", BOARDS)
def test_larger_batches_take_longer_but_answer_more_a_second(kind, name):
    device = SimulatedDevice(kind, 0)
    some = BOARDS[kind].space.array()[::41]
    times_ms, powers_mw = zip(*(device.truth(some, served(name, batch)) for batch in (1, 16, 64)), strict=True)
    assert np.isfinite([times_ms, powers_mw]).all()
    assert (np.array(powers_mw) > 0).all()
    for less_ms, more_ms, factor in ((times_ms[0], times_ms[1], 16), (times_ms[1], times_ms[2], 4)):
        assert (more_ms > less_ms).mean() > 0.95
        assert np.median(factor * less_ms / more_ms) > 1.02


def test_an_orin_nano_answers_more_slowly_and_draws_less_than_an_agx():
    at = served("resnet", 16)
    nano, agx = (
        SimulatedDevice(kind, 0).truth(modes_to_array([BOARDS[kind].space.highest]), at)
        for kind in ("orin-nano", "agx-orin")
    )
    assert 2 < nano[0][0] / agx[0][0] < 6
    assert nano[1][0] < 0.6 * agx[1][0]


def test_boards_of_a_kind_deviate_each_in_its_own_way_and_always_in_the_same():
    some, at = BOARDS["agx-orin"].space.array()[::97], served("mobilenetv3", 4)
    first, again, other = (SimulatedDevice("agx-orin", seed).truth(some, at) for seed in (1, 1, 2))
    for same, different, own in zip(again, other, first, strict=True):
        assert np.array_equal(own, same)
        assert 0.01 < np.median(off(different, own)) < 0.15


def test_a_network_that_was_not_measured_takes_as_long_as_its_operations():
    device = SimulatedDevice("agx-orin", 0)
    maxn = modes_to_array([BOARDS["agx-orin"].space.highest])
    small, large = (device.truth(maxn, served("mine", 64, step_flops=64 * flops))[0][0] for flops in (4e9, 40e9))
    assert 5 < large / small < 12


def test_serving_leaves_the_training_of_the_board_as_it_was():
    served_first, untouched = SimulatedDevice("orin-nx", 3), SimulatedDevice("orin-nx", 3)
    some = BOARDS["orin-nx"].space.array()[::97]
    served_first.truth(some, served("resnet", 16))
    for one, other in zip(served_first.truth(some), untouched.truth(some), strict=True):
        assert np.array_equal(one, other)


def test_the_profiler_measures_inference_as_it_measures_training():
    device, at = SimulatedDevice("agx-orin", 0), served("mobilenetv3", 16)
    mode = BOARDS["agx-orin"].space.highest
    device.pace(at)
    measured = Profiler(device).measure(mode, device.step).measurement
    batch_ms, serving_mw = device.truth(modes_to_array([mode]), at)
    assert measured.minibatch_ms == pytest.approx(batch_ms[0], rel=0.05)
    assert measured.power_mw == pytest.approx(serving_mw[0], rel=0.05)
