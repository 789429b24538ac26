"""A whole agent with a duty: it measures its modes while requests arrive, reports figures, and remembers the duty."""

from __future__ import annotations

import random
import threading
import time

import pytest

from edge_agent.runtime.readiness import parked_mode
from edge_agent.serving.duty_figures import DutyFile
from tests.fakes.coordinator_in_process import CoordinatorInProcess
from tests.fakes.duty_agent import duty
from tests.fakes.fitting_here import fitting_here
from tests.fakes.polling import until
from tests.fakes.running_agent import agent, new_board, ready_agent
from wattfleet.modes import array_to_modes
from wattfleet_flower import AgentUnreachableError
from wattfleet_proto.convert import kept_duty_from_message
from wattfleet_serving import DutyServer, share_device

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
def board():
    return SharedBoard()


def requests_until(server, ended, latencies):
    chance = random.Random(1)
    while not ended.is_set():
        asked_s = time.monotonic()
        server.submit(1).add_done_callback(
            lambda _, asked_s=asked_s: latencies.append((time.monotonic() - asked_s) * 1e3)
        )
        time.sleep(chance.expovariate(40))


def test_modes_are_measured_while_requests_arrive_and_are_answered_in_time(tmp_path, coordinator, board):
    (tmp_path / "state").mkdir()
    DutyFile(tmp_path / "state").write(duty(LIMIT_MS, per_s=40))
    ended, latencies = threading.Event(), []
    with (
        agent(coordinator, tmp_path, board.device) as running,
        DutyServer(board.answer, agent_socket=str(running.settings.device.socket)) as server,
    ):
        until(lambda: server.answer_blocking(0) == 0 and any(each.lease.duty.servers for each in coordinator.reports))
        client = threading.Thread(target=requests_until, args=(server, ended, latencies))
        client.start()
        time.sleep(0.5)
        board.may_train.set()
        until(lambda: board.minibatches > 1)
        board.overlaps = 0  # the first minibatch was held so long that requests stopped waiting for it
        until(lambda: coordinator.is_ready() or running.has_ended)
        ended.set()
        client.join()
    assert running.error is None
    assert board.minibatches > 40 and len(set(board.modes)) > 1, "modes were measured"
    assert board.overlaps == 0
    assert sum(latency > LIMIT_MS for latency in latencies) <= 0.05 * len(latencies)


def test_an_agent_gets_ready_before_anything_is_known_of_its_inference_server(tmp_path, coordinator, board):
    (tmp_path / "state").mkdir()
    DutyFile(tmp_path / "state").write(duty(LIMIT_MS))
    with agent(coordinator, tmp_path, board.device) as running:
        with DutyServer(board.answer, agent_socket=str(running.settings.device.socket)):
            until(lambda: any(each.lease.duty.servers for each in list(coordinator.reports)) or running.has_ended)
            board.may_train.set()
            until(lambda: coordinator.is_ready() or running.has_ended)
            assert not running.has_ended
    assert running.error is None


def test_the_coordinator_gets_the_figures_and_a_restart_keeps_the_duty(tmp_path, coordinator, board):
    board.may_train.set()
    (tmp_path / "state").mkdir()
    DutyFile(tmp_path / "state").write(duty(LIMIT_MS))
    for _ in range(2):
        with ready_agent(coordinator, tmp_path, board.device) as running:
            socket = str(running.settings.device.socket)
            with DutyServer(board.answer, agent_socket=socket) as server:
                server.answer_blocking(1)
                coordinator.reports.clear()

                def has_reported():
                    kept = [each.lease.duty for each in list(coordinator.reports) if each.lease.HasField("duty")]
                    return any(kept_duty_from_message(each).requests == 1 for each in kept)

                until(has_reported)
        coordinator.reports.clear()


def test_a_round_in_a_mode_that_breaks_the_duty_is_refused_and_the_next_one_trains(tmp_path, coordinator, board):
    board.is_slow_when_parked = True
    board.may_train.set()
    (tmp_path / "state").mkdir()
    DutyFile(tmp_path / "state").write(duty(latency_ms=60))
    with ready_agent(coordinator, tmp_path, board.device) as running:
        modes = array_to_modes(board.device.modes)
        with DutyServer(board.answer, agent_socket=str(running.settings.device.socket)) as server:
            for number in range(10):
                server.answer_blocking(number)
            until(lambda: board.device.current_mode() != board.parked)  # while idle, it keeps the duty
            coordinator.grant("7/1", board.parked)
            with pytest.raises(AgentUnreachableError, match="is not known to answer the requests of 'camera'"):
                running.round("7/1", board.parked)
            coordinator.grant("7/2", modes[-1])
            assert running.round("7/2", modes[-1])


def test_a_round_is_trained_in_turns_beside_the_requests(tmp_path, coordinator, board):
    board.may_train.set()
    with ready_agent(coordinator, tmp_path, board.device) as running:
        mode = array_to_modes(board.device.modes)[-1]
        coordinator.grant("7/1", mode)
        socket = str(running.settings.device.socket)
        ended, latencies, trained = threading.Event(), [], []
        with DutyServer(board.answer, agent_socket=socket) as server:
            client = threading.Thread(target=requests_until, args=(server, ended, latencies))

            def train():
                client.start()
                for batch in share_device(range(100)):  # gets the socket from the mod
                    board.hold(0.01)
                    trained.append(batch)

            board.overlaps = 0
            assert running.round("7/1", mode, train)
            ended.set()
            client.join()
        until(lambda: coordinator.observed == ["7/1"])
        [seen] = [each.observation for each in list(coordinator.reports) if each.HasField("observation")]
        assert seen.beside_duty
    assert trained == list(range(100))
    assert len(latencies) > 10
    assert board.overlaps == 0
