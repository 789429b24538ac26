"""Hostile and stubborn apps on the agent's socket: the device does nothing beyond the round that it was granted."""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from edge_agent.runtime.readiness import parked_mode
from tests.fakes.agent_socket import FINISH, MODE, Agent, App, agent_at, granted, started
from tests.fakes.duties import DutyAgent, duty, duty_agent_at
from tests.fakes.polling import until
from wattfleet.core.modes import PowerMode, array_to_modes, modes_to_array
from wattfleet_proto.v1 import duty_pb2, duty_pb2_grpc, local_pb2, local_pb2_grpc, session_pb2

# --- Hostile apps -----------------------------------------------------------------------------------------------------
# A hostile ClientApp on the agent's socket: the device does nothing beyond the round that it was granted.


TRAIN = "/wattfleet.v1.LocalAgentService/Train"
DENIED, NOT_GRANTED = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.FAILED_PRECONDITION
BUSY, INVALID = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """One agent for all tests, as for a hostile app: every test must leave it unchanged."""
    folder = tmp_path_factory.mktemp("agent")
    with agent_at(folder / "agent.sock", stop_timeout_s=0.5, grant_timeout_s=0.5) as running:
        yield running


@pytest.fixture(autouse=True)
def parked_again(agent: Agent) -> Iterator[None]:
    yield
    until(lambda: agent.board.current_mode() == parked_mode(agent.board))
    until(lambda: not agent.device_trainings.running)


NUMBERS = itertools.count(2)


def plan_of(agent: Agent, mode: PowerMode = MODE, power_limit_w: float = 25.0, longest_s: float = 600.0) -> str:
    """A plan that the coordinator has just granted."""
    number = next(NUMBERS)
    grant = granted(mode, power_limit_w, plan_id=f"7/{number}", grant_id=number)
    grant.longest_s = longest_s
    agent.grant(grant)
    return f"7/{number}"


@pytest.fixture
def hostile(agent: Agent) -> Iterator[Callable[[], App]]:
    apps = []
    with grpc.insecure_channel(f"unix:{agent.socket}") as channel:

        def opened() -> App:
            apps.append(App(channel))
            return apps[-1]

        yield opened
        for app in apps:
            app.end()


class Watched:
    """The modes that the board was in, and the most power that it may have drawn in them."""

    def __init__(self, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
        self.modes: list[PowerMode] = []
        apply = agent.board.apply

        def noted(mode: PowerMode) -> None:
            self.modes.append(mode)
            apply(mode)

        monkeypatch.setattr(agent.board, "apply", noted)


@pytest.fixture
def watched(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(agent, monkeypatch)


# --- limit and mode ---------------------------------------------------------------------------------------------


def test_no_message_of_an_app_has_a_field_for_watts_a_mode_or_a_time() -> None:
    """Mode and limit come over the agent's session alone, so an app has no way to set them."""
    fields = {
        field.name
        for message in (local_pb2.StartTraining, local_pb2.FinishTraining, local_pb2.LoaderSeen)
        for field in message.DESCRIPTOR.fields
    }
    assert not {name for name in fields if any(word in name for word in ("mode", "power", "watt", "limit", "longest"))}
    assert "mode" not in {field.name for field in local_pb2.MinibatchTimes.DESCRIPTOR.fields}


def test_an_app_cannot_raise_its_mode_by_what_it_says_of_itself(
    agent: Agent, hostile: Callable[[], App], watched: Watched
) -> None:
    """A long loader and short minibatches could make the agent measure other modes, but never above the grant."""
    limit_w = 9.0
    lowest = min(array_to_modes(agent.board.modes), key=sum)
    app = hostile()
    app.send(started(plan_of(agent, lowest, limit_w)))
    app.answer()
    app.send(local_pb2.TrainRequest(loader=local_pb2.LoaderSeen(batch=16, minibatches_per_epoch=5_000)))
    times = [local_pb2.MinibatchTimes(fetch_stall_ms=0.0, compute_ms=0.001)] * 200
    for _ in range(5):
        app.send(local_pb2.TrainRequest(minibatches=local_pb2.MinibatchesTrained(minibatches=times)))
        app.answer()
    app.send(FINISH)
    app.answer()
    drawn_w = agent.board.truth(modes_to_array(watched.modes))[1] / 1e3
    assert lowest in watched.modes and drawn_w.max() <= 1.1 * limit_w


@pytest.mark.parametrize("epochs", [0.0, -1.0, 1e9, float("nan"), float("inf")])
def test_an_app_cannot_train_a_made_up_number_of_epochs(
    agent: Agent, hostile: Callable[[], App], watched: Watched, epochs: float
) -> None:
    app = hostile()
    app.send(started(plan_of(agent), epochs=epochs))
    code, reason = app.refusal()
    assert code is INVALID and "epochs" in reason
    assert MODE not in watched.modes


# --- trainings of other apps ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [lambda plan: f"{plan}0", lambda plan: f"8{plan[1:]}", lambda plan: "", lambda plan: f"{plan} "],
    ids=["another round", "another run", "none", "a space"],
)
def test_a_training_without_its_own_grant_is_refused(
    agent: Agent, hostile: Callable[[], App], watched: Watched, other: Callable[[str], str]
) -> None:
    app = hostile()
    app.send(started(other(plan_of(agent))))
    code, reason = app.refusal()
    assert code is NOT_GRANTED and "has granted no watts for the training of round" in reason
    assert watched.modes == []


def test_an_old_assignment_trains_nothing_again(agent: Agent, hostile: Callable[[], App], watched: Watched) -> None:
    old = plan_of(agent)
    app = hostile()
    app.send(started(old), FINISH)
    list(app.call)
    assert MODE in watched.modes
    watched.modes.clear()
    for grant_anew in (lambda: None, lambda: plan_of(agent)):
        grant_anew()
        replayed = hostile()
        replayed.send(started(old))
        assert replayed.refusal()[0] is NOT_GRANTED
    assert watched.modes == []


def test_an_assignment_of_another_device_is_refused(agent: Agent, hostile: Callable[[], App], watched: Watched) -> None:
    app = hostile()
    app.send(started(plan_of(agent), device_id="orin-nano-1"))
    code, reason = app.refusal()
    assert code is INVALID and "is for orin-nano-1" in reason
    assert watched.modes == []


def test_nobody_joins_or_finishes_the_training_of_another_app(agent: Agent, hostile: Callable[[], App]) -> None:
    honest, thief, finisher = hostile(), hostile(), hostile()
    plan_id = plan_of(agent)
    honest.send(started(plan_id))
    honest.answer()
    thief.send(started(plan_id))
    assert thief.refusal()[0] is BUSY
    finisher.send(FINISH)
    code, reason = finisher.refusal()
    assert code is INVALID
    assert agent.board.current_mode() == MODE, "the training goes on"
    honest.send(FINISH)
    assert honest.answer().HasField("finished")


def test_the_app_of_another_run_ends_its_own_training_only(agent: Agent, hostile: Callable[[], App]) -> None:
    """A report of more epochs than were assigned is refused, and none of it is reported or learned."""
    app = hostile()
    observed = list(agent.reports.observations)
    finish = local_pb2.FinishTraining(epochs_done=1e6)
    app.send(started(plan_of(agent)), local_pb2.TrainRequest(finish=finish))
    code, reason = app.refusal()
    assert code is INVALID and "as assigned" in reason
    until(lambda: agent.board.current_mode() == parked_mode(agent.board))
    assert agent.reports.observations == observed


# --- duration -----------------------------------------------------------------------------------------------------


def test_an_app_that_goes_on_beyond_the_longest_training_is_stopped(agent: Agent, hostile: Callable[[], App]) -> None:
    app = hostile()
    app.send(started(plan_of(agent, longest_s=1)))
    app.answer()
    begun_s = time.monotonic()
    assert "took longer than 1 s" in app.answer().stop.reason
    assert agent.board.current_mode() == parked_mode(agent.board)
    assert time.monotonic() - begun_s < 10
    with pytest.raises(grpc.RpcError, match="did not end its training"):
        app.answer()
    until(lambda: agent.reports.states[-1].state == session_pb2.DEVICE_STATE_READY)


def test_reports_without_an_end_keep_no_device_beyond_its_grant(agent: Agent, hostile: Callable[[], App]) -> None:
    """The agent keeps the time itself, whatever the app reports, and however fast."""
    app, stop = hostile(), threading.Event()
    app.send(started(plan_of(agent, longest_s=1)))

    def flood() -> None:
        while not stop.wait(0.0005):
            app.send(local_pb2.TrainRequest(minibatches=local_pb2.MinibatchesTrained()))

    flooding = threading.Thread(target=flood)
    flooding.start()
    try:
        code, _ = app.refusal()
    finally:
        stop.set()
        flooding.join()
    assert code is grpc.StatusCode.ABORTED
    until(lambda: agent.board.current_mode() == parked_mode(agent.board))


# --- floods -------------------------------------------------------------------------------------------------------


def test_a_process_waits_for_few_grants_at_once(agent: Agent, hostile: Callable[[], App]) -> None:
    apps = [hostile() for _ in range(12)]
    for number, app in enumerate(apps):
        app.send(started(f"9/{number}"))
    refusals = [app.refusal() for app in apps]
    assert {code for code, _ in refusals} == {BUSY, NOT_GRANTED}
    assert any(f"process {os.getpid()} has 8 open trainings, the maximum" in reason for _, reason in refusals)


def test_a_user_opens_few_connections_and_others_go_on(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    opened = []
    try:
        for _ in range(80):
            one = socket.socket(socket.AF_UNIX)
            one.connect(str(agent.socket))
            one.settimeout(5)
            opened.append(one)

        def ended() -> int:
            gone = 0
            for each in opened:
                each.setblocking(False)
                try:
                    gone += each.recv(1, socket.MSG_PEEK) == b""
                except BlockingIOError:
                    pass
                except ConnectionResetError:
                    gone += 1
            return gone

        until(lambda: ended() >= 16)
        assert "connection closed" in caplog.text
    finally:
        for each in opened:
            each.close()

    def serves() -> bool:
        with grpc.insecure_channel(f"unix:{agent.socket}") as channel:
            app = App(channel)
            app.send(started("no such plan"))
            app.end()
            try:
                list(app.call)
            except grpc.RpcError as error:
                status: Any = error
                return status.code() is NOT_GRANTED
        return False

    until(serves)


# --- operations for the owner only --------------------------------------------------------------------------------


@pytest.fixture
def duties(tmp_path: Path) -> Iterator[DutyAgent]:
    with duty_agent_at(tmp_path / "duty.sock", duty()) as running:
        yield running


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("SetDuty", duty_pb2.SetDutyRequest(duty=duty(latency_ms=6e5).to_json())),
        ("ClearDuty", duty_pb2.ClearDutyRequest()),
    ],
)
def test_an_app_cannot_change_the_duty(duties: DutyAgent, method: str, request_: Any) -> None:
    with grpc.insecure_channel(f"unix:{duties.socket}") as channel:
        with pytest.raises(grpc.RpcError, match="only the user of the agent") as refused:
            getattr(duty_pb2_grpc.DutyServiceStub(channel), method)(request_)
    assert refused.value.code() is DENIED
    assert duties.turns.duty == duty()


def test_an_app_cannot_see_whose_training_runs(agent: Agent, hostile: Callable[[], App]) -> None:
    with grpc.insecure_channel(f"unix:{agent.socket}") as channel:
        with pytest.raises(grpc.RpcError, match="only the user of the agent"):
            local_pb2_grpc.LocalAgentServiceStub(channel).ShowTraining(local_pb2.ShowTrainingRequest())


def test_no_other_call_exists_on_the_sockets() -> None:
    """No call on them reads or removes stored workloads, applies a mode, or starts a measurement."""
    calls = {
        f"{service.name}/{method.name}"
        for module in (local_pb2, duty_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert calls == {
        "LocalAgentService/GetDevice",
        "LocalAgentService/NoteUnplanned",
        "LocalAgentService/Train",
        "LocalAgentService/ShowTraining",
        "DutyService/Serve",
        "DutyService/Share",
        "DutyService/SetDuty",
        "DutyService/ShowDuty",
        "DutyService/ClearDuty",
    }


def test_minibatches_reported_without_a_training_measure_nothing(
    agent: Agent, hostile: Callable[[], App], watched: Watched
) -> None:
    app = hostile()
    app.send(local_pb2.TrainRequest(minibatches=local_pb2.MinibatchesTrained()))
    assert app.refusal()[0] is INVALID
    assert watched.modes == []


# --- Stubborn apps ----------------------------------------------------------------------------------------------------
# Apps that ignore the agent's instructions: they draw no extra power, and the device is free after a stated time.

PAUSED = local_pb2.TrainRequest(minibatches=local_pb2.MinibatchesTrained(paused=True)).SerializeToString()


def start_of(plan_id: str) -> local_pb2.TrainRequest:
    start = local_pb2.StartTraining(plan_id=plan_id, device_id="orin-nano-0", epochs=1.0)
    return local_pb2.TrainRequest(start=start)


class StubbornApp:
    """A client of the agent's socket that sends what a test specifies."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.call: Any = channel.stream_stream(TRAIN, None, None)(iter(self._requests.get, None))

    def start(self, plan_id: str = "7/1") -> None:
        self.send(start_of(plan_id).SerializeToString())

    def send(self, request: bytes) -> None:
        self._requests.put(request)

    def end(self) -> None:
        self._requests.put(None)


@pytest.fixture
def fresh_agent(tmp_path: Path) -> Iterator[Agent]:
    with agent_at(tmp_path / "agent.sock", stop_timeout_s=0.5) as running:
        yield running


@pytest.fixture
def app(fresh_agent: Agent) -> Iterator[StubbornApp]:
    with grpc.insecure_channel(f"unix:{fresh_agent.socket}") as channel:
        opened = StubbornApp(channel)
        yield opened
        opened.end()


def train(fresh_agent: Agent, app: StubbornApp) -> None:
    app.start()
    until(lambda: fresh_agent.board.current_mode() == MODE)


def stop(fresh_agent: Agent) -> None:
    fresh_agent.grant(granted(None, grant_id=2))
    until(lambda: fresh_agent.board.current_mode() == parked_mode(fresh_agent.board))


def test_an_app_that_reads_no_answers_does_not_delay_parking(fresh_agent: Agent) -> None:
    async def requests() -> AsyncIterator[local_pb2.TrainRequest]:
        yield start_of("7/1")
        await asyncio.Event().wait()

    async def begun() -> Any:
        answers = fresh_agent.device_trainings.answers_to(requests())
        await anext(answers)  # and gRPC never requests the next one, since the app does not read this one
        return answers

    answers = asyncio.run_coroutine_threadsafe(begun(), fresh_agent.loop).result(10)
    until(lambda: fresh_agent.board.current_mode() == MODE)
    stop(fresh_agent)
    asyncio.run_coroutine_threadsafe(answers.aclose(), fresh_agent.loop).result(10)


def test_a_device_is_free_again_though_its_app_never_finishes(fresh_agent: Agent, app: StubbornApp) -> None:
    train(fresh_agent, app)
    stop(fresh_agent)
    until(lambda: fresh_agent.reports.states[-1].state == session_pb2.DEVICE_STATE_READY)
    assert fresh_agent.reports.states[-1].detail == "parked; the app did not end its training within 0.5 s"
    fresh_agent.grant(granted(plan_id="7/2", grant_id=3))
    with grpc.insecure_channel(f"unix:{fresh_agent.socket}") as channel:
        other = StubbornApp(channel)
        other.start("7/2")
        until(lambda: fresh_agent.board.current_mode() == MODE)
        app.send(PAUSED)
        with pytest.raises(grpc.RpcError, match="did not end its training within 0.5 s") as refused:
            list(app.call)
        assert refused.value.code() is grpc.StatusCode.ABORTED
        assert fresh_agent.board.current_mode() == MODE, "the minibatches of the first app change nothing"
        other.end()
