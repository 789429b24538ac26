"""Apps that ignore the agent's instructions: they draw no extra power, and the device is free after a stated time."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from edge_agent.runtime.readiness import parked_mode
from tests.fakes.agent_socket import MODE, Agent, agent_at, granted
from tests.fakes.polling import until
from wattfleet_proto.v1 import local_pb2, session_pb2

TRAIN = "/wattfleet.v1.LocalAgentService/Train"
PAUSED = local_pb2.TrainRequest(minibatches=local_pb2.MinibatchesTrained(paused=True)).SerializeToString()


def started(plan_id: str) -> local_pb2.TrainRequest:
    start = local_pb2.StartTraining(plan_id=plan_id, device_id="orin-nano-0", epochs=1.0)
    return local_pb2.TrainRequest(start=start)


class App:
    """A client of the agent's socket that sends what a test specifies."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.call: Any = channel.stream_stream(TRAIN, None, None)(iter(self._requests.get, None))

    def start(self, plan_id: str = "7/1") -> None:
        self.send(started(plan_id).SerializeToString())

    def send(self, request: bytes) -> None:
        self._requests.put(request)

    def end(self) -> None:
        self._requests.put(None)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    with agent_at(tmp_path / "agent.sock", stop_timeout_s=0.5) as running:
        yield running


@pytest.fixture
def app(agent: Agent) -> Iterator[App]:
    with grpc.insecure_channel(f"unix:{agent.socket}") as channel:
        opened = App(channel)
        yield opened
        opened.end()


def train(agent: Agent, app: App) -> None:
    app.start()
    until(lambda: agent.board.current_mode() == MODE)


def stop(agent: Agent) -> None:
    agent.grant(granted(None, grant_id=2))
    until(lambda: agent.board.current_mode() == parked_mode(agent.board))


def test_an_app_that_reads_no_answers_does_not_delay_parking(agent: Agent) -> None:
    async def requests() -> AsyncIterator[local_pb2.TrainRequest]:
        yield started("7/1")
        await asyncio.Event().wait()

    async def begun() -> Any:
        answers = agent.device_trainings.answers_to(requests())
        await anext(answers)  # and gRPC never requests the next one, since the app does not read this one
        return answers

    answers = asyncio.run_coroutine_threadsafe(begun(), agent.loop).result(10)
    until(lambda: agent.board.current_mode() == MODE)
    stop(agent)
    asyncio.run_coroutine_threadsafe(answers.aclose(), agent.loop).result(10)


def test_a_device_is_free_again_though_its_app_never_finishes(agent: Agent, app: App) -> None:
    train(agent, app)
    stop(agent)
    until(lambda: agent.reports.states[-1].state == session_pb2.DEVICE_STATE_READY)
    assert agent.reports.states[-1].detail == "parked; the app did not end its training within 0.5 s"
    agent.grant(granted(plan_id="7/2", grant_id=3))
    with grpc.insecure_channel(f"unix:{agent.socket}") as channel:
        other = App(channel)
        other.start("7/2")
        until(lambda: agent.board.current_mode() == MODE)
        app.send(PAUSED)
        with pytest.raises(grpc.RpcError, match="did not end its training within 0.5 s") as refused:
            list(app.call)
        assert refused.value.code() is grpc.StatusCode.ABORTED
        assert agent.board.current_mode() == MODE, "the minibatches of the first app change nothing"
        other.end()
