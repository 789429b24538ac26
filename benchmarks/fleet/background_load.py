"""Plans rounds and scrapes metrics in the background while a coordinator answers leases."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from array import array
from collections.abc import Awaitable, Callable
from types import TracebackType

from benchmarks.fleet import requests
from benchmarks.fleet.load import Figures, percentiles_ms
from benchmarks.fleet.servers import Server
from coordinator.state.records import plan_id_of
from wattfleet.common.identity.channels import open_async_channel
from wattfleet_proto.convert import workload_to_message
from wattfleet_proto.limits import MAX_ANSWER_BYTES
from wattfleet_proto.v1 import planning_pb2, planning_pb2_grpc

SCRAPED_EVERY_S = 5.0
"""Seconds between scrapes, as in `deploy/prometheus/prometheus.yml`."""

PLANNED_EVERY_S = 10.0
"""Seconds between plans, as in a fleet with short rounds."""

_BOUND_AT_ONCE = 1_000
_POLL_S = 0.05
_PLAN = "/wattfleet.v1.PlanningService/PlanRound"


class BackgroundLoad:
    """A context in which rounds of all devices are planned and metrics are scraped at fixed intervals.

    Args:
        server: the coordinator.
        count: number of devices.
        workloads: number of runs, which are planned in turn.
    """

    def __init__(self, server: Server, count: int, workloads: int = 1) -> None:
        self._server = server
        self._count = count
        self._workloads = workloads
        self._plans_s = array("d")
        self._scrapes_s = array("d")
        self._tasks: list[asyncio.Task[None]] = []
        self._planned = 0
        self._plan_id = ""

    @property
    def figures(self) -> dict[str, Figures]:
        """Return how long plans and scrapes took for the client."""
        return {"plan_ms": percentiles_ms(self._plans_s), "scrape_ms": percentiles_ms(self._scrapes_s)}

    async def measured(self, limit_s: float) -> None:
        """Wait until there is a time of each kind or a request has failed, but not for longer than the limit."""
        give_up_s = time.perf_counter() + limit_s
        while not (self._plans_s and self._scrapes_s) and time.perf_counter() < give_up_s:
            if any(task.done() for task in self._tasks):
                return  # the failure is raised at the end
            await asyncio.sleep(_POLL_S)

    async def __aenter__(self) -> BackgroundLoad:
        host, port = self._server.address
        identities = self._server.identities
        options = [("grpc.max_receive_message_length", MAX_ANSWER_BYTES)]
        self._channel = open_async_channel(f"{host}:{port}", None if identities is None else identities.flower, options)
        # The plan is not decoded, since the generator has to answer leases meanwhile.
        self._plan_round = self._channel.unary_unary(_PLAN, planning_pb2.PlanRoundRequest.SerializeToString, None)
        self._stub = planning_pb2_grpc.PlanningServiceStub(self._channel)
        nodes = [
            planning_pb2.NodeBinding(node_id=number + 1, device_id=requests.device_id(number))
            for number in range(self._count)
        ]
        for begin in range(0, self._count, _BOUND_AT_ONCE):
            await self._stub.BindNodes(planning_pb2.BindNodesRequest(bindings=nodes[begin : begin + _BOUND_AT_ONCE]))
        for number in range(self._workloads):
            trained = workload_to_message(requests.workload(number))
            await self._stub.StartRun(
                planning_pb2.StartRunRequest(run_id=_run(number), strategy="FedAvg", rounds=1_000, workload=trained)
            )
        self._tasks = [
            asyncio.create_task(_every(PLANNED_EVERY_S, self._plan)),
            asyncio.create_task(_every(SCRAPED_EVERY_S, self._scrape)),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close(None)
        for outcome in ended:
            if isinstance(outcome, Exception) and error is None:
                raise outcome

    async def _plan(self) -> None:
        if self._plan_id:
            finished = planning_pb2.FinishRoundRequest(plan_id=self._plan_id, wall_s=PLANNED_EVERY_S)
            await self._stub.FinishRound(finished)
        run_id, number = _run(self._planned % self._workloads), 1 + self._planned // self._workloads
        self._planned, self._plan_id = self._planned + 1, plan_id_of(run_id, number)
        request = planning_pb2.PlanRoundRequest(
            run_id=run_id, round=number, node_ids=range(1, self._count + 1), epochs=1.0
        )
        begun_s = time.perf_counter()
        await self._plan_round(request)
        self._plans_s.append(time.perf_counter() - begun_s)

    async def _scrape(self) -> None:
        begun_s = time.perf_counter()
        await asyncio.to_thread(_read, self._server.metrics_url)
        self._scrapes_s.append(time.perf_counter() - begun_s)


def _run(number: int) -> str:
    return f"benchmark-{number}"


async def _every(seconds: float, act: Callable[[], Awaitable[None]]) -> None:
    while True:
        began_s = time.perf_counter()
        await act()
        await asyncio.sleep(max(0.0, seconds - (time.perf_counter() - began_s)))


def _read(url: str) -> None:
    with urllib.request.urlopen(url) as answer:
        answer.read()
