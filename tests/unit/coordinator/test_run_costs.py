"""The totals of ended runs are cached, but never kept without observations that arrive after the end."""

from __future__ import annotations

from typing import Any, cast

from coordinator.page.queries import Queries
from coordinator.page.snapshots import RunCosts
from wattfleet_proto.v1 import view_pb2


class Rounds:
    """The only round of a run, and how often it was read."""

    def __init__(self) -> None:
        self.view = view_pb2.RoundView(run_id="a", round=1, device_count=2, observed_count=1, training_j=640.0)
        self.read = 0

    async def rounds(self, run_id: str) -> list[view_pb2.RoundView]:
        self.read += 1
        return [self.view]


async def test_an_observation_that_arrives_after_the_end_of_a_run_is_counted_soon() -> None:
    found, now_s = Rounds(), 0.0
    costs = RunCosts(cast(Queries, found), lambda: now_s)
    run = view_pb2.RunView(run_id="a", finished=True, finished_unix_s=1.0)

    async def shown() -> Any:
        values = await costs.of(run)
        return values["training_j"], values["observed_trainings"], values["trainings"]

    assert [await shown() for _ in range(2)] == [(640.0, 1, 2)] * 2 and found.read == 1
    found.view.observed_count, found.view.training_j = 2, 1180.0
    now_s = 11.0
    assert await shown() == (1180.0, 2, 2)
    now_s = 1e6
    assert await shown() == (1180.0, 2, 2) and found.read == 2, "complete totals are read once"
