"""`DutyServer`: batches, errors of single requests, clients that disconnect, measuring, and its light imports."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotAnsweredError
from typing import Any

import numpy as np
import pytest

import wattfleet.serving
from edge_agent.profiling.mode_measurement import MeasurementError, ProfilerSettings
from edge_agent.serving.duty_planning import InferenceMeasuring
from edge_agent.serving.server_stream import ServerGoneError
from tests.fakes.boards import MODE
from tests.fakes.duties import FAST, HALF, DutyAgent, Planning, duty, duty_agent_at
from tests.fakes.polling import eventually, until
from wattfleet.core.modes import Measurement, Profile, Task
from wattfleet.serving import DutyServer, RequestRefusedError, ServerClosedError

# --- Duty server ------------------------------------------------------------------------------------------------------
# `DutyServer` alone: batches, errors of single requests, shapes, and clients that disconnect.


class Doubles:
    """A model that doubles numbers; it waits while it is held, and fails for 13."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.held = threading.Event()
        self.held.set()

    def __call__(self, inputs: list[int]) -> list[int]:
        self.batches.append(list(inputs))
        assert self.held.wait(30)
        if 13 in inputs:
            raise ArithmeticError("13 cannot be doubled")
        return [2 * each for each in inputs]


@pytest.fixture
def model() -> Doubles:
    return Doubles()


@pytest.fixture
def server(model: Doubles, tmp_path) -> Iterator[DutyServer[int, int]]:
    """A server without an agent."""
    with DutyServer(model, largest_batch=4, agent_socket=str(tmp_path / "none.sock")) as server:
        yield server
        model.held.set()


def test_without_an_agent_threads_and_tasks_are_answered(server, model):
    assert server.answer_blocking(4) == 8

    async def several() -> list[int]:
        return await asyncio.gather(*(server.answer(number) for number in range(12)))

    assert asyncio.run(several()) == [2 * number for number in range(12)]
    assert max(map(len, model.batches)) <= 4


def test_requests_gather_while_a_batch_is_computed(server, model):
    model.held.clear()
    answers = [server.submit(0)]
    until(lambda: model.batches == [[0]])
    answers += [server.submit(number) for number in (1, 2, 3, 4, 5)]
    model.held.set()
    assert [answer.result(10) for answer in answers] == [0, 2, 4, 6, 8, 10]
    assert model.batches == [[0], [1, 2, 3, 4], [5]]


def test_only_the_request_that_the_model_fails_for_gets_its_error(server, model):
    model.held.clear()
    first = server.submit(0)
    until(lambda: model.batches == [[0]])
    good, bad, other = server.submit(1), server.submit(13), server.submit(2)
    model.held.set()
    assert (first.result(10), good.result(10), other.result(10)) == (0, 2, 4)
    with pytest.raises(ArithmeticError, match="13 cannot be doubled"):
        bad.result(10)
    assert server.answer_blocking(7) == 14


def test_a_model_that_loses_an_output_is_told_so(tmp_path):
    with DutyServer(lambda inputs: [], agent_socket=str(tmp_path / "none.sock")) as server:
        with pytest.raises(ValueError, match="0 outputs for 1 inputs"):
            server.answer_blocking(np.zeros(3))


def test_requests_of_another_shape_are_refused_and_the_others_answered(tmp_path):
    def total(inputs):
        return np.stack(inputs).sum(axis=1).tolist()

    with DutyServer(total, agent_socket=str(tmp_path / "none.sock")) as server:
        assert server.answer_blocking(np.ones(3)) == 3
        with pytest.raises(RequestRefusedError, match=r"shape \(4,\), but this server answers \(3,\)"):
            server.answer_blocking(np.ones(4))
        assert server.answer_blocking(np.ones(3)) == 3


def test_a_first_request_that_the_model_cannot_answer_does_not_set_the_shape(tmp_path):
    def only_vectors_of_three(inputs):
        return [float(each @ np.ones(3)) for each in inputs]

    with DutyServer(only_vectors_of_three, agent_socket=str(tmp_path / "none.sock")) as server:
        with pytest.raises(ValueError):
            server.answer_blocking(np.ones(4))
        assert server.answer_blocking(np.ones(3)) == 3


def test_a_first_request_that_was_cancelled_does_not_set_the_shape(tmp_path):
    began, held = threading.Event(), threading.Event()

    def slow(inputs):
        began.set()
        assert held.wait(10)
        return inputs

    with DutyServer(slow, largest_batch=1, agent_socket=str(tmp_path / "none.sock")) as server:
        first = server.submit(np.ones(4))
        first.cancel()
        second = server.submit(np.ones(3))
        assert began.wait(10)
        held.set()
        assert second.result(10).shape == (3,)


def test_a_model_that_exits_ends_only_its_request(tmp_path):
    def exits(inputs):
        if -1 in inputs:
            raise SystemExit(3)
        return inputs

    with DutyServer(exits, agent_socket=str(tmp_path / "none.sock")) as server:
        with pytest.raises(SystemExit):
            server.answer_blocking(-1)
        assert server.answer_blocking(1, timeout_s=10) == 1


def test_a_client_that_goes_away_is_dropped_without_harm(server, model):
    model.held.clear()

    async def impatient() -> int:
        first = asyncio.ensure_future(server.answer(0))
        await eventually(lambda: model.batches == [[0]])
        gone, kept = asyncio.ensure_future(server.answer(1)), asyncio.ensure_future(server.answer(2))
        await asyncio.sleep(0.01)
        gone.cancel()
        first.cancel()  # its batch is being computed
        await asyncio.sleep(0)
        model.held.set()
        return await kept

    assert asyncio.run(impatient()) == 4
    assert [1] not in model.batches and model.batches[-1] == [2]


def test_a_request_that_takes_too_long_is_dropped(server, model):
    model.held.clear()
    server.submit(0)
    until(lambda: model.batches == [[0]])
    with pytest.raises(NotAnsweredError):
        server.answer_blocking(1, timeout_s=0.05)
    model.held.set()
    assert server.answer_blocking(2) == 4
    assert [1] not in model.batches


def test_too_many_waiting_requests_are_refused(model, tmp_path):
    with DutyServer(model, max_waiting=2, agent_socket=str(tmp_path / "none.sock")) as server:
        model.held.clear()
        answers = [server.submit(0)]
        until(lambda: model.batches == [[0]])
        answers += [server.submit(1), server.submit(2)]
        with pytest.raises(RequestRefusedError, match="2 requests are already waiting"):
            server.submit(3)
        model.held.set()
        assert [answer.result(10) for answer in answers] == [0, 2, 4]


def test_a_closed_server_answers_nobody(model, tmp_path):
    server = DutyServer(model, agent_socket=str(tmp_path / "none.sock"))
    model.held.clear()
    running = server.submit(0)
    until(lambda: model.batches == [[0]])
    waiting = server.submit(1)
    closing = threading.Thread(target=server.close)
    closing.start()
    time.sleep(0.02)
    model.held.set()
    closing.join(10)
    assert running.result(10) == 0
    with pytest.raises(ServerClosedError):
        waiting.result(10)
    with pytest.raises(ServerClosedError):
        server.answer_blocking(2)


# --- Measured batches -------------------------------------------------------------------------------------------------
# Batches that `DutyServer` repeats for the agent while it measures the device.


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
def measured_model():
    return Model()


@pytest.fixture
def measured_server(agent, measured_model):
    with DutyServer(measured_model, largest_batch=8, agent_socket=agent.socket) as measured_server:
        yield measured_server
        measured_model.held.set()


def on(agent: DutyAgent, work: Coroutine[Any, Any, float]) -> Future[float]:
    return asyncio.run_coroutine_threadsafe(work, agent.loop)


def test_a_batch_has_copies_of_the_latest_answered_request(agent, measured_model, measured_server):
    with pytest.raises(ServerGoneError, match="no connected inference server can measure"):
        on(agent, agent.servicer.measured_ms(3, 20.0)).result(10)
    measured_server.answer_blocking("a picture")
    until(lambda: agent.servicer.largest_measured == 8)
    assert on(agent, agent.servicer.measured_ms(3, 20.0)).result(10) >= 20.0
    assert measured_model.batches == [["a picture"], ["a picture"] * 3]
    with pytest.raises(ServerGoneError):
        on(agent, agent.servicer.measured_ms(9, 20.0)).result(10)
    assert agent.turns.kept_duty().requests == 1, "nobody has asked for the copies"
    assert agent.turns.times.minibatch_ms(MODE) is None, "they tell nothing of trainings"


def test_requests_go_before_a_batch_that_would_make_them_late(agent, measured_model, measured_server):
    measured_server.answer_blocking("first")
    until(lambda: agent.servicer.largest_measured == 8)
    measured_model.held.clear()
    measured = on(agent, agent.servicer.measured_ms(2, 20.0))
    until(lambda: len(measured_model.batches) == 2)
    waiting = measured_server.submit("second")
    time.sleep(0.1)
    following = on(agent, agent.servicer.measured_ms(4, 4_900.0))  # of 5 s
    time.sleep(0.1)
    measured_model.held.set()
    assert waiting.result(10) == "second"
    assert measured.result(10) > 0 and following.result(10) > 0
    assert [len(batch) for batch in measured_model.batches] == [1, 2, 1, 4]
    assert measured_model.batches[2] == ["second"]


def test_a_model_that_fails_for_a_batch_goes_on_answering(agent, measured_model, measured_server):
    measured_server.answer_blocking("first")
    until(lambda: agent.servicer.largest_measured == 8)
    measured_model.fails = True
    with pytest.raises(MeasurementError, match="MemoryError: no room for so many"):
        on(agent, agent.servicer.measured_ms(8, 20.0)).result(10)
    assert measured_server.answer_blocking("second") == "second"


def test_a_server_that_goes_ends_what_is_measured(agent, measured_model, tmp_path):
    measured_server = DutyServer(measured_model, largest_batch=8, agent_socket=agent.socket)
    measured_server.answer_blocking("first")
    until(lambda: agent.servicer.largest_measured == 8)
    measured_model.held.clear()
    measured = on(agent, agent.servicer.measured_ms(2, 20.0))
    until(lambda: len(measured_model.batches) == 2)
    measured_server._stream.close()  # noqa: SLF001 - as if its process were killed
    with pytest.raises(ServerGoneError, match="has disconnected"):
        measured.result(10)
    assert agent.servicer.largest_measured == 0
    measured_model.held.set()
    measured_server.close()


def test_a_mode_is_measured_over_the_socket_while_requests_are_answered(
    agent, measured_model, measured_server, tmp_path
):
    """With a board in real time, whose power is 12 W; it takes a few seconds until the power has settled."""
    planning = Planning(tmp_path)
    planning._turns = agent.turns  # noqa: SLF001 - plans for this agent
    planning.rows.add("camera", Profile.of([Measurement(HALF, 20.0, 9e3, 1)], Task.INFERENCE))
    measured_server.answer_blocking("a picture")
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
            measured_server.answer_blocking("another")
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


# --- Serving imports --------------------------------------------------------------------------------------------------
# The modules that the imports of an inference server load, in a fresh Python process.

HEAVY = ("numpy", "scipy", "pandas", "torch", "flwr", "pydantic", "edge_agent", "coordinator", "wattfleet.flower")


def test_an_inference_server_and_a_shared_loader_load_no_heavy_library() -> None:
    code = (
        f"import sys; from wattfleet.serving import DutyServer, share_device; print(*({HEAVY!r} & sys.modules.keys()))"
    )
    code = code.replace(repr(HEAVY), repr(set(HEAVY)))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_every_public_name_can_be_imported() -> None:
    assert {"DutyServer", "share_device"} < set(wattfleet.serving.__all__)
    for name in wattfleet.serving.__all__:
        assert getattr(wattfleet.serving, name).__name__ == name
