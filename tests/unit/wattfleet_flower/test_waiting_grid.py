"""How often the grid of a planned run polls for replies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from tests.fakes.flower_in_process import GridOfNodes, Node
from wattfleet_flower.server.grids import WaitingGrid


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
