"""How a run survives errors of SuperLink and coordinator, how often it polls, and the text of others in its log."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from tests.fakes.flower_in_process import (
    ARRAYS,
    KNOWN,
    A,
    B,
    C,
    D,
    GridOfNodes,
    Node,
    PlannerStub,
    fleet,
    internal_server_error,
    run,
)
from wattfleet.common.clock import VirtualClock
from wattfleet.flower import FedBuff, PowerAware
from wattfleet.flower.server.errors import CoordinatorRefusedError, SuperLinkError
from wattfleet.flower.server.grids import SteadyGrid, WaitingGrid
from wattfleet.flower.server.planning_client import PlanningClient
from wattfleet.flower.server.replies import describe_error

# --- Steady grid ------------------------------------------------------------------------------------------------------
# What a run does if Flower's SuperLink answers a request with an error.


def answered(status: int, method: str = "pull-messages") -> httpx.HTTPStatusError:
    error = internal_server_error(method)
    error.response.status_code = status
    return error


class UnsteadyGrid(GridOfNodes):
    """Nodes whose SuperLink answers with errors.

    Attributes:
        errors: returns the error of a request, or None for a proper answer. It gets the request's name and how many
            requests of this name came before.
        requests: how many requests of each name came.
        is_taken: whether the SuperLink stores messages before it answers with an error.
    """

    def __init__(self, errors: Callable[[str, int], Exception | None], is_taken: bool = False) -> None:
        super().__init__(fleet())
        self.errors = errors
        self.requests: dict[str, int] = {}
        self.is_taken = is_taken
        self._stored: dict[int, str] = {}
        self._alive: list[Message] = []  # so that no two messages have the same `id`

    def get_node_ids(self) -> Iterable[int]:
        self._ask("nodes")
        return super().get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        fresh = [each for each in messages if id(each) not in self._stored]
        try:
            self._ask("push")
        except Exception:
            fresh = fresh if self.is_taken else []
            raise
        finally:
            # As in Flower, the same message is stored once: its id is a digest of it.
            ids = super().push_messages(fresh)
            self._alive += fresh
            self._stored.update({id(each): message_id for each, message_id in zip(fresh, ids, strict=True)})
        return [self._stored[id(each)] for each in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self._ask("pull")
        return super().pull_messages(message_ids)

    def _ask(self, name: str) -> None:
        before = self.requests.get(name, 0)
        self.requests[name] = before + 1
        if (error := self.errors(name, before)) is not None:
            raise error


def every_other(name: str, before: int) -> Exception | None:
    """Every first request of two fails."""
    return answered(500 if before % 4 == 0 else 429) if before % 2 == 0 else None


@pytest.mark.parametrize("is_taken", [False, True], ids=["refused", "taken, and answered with an error"])
def test_a_run_goes_on_although_every_other_request_fails(is_taken: bool) -> None:
    grid, planner = UnsteadyGrid(every_other, is_taken), PlannerStub()
    result = run(grid, planner, rounds=3)
    assert [each.failure for results in planner.results() for each in results.values()] == 12 * [""]
    assert len(grid.trainings()) == 12, "no message was sent twice"
    calm = GridOfNodes(fleet())
    expected = run(calm, PlannerStub(), rounds=3)
    for mine, theirs in zip(result.arrays.to_numpy_ndarrays(), expected.arrays.to_numpy_ndarrays(), strict=True):
        np.testing.assert_allclose(mine, theirs)


def test_buffered_training_goes_on_although_every_other_request_fails() -> None:
    grid, planner = UnsteadyGrid(every_other), PlannerStub()
    strategy = PowerAware(FedBuff(2, clock=grid.clock), planner, clock=grid.clock)
    assert len(strategy.start(grid, ARRAYS, num_rounds=3).train_metrics_clientapp) == 3


def test_an_app_that_calls_configure_train_itself_gets_the_same() -> None:
    grid = UnsteadyGrid(every_other)
    wrapped = PowerAware(FedAvg(), PlannerStub(nodes=dict(KNOWN)), clock=grid.clock)
    for configure in (wrapped.configure_train, wrapped.configure_evaluate):
        sent = configure(1, ARRAYS, ConfigRecord(), grid)
        assert sorted(each.metadata.dst_node_id for each in sent) == [A, B, C, D]


def test_after_a_minute_of_errors_the_run_ends_with_the_reason() -> None:
    grid = UnsteadyGrid(lambda name, before: answered(500) if name == "pull" and before >= 3 else None)
    planner = PlannerStub()
    began_s = grid.clock.now_s()
    with pytest.raises(SuperLinkError, match=r"could not return replies for 60 s.*500 Internal Server Error.*its log"):
        run(grid, planner)
    assert 50 < grid.clock.now_s() - began_s < 75
    [finished] = planner.asked("FinishRun")
    assert "SuperLinkError: Flower's SuperLink could not return replies" in finished.error


class RunNotRunningError(Exception):
    """As Flower's `RunNotRunningException`: the SuperLink has ended the run."""


@pytest.mark.parametrize("error", [answered(404), RunNotRunningError(), ValueError("invalid message")], ids=str)
def test_an_error_that_cannot_pass_ends_the_run_at_once(error: Exception) -> None:
    grid = UnsteadyGrid(lambda name, before: error if name == "push" else None)
    began_s = grid.clock.now_s()
    with pytest.raises(type(error)):
        run(grid, PlannerStub())
    assert grid.requests["push"] == 1
    assert grid.clock.now_s() == began_s


def test_a_lost_connection_that_flower_does_not_retry_is_retried() -> None:
    # Flower gives up if the text mentions TLS, such as when a SuperLink ends in the middle of a handshake.
    lost = httpx.ConnectError("[SSL: UNEXPECTED_EOF_WHILE_READING] EOF occurred in violation of protocol")
    grid = UnsteadyGrid(lambda name, before: lost if before == 0 else None)
    assert sorted(SteadyGrid(grid, grid.clock).get_node_ids()) == [A, B, C, D]


def test_flowers_grid_gets_lists_whatever_an_app_passes() -> None:
    # Flower's own grid iterates twice over what it gets.
    grid = GridOfNodes(fleet())
    steady: Grid = SteadyGrid(grid, grid.clock)
    sent = [message(node_id) for node_id in (A, B)]
    ids = list(steady.push_messages(each for each in sent))
    grid.clock.advance(10.0)
    assert len(ids) == 2 and len(list(steady.pull_messages(iter(ids)))) == 2
    assert len(list(steady.send_and_receive(message(node_id) for node_id in (A, B)))) == 2
    assert list(steady.push_messages(iter([]))) == []


def message(node_id: int) -> Message:
    return Message(RecordDict({"arrays": ArrayRecord([np.zeros(2)])}), node_id, "evaluate")


# --- Waiting grid -----------------------------------------------------------------------------------------------------
# How often the grid of a planned run polls for replies.


def same(timeout: float | None) -> float | None:
    return timeout


def waiting(grid: GridOfNodes) -> WaitingGrid:
    return WaitingGrid(grid, same, same, grid.clock)


def messages(*node_ids: int) -> list[Message]:
    content = RecordDict({"config": ConfigRecord({"step": 1})})
    return [Message(content, node_id, "evaluate") for node_id in node_ids]


def nodes_of(replies: Iterable[Message]) -> list[int]:
    return [reply.metadata.src_node_id for reply in replies]


class CountingGrid(GridOfNodes):
    """Nodes whose SuperLink records each poll for replies; a poll takes `look_takes_s`."""

    def __init__(self, nodes: dict[int, Node], look_takes_s: float = 0.0) -> None:
        super().__init__(nodes)
        self.look_takes_s = look_takes_s
        self.looks_s: list[float] = []

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self.looks_s.append(self.clock.now_s())
        replies = super().pull_messages(message_ids)
        self.clock.advance(self.look_takes_s)
        return replies


@pytest.mark.parametrize(("takes_s", "extra_s"), [(0.05, 0.1), (0.5, 0.4), (20.0, 1.0), (3_000.0, 1.0)])
def test_a_reply_is_there_soon_after_the_node_is_done(takes_s: float, extra_s: float) -> None:
    grid = GridOfNodes({2: Node("a", takes_s=takes_s)})
    began_s = grid.clock.now_s()
    assert nodes_of(waiting(grid).send_and_receive(messages(2))) == [2]
    assert takes_s <= grid.clock.now_s() - began_s <= takes_s + extra_s


def test_a_superlink_that_answers_slowly_is_asked_rarely() -> None:
    grid = CountingGrid({2: Node("a", takes_s=600.0)}, look_takes_s=12.0)
    assert nodes_of(waiting(grid).send_and_receive(messages(2))) == [2]
    pauses_s = [later - earlier - 12.0 for earlier, later in zip(grid.looks_s, grid.looks_s[1:], strict=False)]
    assert pauses_s == pytest.approx([12.0] * len(pauses_s)), "at most half of the time is spent looking"


def test_replies_in_time_are_kept_and_late_ones_absent() -> None:
    grid = GridOfNodes({2: Node("a", takes_s=5.0), 3: Node("b", takes_s=90.0), 4: Node("c", takes_s=30.0)})
    began_s = grid.clock.now_s()
    assert nodes_of(waiting(grid).send_and_receive(messages(2, 3, 4), timeout=30.0)) == [2, 4]
    assert grid.clock.now_s() - began_s == pytest.approx(30.0), "no longer than the timeout"


def test_without_a_timeout_the_slowest_is_waited_for() -> None:
    grid = GridOfNodes({2: Node("a", takes_s=5.0), 3: Node("b", takes_s=7_200.0)})
    assert nodes_of(waiting(grid).send_and_receive(messages(2, 3))) == [2, 3]


def test_a_message_that_the_superlink_rejects_is_not_waited_for() -> None:
    class RejectingGrid(CountingGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[Any]:
            accepted, rejected = messages
            return [*super().push_messages([accepted]), None]

    grid = RejectingGrid({2: Node("a", takes_s=5.0), 3: Node("b")})
    began_s = grid.clock.now_s()
    assert nodes_of(waiting(grid).send_and_receive(messages(2, 3))) == [2]
    assert grid.clock.now_s() - began_s < 6.0


def test_nothing_is_waited_for_if_nothing_is_sent() -> None:
    grid = CountingGrid({})
    assert list(waiting(grid).send_and_receive([])) == []
    assert grid.looks_s == []


# --- Transient refusals -----------------------------------------------------------------------------------------------
# Which errors of a coordinator end a run, and after which ones the same request is repeated.


@pytest.mark.parametrize("code", ["CANCELLED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"])
def test_a_coordinator_that_stops_or_is_busy_ends_no_run(code: str) -> None:
    assert CoordinatorRefusedError("away", grpc.StatusCode[code]).is_transient


@pytest.mark.parametrize("code", ["INVALID_ARGUMENT", "PERMISSION_DENIED", "UNKNOWN"])
def test_a_request_that_can_never_succeed_ends_the_run(code: str) -> None:
    assert not CoordinatorRefusedError("wrong", grpc.StatusCode[code]).is_transient


# --- Hostile text -----------------------------------------------------------------------------------------------------
# Text from a coordinator or a node in Flower's log: always plain text, whatever was sent.

ESCAPES = "\x1b[2J\x1b]0;title\x07\x9b31m\u202e"


class HostileError(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.INVALID_ARGUMENT

    def details(self) -> str:
        return f"{ESCAPES}no\nsecond line"


class HostileStub:
    def PlanRound(self, *_: Any, **__: Any) -> Any:  # noqa: N802 - named by the protocol
        raise HostileError


def test_a_refusal_of_the_coordinator_is_plain_text() -> None:
    with pytest.raises(CoordinatorRefusedError) as refused:
        PlanningClient(HostileStub(), VirtualClock()).call("PlanRound", None)
    assert str(refused.value).endswith("no second line") and str(refused.value).isprintable()


@pytest.mark.parametrize("code", range(10))
def test_the_error_of_a_node_is_plain_text(code: int) -> None:
    assert describe_error(Error(code, f"Traceback\n{ESCAPES}ValueError: no")).isprintable()
