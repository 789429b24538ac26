"""A small fleet of fake nodes, and runs of PowerAware over it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAvg, Result

from tests.fakes.flower_in_process import (
    GridOfNodes,
    Node,
    PlannerStub,
)
from wattfleet_flower import PowerAware

# Flower's node ids use all 64 bits.
A, B, C, D = (2**63 - 1 + k for k in range(4))
KNOWN = {A: "a", B: "b", C: "c", D: "d"}
ARRAYS = ArrayRecord([np.zeros((2, 3)), np.ones(2)])


class WarningLog(list[str]):
    """The warnings that were logged."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def __iter__(self) -> Iterator[str]:
        return (r.getMessage() for r in self._caplog.records if r.levelno >= logging.WARNING)

    def about(self, text: str) -> list[str]:
        return [warning for warning in self if text in warning]


class SeesContents(FedAvg):
    """Records the keys of each reply that it aggregates."""

    def __init__(self) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.seen: list[set[str]] = []

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        replies = list(replies)
        self.seen.extend(set(reply.content) for reply in replies)
        return super().aggregate_train(server_round, replies)


def fleet(**changes: Any) -> dict[int, Node]:
    nodes = {A: Node("a"), B: Node("b"), C: Node("c"), D: Node("d")}
    for device_id, change in changes.items():
        [node] = [node for node in nodes.values() if node.device_id == device_id]
        vars(node).update(change)
    return nodes


def unsurveyed(strategy: Any, planner: PlannerStub, clock: Any, **options: Any) -> PowerAware:
    """A strategy whose devices measure only within rounds: most tests are not about measuring."""
    return PowerAware(strategy, planner, clock=clock, **{"survey_s": None, "measures_left_out": False, **options})


def run(
    grid: GridOfNodes,
    planner: PlannerStub,
    rounds: int = 1,
    strategy: Any = None,
    timeout: float = 3600,
    **options: Any,
) -> Result:
    wrapped = unsurveyed(strategy or FedAvg(fraction_evaluate=0.0), planner, grid.clock, **options)
    return wrapped.start(grid, ARRAYS, num_rounds=rounds, timeout=timeout)


def first_value(result: Result) -> float:
    return float(result.arrays.to_numpy_ndarrays()[0][0, 0])
