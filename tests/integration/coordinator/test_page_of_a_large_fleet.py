"""A page over ten thousand devices: the coordinator's event loop is free after every hundred of them."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

from coordinator.page.queries import Queries
from coordinator.page.snapshots import Snapshots
from coordinator.services.event_log import StateTimes
from coordinator.services.views import ViewServicer
from tests.fakes.small_fleet import ORIN_FRONT, small_fleet
from wattfleet.modes import PowerMode
from wattfleet_proto.device_state import BoardSample, DeviceState
from wattfleet_proto.v1 import operator_pb2

_DEVICES = 10_000
_SAMPLE = BoardSample(7.5, 61.0, PowerMode(6, 1_510_000, 624_750_000, 2_133_000_000), 0, 0.35, 0.02, 52_300.0)


class _Budgets:
    async def GetBudgets(self, request: Any, context: Any) -> operator_pb2.GetBudgetsResponse:  # noqa: N802
        return operator_pb2.GetBudgetsResponse(supplies=[operator_pb2.SupplyBudget(supply="site", watts=100.0)])


async def test_sessions_are_answered_while_a_snapshot_is_taken() -> None:
    fleet = small_fleet()
    for k in range(_DEVICES):
        device_id = f"device-{k}"
        fleet.agents.connect(device_id, "agx-orin", "simulated", 18_096)
        fleet.agents.report_front(device_id, ORIN_FRONT, 5.0, 50, "d" * 64)
        fleet.agents.report_state(device_id, DeviceState.READY, 50, "parked")
        fleet.samples.report(device_id, _SAMPLE)

    async def no_times(of: object) -> dict[str, Any]:
        return {}

    repository: Any = SimpleNamespace(fleet=fleet, times=no_times)
    budgets: Any = _Budgets()
    nobody: Any = None
    queries = Queries(
        ViewServicer(repository, StateTimes(fleet.agents.devices, 50)), budgets, nobody, asyncio.get_running_loop()
    )

    async def snapshot() -> tuple[int, float]:
        snapshots, began_s = Snapshots(queries), time.perf_counter()
        keeping = asyncio.create_task(snapshots.keep())
        try:
            return len((await snapshots.newest()).devices), time.perf_counter() - began_s
        finally:
            keeping.cancel()

    began_cpu_s = time.process_time()
    taken = asyncio.create_task(asyncio.to_thread(lambda: asyncio.run(snapshot())))
    turns, longest_s, before_s = 0, 0.0, time.perf_counter()
    while not taken.done():
        await asyncio.sleep(0.001)
        turns, longest_s = turns + 1, max(longest_s, time.perf_counter() - before_s)
        before_s = time.perf_counter()
    devices, took_s = await taken
    cpu_s = time.process_time() - began_cpu_s
    print(
        f"{devices:,} devices in {took_s:.2f} s, {cpu_s:.2f} s of a core;"
        f" longest turn of the loop {1e3 * longest_s:.0f} ms"
    )
    assert devices == _DEVICES + 2
    assert turns > _DEVICES / 200
