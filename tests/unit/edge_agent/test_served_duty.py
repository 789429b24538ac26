"""A duty that a simulated board serves while it trains."""

import dataclasses

import numpy as np
import pytest

from edge_agent.devices.virtual.served_duty import RequestService, SharedBoard, serve_duty
from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.devices.virtual.virtual_board import Load
from wattfleet.choosing import KnownModes
from wattfleet.duties import Demand, keep_duty, share_in_time
from wattfleet.modes import BOARDS, Profile, Task, Workload, WorkloadFacts

MODES = BOARDS["agx-orin"].space.array()[::53]
BATCHES = (1, 4, 16, 32, 64)
SWITCH_MS = 5.0


def steady(step_ms, power_mw=20_000.0, jitter=0.0):
    return Load(step_ms, power_mw, 5_000.0, jitter)


def board(inference_ms=20.0, batch=4, minibatch_ms=50.0, jitter=0.0):
    training = None if minibatch_ms is None else steady(minibatch_ms, 30_000.0, jitter)
    return SharedBoard(training, lambda requests: steady(inference_ms, jitter=jitter), batch, SWITCH_MS)


def test_a_board_that_only_serves_answers_as_the_queueing_theory_says():
    demand = Demand(60, 100)
    run = serve_duty(board(inference_ms=40.0, minibatch_ms=None), demand, 2_000, seed=0)
    expected = share_in_time(np.array([4]), np.array([40.0]), np.array([40.0]), 60, 60.0)[0]
    assert run.share_within(60) == pytest.approx(expected, abs=0.02)
    assert run.minibatch_ms == np.inf
    # The board is busy during inference and idle otherwise.
    busy = run.batches * 0.040 / run.duration_s
    assert run.power_mw == pytest.approx(5_000 + 15_000 * busy, rel=1e-6)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("name", "arrival_per_s", "latency_ms", "budget_w"),
    [("mobilenetv3", 60, 1000, 30), ("mobilenetv3", 30, 200, 35), ("resnet", 60, 300, 40), ("resnet", 120, 500, 45)],
)
def test_a_planned_board_keeps_its_duty_and_trains_what_was_planned(seed, name, arrival_per_s, latency_ms, budget_w):
    device = SimulatedDevice("agx-orin", seed)

    def served(requests):
        return Workload(name, WorkloadFacts(Task.INFERENCE, batch=requests))

    columns = [np.concatenate(each) for each in zip(*(device.truth(MODES, served(b)) for b in BATCHES), strict=True)]
    modes, batch = np.tile(MODES, (len(BATCHES), 1)), np.repeat(BATCHES, len(MODES))
    inference = KnownModes.only_measured(Profile(modes, *columns, batch, Task.INFERENCE))
    training = KnownModes.only_measured(Profile(MODES, *device.truth(MODES)))
    demand = Demand(arrival_per_s, latency_ms)
    plan = keep_duty(training, inference, demand, SWITCH_MS).fastest(1e3 * budget_w)
    shared = SharedBoard(
        device.load(plan.mode), lambda requests: device.load(plan.mode, served(requests)), plan.batch, SWITCH_MS
    )
    run = serve_duty(shared, demand, 600, seed)
    assert run.share_within(latency_ms) >= demand.quantile
    assert 0.95 < plan.minibatch_ms / run.minibatch_ms < 1.4
    assert run.power_mw < 1.02 * plan.power_mw


def test_training_waits_where_no_minibatch_fits_before_a_request():
    # A minibatch of 90 ms, two switches and an inference of 20 ms take 120 ms in total.
    assert not len(serve_duty(board(minibatch_ms=90), Demand(10, 119), 100, 0).minibatch_end_s)
    run = serve_duty(board(minibatch_ms=90), Demand(10, 121), 100, 0)
    assert len(run.minibatch_end_s) > 300
    assert run.latency_ms.max() <= 121


def test_jitter_makes_a_board_more_careful_and_costs_training():
    demand = Demand(20, 200)
    calm, loud = (serve_duty(board(jitter=jitter), demand, 300, 0) for jitter in (0.0, 0.14))
    assert len(loud.minibatch_end_s) < len(calm.minibatch_end_s)
    assert calm.share_within(200) == 1
    assert loud.share_within(200) > 0.95


def test_without_requests_the_whole_time_is_training():
    run = serve_duty(board(), Demand(1e-9, 1000), 100, 0)
    assert (run.batches, len(run.latency_ms), run.share_within(1)) == (0, 0, 1)
    assert run.minibatch_ms == pytest.approx(50)
    assert run.power_mw == pytest.approx(30_000)


def test_an_overloaded_board_falls_behind_and_trains_nothing_more():
    run = serve_duty(board(), Demand(400, 100), 60, 0)
    assert run.latency_ms[-1] > 10 * run.latency_ms[100]
    assert run.share_within(100) < 0.1
    assert run.minibatch_end_s.max(initial=0) < 5


def test_the_same_seed_gives_the_same_run_and_another_seed_another():
    runs = [serve_duty(board(jitter=0.1), Demand(20, 300), 30, seed) for seed in (1, 1, 2)]
    first, again, other = (dataclasses.asdict(run) for run in runs)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["latency_ms"], other["latency_ms"])


def test_a_training_ends_with_its_last_minibatch():
    run = RequestService(Demand(20, 200), 0).serve(board(), 1_000, minibatches=37)
    assert len(run.minibatch_end_s) == 37
    assert run.duration_s == pytest.approx(run.minibatch_end_s[-1])
    assert run.minibatch_s == pytest.approx(np.full(37, 0.05))


def test_requests_left_at_the_end_of_a_training_are_answered_in_the_rest():
    service, demand = RequestService(Demand(50, 5_000), 0), 50
    training = service.serve(board(batch=64), 1_000, minibatches=30)
    rest = service.serve(board(batch=64, minibatch_ms=None), 100)
    assert rest.begin_s == training.begin_s + training.duration_s
    assert (rest.arrival_s < rest.begin_s).sum() > 10
    answered = np.concatenate([training.arrival_s, rest.arrival_s])
    assert (np.diff(answered) > 0).all()
    assert len(answered) == pytest.approx(demand * 100, abs=4 * np.sqrt(demand * 100))


def test_requests_do_not_wait_longer_while_their_time_stands_still():
    runs = []
    for pause_s in (0.0, 500.0):
        service = RequestService(Demand(20, 300), 3)
        service.serve(board(), 10)
        service.pause_until(service.now_s + pause_s)
        runs.append(service.serve(board(), service.now_s + 10))
    assert runs[1].latency_ms == pytest.approx(runs[0].latency_ms, abs=1e-6)
    assert runs[1].begin_s == pytest.approx(runs[0].begin_s + 500)


@pytest.mark.parametrize("every_s", [0.3, 1.0, 7.0, 1e6])
def test_mean_powers_of_spans_have_the_energy_of_all_steps(every_s):
    run = serve_duty(board(jitter=0.1), Demand(20, 300), 30, 0)
    seconds, power_mw = run.mean_powers(every_s)
    exact_mj = (np.diff(run.step_end_s, prepend=run.begin_s) * run.step_mw).sum()
    assert seconds.sum() == pytest.approx(run.duration_s)
    assert (seconds * power_mw).sum() == pytest.approx(exact_mj)
    assert run.power_mw == pytest.approx(exact_mj / run.duration_s)
