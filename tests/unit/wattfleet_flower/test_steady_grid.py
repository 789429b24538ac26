"""What a run does if Flower's SuperLink answers a request with an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import httpx
import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from tests.fakes.flower_in_process import GridOfNodes, PlannerStub
from tests.fakes.one_run_grid import internal_server_error
from tests.fakes.power_aware_runs import ARRAYS, KNOWN, A, B, C, D, fleet, run
from wattfleet_flower import FedBuff, PowerAware
from wattfleet_flower.server.errors import SuperLinkError
from wattfleet_flower.server.grids import SteadyGrid


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
