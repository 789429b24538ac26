"""Duties of simulated boards: their option, and requests that a board serves while it trains."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from edge_agent.devices.virtual.served_duty import RequestService, SharedBoard, serve_duty
from edge_agent.devices.virtual.simulated import ReplayDevice, SimulatedDevice, SpanFile
from edge_agent.devices.virtual.virtual_board import Load
from edge_agent.serving.device_turns import Batching, DeviceTurns, ServedSpan
from edge_agent.serving.inference import InferenceRows
from edge_agent.serving.serving_board import (
    LARGEST_BATCH,
    SWITCH_MS,
    ServingBoard,
    measure_inference,
    require_simulated,
    served,
    simulated_duty,
)
from tests.fakes.short_forms import first
from wattfleet.core.choosing import KnownModes
from wattfleet.core.duties import ConstantArrivals, Demand, Duty, keep_duty, share_in_time
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import BOARDS, PowerMode, Profile, Task, Workload, WorkloadFacts

# --- Simulated duty ---------------------------------------------------------------------------------------------------
# The duty of a simulated board: its option, and the measurements made for it.


@pytest.mark.parametrize(
    ("text", "duty"),
    [
        ("mobilenetv3:60:500", Duty("mobilenetv3", ConstantArrivals(60), 500, 0.95)),
        ("resnet:0.5:1500.5:0.99", Duty("resnet", ConstantArrivals(0.5), 1500.5, 0.99)),
    ],
)
def test_a_duty_is_read(text, duty):
    assert simulated_duty(text) == duty


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("vgg:60:500", "there are no measurements of the inference of 'vgg': choose one of mobilenetv3, resnet"),
        ("mobilenetv3", "write network:requests per second:latency in ms, such as mobilenetv3:60:500"),
        ("mobilenetv3:60", "cannot be parsed"),
        ("mobilenetv3:60:fast", "cannot be parsed"),
        ("mobilenetv3:60:500:0.9:7", "cannot be parsed"),
        ("", "cannot be parsed"),
        ("mobilenetv3:0:500", "requests per second must be above 0"),
        ("mobilenetv3:-1:500", "requests per second must be above 0"),
        ("mobilenetv3:nan:500", "requests per second must be above 0"),
        ("mobilenetv3:60:0", "latency_ms must be above 0"),
        ("mobilenetv3:60:500:1", "quantile must be 0.5 to below 1"),
    ],
)
def test_a_duty_that_cannot_be_is_refused(text, error):
    with pytest.raises(InvalidInputError, match=error):
        simulated_duty(text)


def test_a_replayed_board_has_no_inference(tmp_path):
    rows = "".join(f"4,{khz},306000000,665600000,462.3,10931\n" for khz in (1190400, 1344000))
    file = tmp_path / "board.csv"
    file.write_text("cores,cpu_khz,gpu_hz,mem_hz,minibatch_ms,power_mw\n" + rows)
    with pytest.raises(InvalidInputError, match="replayed.*omit --simulated-duty"):
        require_simulated(ReplayDevice(file, 0))


def test_inference_is_measured_once_and_close_to_the_truth(tmp_path):
    board, rows = SimulatedDevice("orin-nano", 3), InferenceRows(tmp_path)
    measure_inference(board, "mobilenetv3", rows, 3)
    measured = rows.read("mobilenetv3")
    assert len(measured) >= 40
    assert board.clock.now_s() == 0.0
    for each in measured.measurements():
        (batch_ms,), (power_mw,) = board.truth(np.array([each.mode]), served("mobilenetv3", each.batch))
        assert each.minibatch_ms == pytest.approx(batch_ms, rel=0.1)
        assert each.power_mw == pytest.approx(power_mw, rel=0.1)
    measure_inference(board, "mobilenetv3", rows, 4)
    assert rows.read("mobilenetv3").sha256() == measured.sha256()


# --- Served duty ------------------------------------------------------------------------------------------------------
# A duty that a simulated board serves while it trains.

MODES = BOARDS["agx-orin"].space.array()[::53]
BATCHES = (1, 4, 16, 32, 64)


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


@pytest.mark.parametrize("seed", first(1, [0, 1]))
@pytest.mark.parametrize(
    ("name", "arrival_per_s", "latency_ms", "budget_w"),
    first(
        2,
        [
            ("mobilenetv3", 60, 1000, 30),
            ("resnet", 120, 500, 45),
            ("mobilenetv3", 30, 200, 35),
            ("resnet", 60, 300, 40),
        ],
    ),
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


# --- Serving board ----------------------------------------------------------------------------------------------------
# A simulated board that serves simulated requests while it trains, in virtual time.


class World:
    """A board with a duty."""

    def __init__(self, folder, duty="mobilenetv3:60:500", kind="agx-orin", seed=0):
        self.simulated = SimulatedDevice(kind, seed)
        self.turns = DeviceTurns(self.simulated.clock.now_s, switch_ms=SWITCH_MS)
        self.file = SpanFile(folder / "served.jsonl", ServedSpan)
        self.board = ServingBoard(self.simulated, self.turns, simulated_duty(duty), seed, self.file)
        self.board.begin()

    def plan(self, demand, budget_mw):
        """The best mode and batch size by the true values."""
        modes = self.simulated.modes[::53]
        values = [self.simulated.truth(modes, served("mobilenetv3", batch)) for batch in BATCHES]
        columns = [np.concatenate(column) for column in zip(*values, strict=True)]
        repeated = np.repeat(BATCHES, len(modes))
        inference = Profile(np.tile(modes, (len(BATCHES), 1)), *columns, repeated, Task.INFERENCE)
        training = Profile(modes, *self.simulated.truth(modes))
        known = (KnownModes.only_measured(each) for each in (training, inference))
        return keep_duty(*known, demand, SWITCH_MS).fastest(budget_mw)


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_requests_of_a_resting_board_are_answered_as_the_queueing_theory_says(tmp_path):
    world = World(tmp_path, "resnet:30:100")
    world.turns.batching = Batching(batch=1)
    world.board.rest(1_000)
    load = world.simulated.load(world.board.current_mode(), served("resnet", 1))
    at_rest = np.array([load.minibatch_ms])
    (span,) = world.file.read()
    for limit_ms in (1.2 * at_rest[0], 2 * at_rest[0]):
        expected = share_in_time(np.array([1]), at_rest, at_rest, 30, limit_ms)[0]
        assert (np.array(span.latency_ms) <= limit_ms).mean() == pytest.approx(expected, abs=0.02)
    assert world.simulated.clock.now_s() == pytest.approx(1_000, abs=1)
    kept = world.turns.kept_duty()
    assert (kept.requests, kept.missed) == (len(span.latency_ms), sum(ms > 100 for ms in span.latency_ms))
    assert kept.arrivals_per_s == pytest.approx(30, rel=0.3)


@pytest.mark.parametrize("budget_mw", [30e3, 40e3])
def test_a_training_takes_what_was_planned_beside_the_duty(world, budget_mw):
    plan = world.plan(Demand(60, 500), budget_mw)
    world.board.apply(plan.mode)
    world.turns.batching = Batching(batch=plan.batch)
    training, meter = world.board.begin_training(), world.board.start_meter()
    begin_s = world.board.clock.now_s()
    training.finish(1_000)
    took_s = world.board.clock.now_s() - begin_s
    assert 0.97 < plan.minibatch_ms * 1_000 / 1e3 / took_s < 1.4
    # Training alone would be noticeably faster.
    assert took_s > 1.1 * world.simulated.load(plan.mode).minibatch_ms
    *_, span = world.file.read()
    assert (span.is_training, span.mode, span.batch, len(span.minibatch_end_s)) == (True, plan.mode, plan.batch, 1_000)
    assert (np.array(span.latency_ms) <= 500).mean() >= 0.95
    trace = meter.stop()
    settled = trace.power_mw[trace.at_s > begin_s + 3]
    assert settled.mean() == pytest.approx(span.power_mw, rel=0.03)
    assert settled.mean() < 1.02 * plan.power_mw
    assert world.turns.kept_duty().training_share > 0.3


def test_requests_are_answered_during_the_first_minibatch(world):
    begin_s = world.board.clock.now_s()
    world.board.begin_training()
    took_s = world.board.clock.now_s() - begin_s
    (span,) = world.file.read()
    assert span.end_s - span.begin_s == pytest.approx(took_s, abs=1e-6)
    assert len(span.latency_ms) > 30 * took_s
    assert max(span.latency_ms) < 500


def test_no_request_arrives_while_modes_are_measured(world):
    world.board.rest(10)
    step = world.board.built_in_workload()
    for _ in range(500):
        step()
    world.board.rest(10)
    before, after = world.file.read()
    assert after.begin_s > before.end_s + 20
    assert min(after.arrival_s) >= after.begin_s - 0.1
    assert world.turns.kept_duty().missed == 0


def test_a_mode_that_leaves_no_time_ends_the_training_instead_of_hanging(tmp_path, caplog):
    world = World(tmp_path, "mobilenetv3:60:60", "orin-nano")
    training = world.board.begin_training()
    training.finish(20)
    assert "only 0 of 20 minibatches were trained" in caplog.text
    *_, span = world.file.read()
    assert len(span.minibatch_end_s) == 0 and len(span.latency_ms) > 0


def test_a_cleared_duty_leaves_the_board_to_its_training(world):
    world.turns.duty = None
    training = world.board.begin_training()
    begin_s = world.board.clock.now_s()
    training.finish(100)
    load = world.simulated.load(world.board.current_mode())
    assert world.board.clock.now_s() - begin_s == pytest.approx(100 * load.minibatch_ms / 1e3, rel=0.02)


def test_modes_that_do_not_keep_the_duty_may_be_measured(world):
    lowest = PowerMode(*map(int, world.simulated.modes[0]))
    world.board.apply(lowest)
    assert (world.board.current_mode(), world.turns.mode) == (lowest, lowest)
    assert world.turns.duty_now().switch_ms == SWITCH_MS
    assert world.turns.duty_now().largest_batch == LARGEST_BATCH
