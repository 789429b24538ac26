"""`DutyServer` alone: batches, errors of single requests, shapes, and clients that disconnect."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import TimeoutError as NotAnsweredError

import numpy as np
import pytest

from tests.fakes.polling import eventually, until
from wattfleet_serving import DutyServer, RequestRefusedError, ServerClosedError


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
