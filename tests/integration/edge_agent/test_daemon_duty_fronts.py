"""A whole agent with a duty: its fronts take the duty into account, or state why there is no front."""

from __future__ import annotations

import time

import numpy as np
import pytest

from edge_agent.learning.profiling_plan import Progress
from edge_agent.serving.duty_figures import DutyFile
from edge_agent.serving.duty_planning import InferenceMeasuring
from edge_agent.serving.duty_service import DutyClient
from edge_agent.serving.inference import InferenceRows
from tests.fakes.coordinator_in_process import CoordinatorInProcess
from tests.fakes.duty_agent import duty
from tests.fakes.fitting_here import fitting_here, keep_duty_here
from tests.fakes.polling import until
from tests.fakes.running_agent import new_board, ready_agent
from wattfleet.modes import Profile, Task, array_to_modes
from wattfleet_flower import until_deadline
from wattfleet_proto.convert import front_from_message
from wattfleet_serving import DutyServer, share_device


@pytest.fixture(autouse=True)
def fits_here(monkeypatch):
    monkeypatch.setattr("edge_agent.runtime.readiness.fitting_process", fitting_here)
    monkeypatch.setattr("edge_agent.runtime.agent.keep_duty_in_process", keep_duty_here)


@pytest.fixture
def coordinator(tmp_path):
    with CoordinatorInProcess(tmp_path, 6).running() as running:
        yield running


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


def test_a_ready_device_measures_the_inference_that_is_wanted(tmp_path, coordinator, board, monkeypatch):
    """During the measurement, the device is not ready for trainings; afterwards, it rests again."""
    mode, measured, wanted = array_to_modes(board.modes)[99], [], []

    def measure(measuring, modes, report):
        measured.extend(modes)
        report(Progress(1, 1, "measured the inference"))
        wanted.clear()

    monkeypatch.setattr("edge_agent.runtime.device_service._MEASURE_INTERVAL_S", 0.05)
    monkeypatch.setattr(InferenceMeasuring, "wanted", lambda measuring, profiled: list(wanted))
    monkeypatch.setattr(InferenceMeasuring, "measure", measure)
    with ready_agent(coordinator, tmp_path, board):
        wanted.append(mode)
        until(lambda: "measured the inference" in coordinator.details)
        until(coordinator.is_ready)
    assert measured == [mode]


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
