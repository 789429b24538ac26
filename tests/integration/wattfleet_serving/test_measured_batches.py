"""Batches that `DutyServer` repeats for the agent while it measures the device."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

import pytest

from edge_agent.profiling.mode_measurement import MeasurementError, ProfilerSettings
from edge_agent.serving.duty_planning import InferenceMeasuring
from edge_agent.serving.server_stream import ServerGoneError
from tests.fakes.duty_agent import DutyAgent, duty, duty_agent_at
from tests.fakes.planned_duty import FAST, HALF, Planning
from tests.fakes.polling import until
from tests.fakes.real_time_board import MODE
from wattfleet.modes import Measurement, Profile, Task
from wattfleet_serving import DutyServer


class Model:
    """Returns its inputs, immediately or once it is no longer held; it can fail for batches of more than one."""

    def __init__(self) -> None:
        self.batches: list[list[object]] = []
        self.fails = False
        self.held = threading.Event()
        self.held.set()

    def __call__(self, inputs: list[object]) -> list[object]:
        self.batches.append(list(inputs))
        assert self.held.wait(10)
        time.sleep(0.02)
        if self.fails and len(inputs) > 1:
            raise MemoryError("no room for so many")
        return inputs


@pytest.fixture
def agent(tmp_path):
    with duty_agent_at(tmp_path / "agent.sock", duty(latency_ms=5_000.0)) as running:
        yield running


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def server(agent, model):
    with DutyServer(model, largest_batch=8, agent_socket=agent.socket) as server:
        yield server
        model.held.set()


def on(agent: DutyAgent, work: Coroutine[Any, Any, float]) -> Future[float]:
    return asyncio.run_coroutine_threadsafe(work, agent.loop)


def test_a_batch_has_copies_of_the_latest_answered_request(agent, model, server):
    with pytest.raises(ServerGoneError, match="no connected inference server can measure"):
        on(agent, agent.servicer.measured_ms(3, 20.0)).result(10)
    server.answer_blocking("a picture")
    until(lambda: agent.servicer.largest_measured == 8)
    assert on(agent, agent.servicer.measured_ms(3, 20.0)).result(10) >= 20.0
    assert model.batches == [["a picture"], ["a picture"] * 3]
    with pytest.raises(ServerGoneError):
        on(agent, agent.servicer.measured_ms(9, 20.0)).result(10)
    assert agent.turns.kept_duty().requests == 1, "nobody has asked for the copies"
    assert agent.turns.times.minibatch_ms(MODE) is None, "they tell nothing of trainings"


def test_requests_go_before_a_batch_that_would_make_them_late(agent, model, server):
    server.answer_blocking("first")
    until(lambda: agent.servicer.largest_measured == 8)
    model.held.clear()
    measured = on(agent, agent.servicer.measured_ms(2, 20.0))
    until(lambda: len(model.batches) == 2)
    waiting = server.submit("second")
    time.sleep(0.1)
    following = on(agent, agent.servicer.measured_ms(4, 4_900.0))  # of 5 s
    time.sleep(0.1)
    model.held.set()
    assert waiting.result(10) == "second"
    assert measured.result(10) > 0 and following.result(10) > 0
    assert [len(batch) for batch in model.batches] == [1, 2, 1, 4]
    assert model.batches[2] == ["second"]


def test_a_model_that_fails_for_a_batch_goes_on_answering(agent, model, server):
    server.answer_blocking("first")
    until(lambda: agent.servicer.largest_measured == 8)
    model.fails = True
    with pytest.raises(MeasurementError, match="MemoryError: no room for so many"):
        on(agent, agent.servicer.measured_ms(8, 20.0)).result(10)
    assert server.answer_blocking("second") == "second"


def test_a_server_that_goes_ends_what_is_measured(agent, model, tmp_path):
    server = DutyServer(model, largest_batch=8, agent_socket=agent.socket)
    server.answer_blocking("first")
    until(lambda: agent.servicer.largest_measured == 8)
    model.held.clear()
    measured = on(agent, agent.servicer.measured_ms(2, 20.0))
    until(lambda: len(model.batches) == 2)
    server._stream.close()  # noqa: SLF001 - as if its process were killed
    with pytest.raises(ServerGoneError, match="has disconnected"):
        measured.result(10)
    assert agent.servicer.largest_measured == 0
    model.held.set()
    server.close()


def test_a_mode_is_measured_over_the_socket_while_requests_are_answered(agent, model, server, tmp_path):
    """With a board in real time, whose power is 12 W; it takes a few seconds until the power has settled."""
    planning = Planning(tmp_path)
    planning._turns = agent.turns  # noqa: SLF001 - plans for this agent
    planning.rows.add("camera", Profile.of([Measurement(HALF, 20.0, 9e3, 1)], Task.INFERENCE))
    server.answer_blocking("a picture")
    until(lambda: agent.servicer.largest_measured == 8)
    planning.front()
    settings = ProfilerSettings(minibatches=5, power_samples=3)
    measuring = InferenceMeasuring(agent.device, agent.turns, planning, planning.rows, agent.servicer, 2, settings)
    agent.turns.judge = planning.judge
    (wanted,) = measuring.wanted([FAST])
    ending, late = threading.Event(), []

    def requests() -> None:
        while not ending.wait(0.05):
            begun_s = time.monotonic()
            server.answer_blocking("another")
            late.append(time.monotonic() - begun_s)

    asking = threading.Thread(target=requests)
    asking.start()
    measuring.measure([wanted], lambda progress: None)
    ending.set()
    asking.join()
    rows = planning.rows.read("camera").measurements()
    assert {(each.mode, each.batch, each.power_mw) for each in rows} >= {(FAST, 1, 12e3), (FAST, 8, 12e3)}
    assert all(20.0 <= each.minibatch_ms < 500.0 for each in rows)
    assert len(late) > 10 and max(late) < 5.0, "each within the limit"
