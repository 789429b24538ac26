"""A simulated board that serves simulated requests while it trains, in virtual time."""

import numpy as np
import pytest

from edge_agent.devices.virtual.simulated import SimulatedDevice, SpanFile
from edge_agent.serving.device_turns import Batching, DeviceTurns, ServedSpan
from edge_agent.serving.serving_board import LARGEST_BATCH, SWITCH_MS, ServingBoard, served, simulated_duty
from wattfleet.choosing import KnownModes
from wattfleet.duties import Demand, keep_duty, share_in_time
from wattfleet.modes import PowerMode, Profile, Task

BATCHES = (1, 4, 16, 32, 64)


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
    world.board.rest(3_000)
    load = world.simulated.load(world.board.current_mode(), served("resnet", 1))
    at_rest = np.array([load.minibatch_ms])
    (span,) = world.file.read()
    for limit_ms in (1.2 * at_rest[0], 2 * at_rest[0]):
        expected = share_in_time(np.array([1]), at_rest, at_rest, 30, limit_ms)[0]
        assert (np.array(span.latency_ms) <= limit_ms).mean() == pytest.approx(expected, abs=0.02)
    assert world.simulated.clock.now_s() == pytest.approx(3_000, abs=1)
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
