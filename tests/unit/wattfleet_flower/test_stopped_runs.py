"""What the coordinator learns about a run that somebody stops."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import httpx
import pytest
from flwr.app import Message
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

from tests.fakes.flower_in_process import GridOfNodes, PlannerStub
from tests.fakes.one_run_grid import internal_server_error
from tests.fakes.power_aware_runs import fleet, run
from wattfleet_flower.server import stopping
from wattfleet_proto.names import is_stopped

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
BY_SUPERLINK = "stopped by Flower's SuperLink, as after `flwr stop`"


class RunNotRunningException(Exception):  # noqa: N818 - named by Flower
    """What Flower raises if the SuperLink answers that the run has ended."""


def refused(path: str = "/v1/runtime/pull-messages") -> httpx.HTTPStatusError:
    """Flower's error after `flwr stop`, when the SuperLink does not accept the run's token any more."""
    error = internal_server_error("pull-messages")
    request = httpx.Request("POST", f"http://127.0.0.1:8000{path}")
    response = httpx.Response(401, request=request)
    return httpx.HTTPStatusError("401 Unauthorized", request=error.request, response=response)


class Serving:
    """A ServerApp's process, as Flower sets it up: a signal ends it, without an exception if this takes too long."""

    def __init__(self, planner: PlannerStub) -> None:
        self._planner = planner
        self.reported_before: list[str] = []

    def end(self, number: int, frame: FrameType | None) -> None:
        self.reported_before = ends(self._planner)
        raise SystemExit(0)


@pytest.fixture
def serving() -> Iterator[tuple[PlannerStub, Serving]]:
    planner = PlannerStub()
    process = Serving(planner)
    before = {number: signal.signal(number, process.end) for number in SIGNALS}
    try:
        yield planner, process
        assert all(signal.getsignal(number) == process.end for number in SIGNALS), "handlers are restored"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ends(planner: PlannerStub) -> list[str]:
    """Why the run has ended, as it was reported to the coordinator."""
    return [each.error for each in planner.asked("FinishRun")]


class StoppedGrid(GridOfNodes):
    """Nodes of a run that is stopped while replies are awaited, after the first round.

    Attributes:
        stop: stops the run.
        is_over: whether the SuperLink refuses requests.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        super().__init__(fleet())
        self.stop = stop
        self.is_over = False

    def get_node_ids(self) -> Iterable[int]:
        if self.is_over:
            raise refused("/v1/runtime/get-nodes")
        return super().get_node_ids()

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = super().pull_messages(message_ids)
        if len(self.trainings()) > 4:
            self.stop()
        return replies


def stop_at_superlink() -> None:
    """As Flower's grid does when the SuperLink refuses a request."""
    try:
        raise refused()
    except httpx.HTTPStatusError:
        signal.raise_signal(signal.SIGINT)


def test_flwr_stop_is_recorded_as_a_stop(serving: tuple[PlannerStub, Serving]) -> None:
    planner, process = serving
    with pytest.raises(SystemExit):
        run(StoppedGrid(stop_at_superlink), planner, rounds=3)
    assert ends(planner) == [BY_SUPERLINK]
    assert process.reported_before == [BY_SUPERLINK], "Flower may end the process before an exception gets through"
    assert is_stopped(BY_SUPERLINK)


def test_a_stop_that_a_heartbeat_notices_is_recorded_alike(serving: tuple[PlannerStub, Serving]) -> None:
    planner, _ = serving

    def stop() -> None:
        grid.is_over = True
        signal.raise_signal(signal.SIGINT)

    grid = StoppedGrid(stop)
    with pytest.raises(SystemExit):
        run(grid, planner, rounds=3)
    assert ends(planner) == [BY_SUPERLINK]


@pytest.mark.parametrize("is_over", [True, False])
def test_an_error_of_a_request_that_a_stop_interrupts_is_recorded_as_a_stop(is_over: bool) -> None:
    """When `flwr stop` comes while a message is pushed, the session of the message ends, too."""
    planner = PlannerStub()

    def fail() -> None:
        grid.is_over = is_over
        raise ObjectPushError("97c5", "12184", "fc36")

    grid = StoppedGrid(fail)
    with pytest.raises(ObjectPushError):
        run(grid, planner, rounds=3)
    [recorded] = ends(planner)
    assert recorded == BY_SUPERLINK if is_over else recorded.startswith("ObjectPushError: ")


def test_a_superlink_that_ends_is_recorded(
    serving: tuple[PlannerStub, Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    planner, process = serving

    def stop() -> None:
        monkeypatch.setattr(os, "getppid", lambda: 1)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(SystemExit):
        run(StoppedGrid(stop), planner, rounds=3)
    assert ends(planner) == process.reported_before == ["stopped because Flower's SuperLink ended"]


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_to_the_serverapp_is_recorded(serving: tuple[PlannerStub, Serving], number: signal.Signals) -> None:
    planner, process = serving
    with pytest.raises(SystemExit):
        run(StoppedGrid(lambda: signal.raise_signal(number)), planner, rounds=3)
    assert ends(planner) == process.reported_before == [f"stopped by {number.name}, which its ServerApp got"]


def test_a_coordinator_that_does_not_answer_delays_the_end_by_seconds(
    serving: tuple[PlannerStub, Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, process = serving
    released = threading.Event()

    class Hanging(PlannerStub):
        def __getattr__(self, method: str) -> Callable[..., Any]:
            if method == "FinishRun" and threading.current_thread() is not threading.main_thread():
                released.wait(60.0)
            return super().__getattr__(method)

    monkeypatch.setattr(stopping, "_REPORTED_WITHIN_S", 0.01)
    planner = Hanging()
    try:
        with pytest.raises(SystemExit):
            run(StoppedGrid(lambda: signal.raise_signal(signal.SIGTERM)), planner, rounds=3)
        assert ends(planner) == ["stopped with its ServerApp"], "reported once more, when the exception got through"
    finally:
        released.set()


@pytest.mark.parametrize(
    ("error", "recorded"),
    [
        (ValueError("a shape is wrong"), "ValueError: a shape is wrong"),
        (SystemExit(3), "SystemExit: 3"),
        (SystemExit(0), "stopped with its ServerApp"),
        (KeyboardInterrupt(), "stopped with its ServerApp"),
        (RunNotRunningException(), BY_SUPERLINK),
        (refused("/data/part-3"), "HTTPStatusError: 401 Unauthorized"),
    ],
    ids=str,
)
def test_an_error_is_no_stop_unless_it_comes_from_one(error: BaseException, recorded: str) -> None:
    planner = PlannerStub()

    def fail() -> None:
        raise error

    with pytest.raises(type(error)):
        run(StoppedGrid(fail), planner, rounds=3)
    assert ends(planner) == [recorded]


def test_in_another_thread_no_handler_is_changed() -> None:
    planner = PlannerStub()
    before = [signal.getsignal(number) for number in SIGNALS]
    seen: list[Any] = []
    grid = StoppedGrid(lambda: seen.append([signal.getsignal(number) for number in SIGNALS]))
    thread = threading.Thread(target=lambda: run(grid, planner, rounds=2))
    thread.start()
    thread.join()
    assert seen and seen[0] == before
    assert ends(planner) == [""]
