"""A whole agent with a duty: it measures modes while requests arrive, reports figures, and adapts its fronts."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest

from edge_agent.learning.profiling_plan import ProfilingProgress
from edge_agent.runtime.readiness import parked_mode
from edge_agent.serving.duty_figures import DutyFile
from edge_agent.serving.duty_planning import InferenceMeasuring
from edge_agent.serving.duty_service import DutyClient
from edge_agent.serving.inference import InferenceRows
from tests.fakes.coordinator_in_process import CoordinatorInProcess
from tests.fakes.duties import duty
from tests.fakes.fittings import fitting_here, keep_duty_here
from tests.fakes.polling import until
from tests.fakes.running_agent import agent, new_board, ready_agent
from wattfleet.core.modes import Profile, Task, array_to_modes
from wattfleet.flower import AgentUnreachableError, until_deadline
from wattfleet.serving import DutyServer, share_device
from wattfleet_proto.convert import front_from_message, kept_duty_from_message

# --- Daemon duties ----------------------------------------------------------------------------------------------------
# A whole agent with a duty: it measures its modes while requests arrive, reports figures, and remembers the duty.


MODES = 6
LIMIT_MS = 1500.0
"""Longer than the fits, which a real agent runs in a process of its own, keep this one from answering."""


@pytest.fixture(autouse=True)
def fits_here(monkeypatch):
    monkeypatch.setattr("edge_agent.runtime.readiness.fitting_process", fitting_here)


@pytest.fixture
def coordinator(tmp_path):
    with CoordinatorInProcess(tmp_path, MODES).running() as running:
        yield running


class SharedBoard:
    """Counts how often requests, minibatches and mode changes overlap on a simulated board."""

    def __init__(self):
        self.device = new_board()
        self.parked, self.is_slow_when_parked = parked_mode(self.device), False
        self.may_train = threading.Event()
        self.busy = self.overlaps = self.minibatches = 0
        self.modes = []
        self._step, self._apply = self.device.step, self.device.apply
        self.device.step, self.device.apply = self.step, self.apply

    def hold(self, seconds):
        self.busy += 1
        self.overlaps += self.busy > 1
        time.sleep(seconds)
        self.overlaps += self.busy > 1
        self.busy -= 1

    def step(self):
        assert self.may_train.wait(60)
        self.minibatches += 1
        self.hold(0.004)
        self._step()

    def apply(self, mode):
        self.hold(0.002)
        self.modes.append(mode)
        self._apply(mode)

    def answer(self, inputs):
        self.hold(0.1 if self.is_slow_when_parked and self.device.current_mode() == self.parked else 0.004)
        return inputs


@pytest.fixture
def shared_board():
    return SharedBoard()


def requests_until(server, ended, latencies):
    chance = random.Random(1)
    while not ended.is_set():
        asked_s = time.monotonic()
        server.submit(1).add_done_callback(
            lambda _, asked_s=asked_s: latencies.append((time.monotonic() - asked_s) * 1e3)
        )
        time.sleep(chance.expovariate(40))


def test_modes_are_measured_while_requests_arrive_and_are_answered_in_time(tmp_path, coordinator, shared_board):
    (tmp_path / "state").mkdir()
    DutyFile(tmp_path / "state").write(duty(LIMIT_MS, per_s=40))
    ended, latencies = threading.Event(), []
    with (
        agent(coordinator, tmp_path, shared_board.device) as running,
        DutyServer(shared_board.answer, agent_socket=str(running.settings.device.socket)) as server,
    ):
        until(lambda: server.answer_blocking(0) == 0 and any(each.lease.duty.servers for each in coordinator.reports))
        client = threading.Thread(target=requests_until, args=(server, ended, latencies))
        client.start()
        time.sleep(0.5)
        shared_board.may_train.set()
        until(lambda: shared_board.minibatches > 1)
        shared_board.overlaps = 0  # the first minibatch was held so long that requests stopped waiting for it
        until(lambda: coordinator.is_ready() or running.has_ended)
        ended.set()
        client.join()
    assert running.error is None
    assert shared_board.minibatches > 40 and len(set(shared_board.modes)) > 1, "modes were measured"
    assert shared_board.overlaps == 0
    assert sum(latency > LIMIT_MS for latency in latencies) <= 0.05 * len(latencies)


@pytest.mark.slow
def test_an_agent_gets_ready_before_anything_is_known_of_its_inference_server(tmp_path, coordinator, shared_board):
    (tmp_path / "state").mkdir()
    DutyFile(tmp_path / "state").write(duty(LIMIT_MS))
    with agent(coordinator, tmp_path, shared_board.device) as running:
        with DutyServer(shared_board.answer, agent_socket=str(running.settings.device.socket)):
            until(lambda: any(each.lease.duty.servers for each in list(coordinator.reports)) or running.has_ended)
            shared_board.may_train.set()
            until(lambda: coordinator.is_ready() or running.has_ended)
            assert not running.has_ended
    assert running.error is None


def test_the_coordinator_gets_the_figures_and_a_restart_keeps_the_duty(tmp_path, coordinator, shared_board):
    shared_board.may_train.set()
    (tmp_path / "state").mkdir()
    DutyFile(tmp_path / "state").write(duty(LIMIT_MS))
    for _ in range(2):
        with ready_agent(coordinator, tmp_path, shared_board.device) as running:
            socket = str(running.settings.device.socket)
            with DutyServer(shared_board.answer, agent_socket=socket) as server:
                server.answer_blocking(1)
                coordinator.reports.clear()

                def has_reported():
                    kept = [each.lease.duty for each in list(coordinator.reports) if each.lease.HasField("duty")]
                    return any(kept_duty_from_message(each).requests == 1 for each in kept)

                until(has_reported)
        coordinator.reports.clear()


def test_a_round_in_a_mode_that_breaks_the_duty_is_refused_and_the_next_one_trains(tmp_path, coordinator, shared_board):
    shared_board.is_slow_when_parked = True
    shared_board.may_train.set()
    (tmp_path / "state").mkdir()
    DutyFile(tmp_path / "state").write(duty(latency_ms=60))
    with ready_agent(coordinator, tmp_path, shared_board.device) as running:
        modes = array_to_modes(shared_board.device.modes)
        with DutyServer(shared_board.answer, agent_socket=str(running.settings.device.socket)) as server:
            for number in range(10):
                server.answer_blocking(number)
            until(lambda: shared_board.device.current_mode() != shared_board.parked)  # while idle, it keeps the duty
            coordinator.grant("7/1", shared_board.parked)
            with pytest.raises(AgentUnreachableError, match="is not known to answer the requests of 'camera'"):
                running.round("7/1", shared_board.parked)
            coordinator.grant("7/2", modes[-1])
            assert running.round("7/2", modes[-1])


def test_a_round_is_trained_in_turns_beside_the_requests(tmp_path, coordinator, shared_board):
    shared_board.may_train.set()
    with ready_agent(coordinator, tmp_path, shared_board.device) as running:
        mode = array_to_modes(shared_board.device.modes)[-1]
        coordinator.grant("7/1", mode)
        socket = str(running.settings.device.socket)
        ended, latencies, trained = threading.Event(), [], []
        with DutyServer(shared_board.answer, agent_socket=socket) as server:
            client = threading.Thread(target=requests_until, args=(server, ended, latencies))

            def train():
                client.start()
                for batch in share_device(range(100)):  # gets the socket from the mod
                    shared_board.hold(0.01)
                    trained.append(batch)

            shared_board.overlaps = 0
            assert running.round("7/1", mode, train)
            ended.set()
            client.join()
        until(lambda: coordinator.observed == ["7/1"])
        [seen] = [each.observation for each in list(coordinator.reports) if each.HasField("observation")]
        assert seen.beside_duty
    assert trained == list(range(100))
    assert len(latencies) > 10
    assert shared_board.overlaps == 0


# --- Daemon duty fronts -----------------------------------------------------------------------------------------------
# A whole agent with a duty: its fronts take the duty into account, or state why there is no front.


@pytest.fixture
def keeps_duties_here(monkeypatch):
    monkeypatch.setattr("edge_agent.runtime.agent.keep_duty_in_process", keep_duty_here)


@pytest.fixture
def board():
    return new_board()


def measured(board, batch_ms):
    """Rows of inference in every fiftieth mode, with batches of 1 and 2."""
    modes = np.repeat(board.modes[::50], 2, axis=0)
    batch = np.resize([1, 2], len(modes))
    return Profile(modes, batch_ms * batch * 1.0, np.full(len(modes), 9e3), batch, Task.INFERENCE)


def announced_front(coordinator):
    """The first front of a workload that a run announces."""
    coordinator.announce("digits")
    until(lambda: coordinator.front_of("digits") is not None)
    return coordinator.front_of("digits")


@pytest.mark.usefixtures("keeps_duties_here")
def test_a_front_beside_a_duty_ends_with_the_duty(tmp_path, coordinator, board):
    state = tmp_path / "state"
    state.mkdir()
    DutyFile(state).write(duty(5_000.0, per_s=5.0))
    InferenceRows(state).add("camera", measured(board, 50.0))
    with ready_agent(coordinator, tmp_path, board) as running:
        announced_front(coordinator)
        # The first front may be from the reference alone, without what the other workload showed about this board.
        until(lambda: coordinator.front_of("digits").no_front == "")
        beside = coordinator.front_of("digits")
        assert DutyClient(running.settings.device.socket).clear()
        until(lambda: coordinator.front_of("digits").front != beside.front)
    alone = coordinator.front_of("digits")
    assert beside.idle_w > 8 > alone.idle_w, "what requests take, and rest alone"
    # 5 requests per second of 50 ms each take a quarter of the time.
    ratio = front_from_message(beside.front).epoch_s.min() / front_from_message(alone.front).epoch_s.min()
    assert 1.1 < ratio < 2.0


@pytest.mark.usefixtures("keeps_duties_here")
def test_an_unknown_inference_leaves_no_front_until_requests_were_answered(tmp_path, coordinator, board):
    state = tmp_path / "state"
    state.mkdir()
    DutyFile(state).write(duty(5_000.0, per_s=2.0))
    with ready_agent(coordinator, tmp_path, board) as running:
        assert announced_front(coordinator).no_front.startswith("the inference of 'camera' has not been measured yet")
        socket = str(running.settings.device.socket)
        with DutyServer(lambda inputs: inputs, largest_batch=32, agent_socket=socket) as server:

            def has_front():
                server.answer_blocking(1)
                time.sleep(0.05)
                return coordinator.fronts[-1].no_front == ""

            until(has_front)
    assert len(front_from_message(coordinator.fronts[-1].front).modes) > 1


@pytest.mark.usefixtures("keeps_duties_here")
def test_a_ready_device_measures_the_inference_that_is_wanted(tmp_path, coordinator, board, monkeypatch):
    """During the measurement, the device is not ready for trainings; afterwards, it rests again."""
    mode, measured, wanted = array_to_modes(board.modes)[99], [], []

    def measure(measuring, modes, report):
        measured.extend(modes)
        report(ProfilingProgress(1, 1, "measured the inference"))
        wanted.clear()

    monkeypatch.setattr("edge_agent.runtime.device_service._MEASURE_INTERVAL_S", 0.05)
    monkeypatch.setattr(InferenceMeasuring, "wanted", lambda measuring, profiled: list(wanted))
    monkeypatch.setattr(InferenceMeasuring, "measure", measure)
    with ready_agent(coordinator, tmp_path, board):
        wanted.append(mode)
        until(lambda: "measured the inference" in coordinator.details)
        until(coordinator.is_ready)
    assert measured == [mode]


@pytest.mark.usefixtures("keeps_duties_here")
def test_no_inference_is_measured_between_a_grant_and_its_training(tmp_path, coordinator, board, monkeypatch):
    """Otherwise the training would be refused, and its round would fail."""
    mode, measured, asked = array_to_modes(board.modes)[99], [], []

    def wanted(measuring, profiled):
        asked.append(profiled)
        return [] if measured else [mode]

    def measure(measuring, modes, report):
        measured.extend(modes)

    monkeypatch.setattr("edge_agent.runtime.device_service._MEASURE_INTERVAL_S", 0.05)
    monkeypatch.setattr(InferenceMeasuring, "wanted", lambda measuring, profiled: [])
    with ready_agent(coordinator, tmp_path, board) as running:
        coordinator.grant("7/1", mode)
        monkeypatch.setattr(InferenceMeasuring, "wanted", wanted)
        monkeypatch.setattr(InferenceMeasuring, "measure", measure)
        until(lambda: len(asked) > 3)
        assert not measured
        assert running.round("7/1", mode)
        until(lambda: measured == [mode])


@pytest.mark.usefixtures("keeps_duties_here")
def test_a_training_is_stopped_once_the_duty_takes_the_whole_board(tmp_path, coordinator, board, monkeypatch):
    """The app is told after one more minibatch, which is attempted between requests."""
    monkeypatch.setattr("edge_agent.serving.duty_service.require_live_time", lambda device: None)
    # A device that measures inference or a new workload refuses trainings.
    monkeypatch.setattr(InferenceMeasuring, "wanted", lambda measuring, profiled: [])
    state = tmp_path / "state"
    state.mkdir()
    DutyFile(state).write(duty(5_000.0, per_s=1.0))
    InferenceRows(state).add("camera", measured(board, 50.0))
    fastest, trained = array_to_modes(board.modes)[-1], []
    with ready_agent(coordinator, tmp_path, board) as running:
        announced_front(coordinator)
        measuring = "measuring the workload 'digits' before its first round"
        until(lambda: measuring in coordinator.details and coordinator.is_ready())
        socket = str(running.settings.device.socket)
        with DutyServer(lambda inputs: inputs, agent_socket=socket):

            def train():
                for batch in share_device(until_deadline(range(10**6))):
                    trained.append(batch)
                    if batch == 3:
                        DutyClient(running.settings.device.socket).set(duty(75.0, per_s=1.0))
                    time.sleep(0.1)

            assert running.round("7/1", fastest, train, workload="digits")
        until(lambda: "takes the whole board" in coordinator.fronts[-1].no_front)
    assert 4 <= len(trained) < 1_000


@pytest.mark.usefixtures("keeps_duties_here")
@pytest.mark.slow
def test_a_duty_that_takes_the_whole_board_is_reported_as_the_reason(tmp_path, coordinator, board):
    state = tmp_path / "state"
    state.mkdir()
    DutyFile(state).write(duty(5_000.0, per_s=30.0))
    InferenceRows(state).add("camera", measured(board, 50.0))
    with ready_agent(coordinator, tmp_path, board):
        front = announced_front(coordinator)
    assert (
        "the duty cannot be kept: 30 requests a second are more than this board answers in any mode" in front.no_front
    )
    assert len(front.front.points) == 0
