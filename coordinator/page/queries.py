"""The page's queries: the services that answer the commands, called in the coordinator's own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

from starlette.requests import Request

from coordinator.services.identities import IdentityServicer
from coordinator.services.operations import OperatorServicer
from coordinator.services.views import ViewServicer
from wattfleet_proto.v1 import identity_pb2, operator_pb2, view_pb2

# --- Links ------------------------------------------------------------------------------------------------------------
# The addresses of the pages of devices and runs, whose ids may have any printable characters.


def device_link(device_id: str) -> str:
    """The path of a device's page. A browser would resolve a slash or dots that are not encoded."""
    return f"/devices/{quote(device_id, safe='')}"


def run_link(run_id: str, number: int | None = None) -> str:
    """The path of a run's page.

    Args:
        run_id: the run.
        number: the round that is shown in full; None for the newest.
    """
    return f"/runs/{quote(run_id, safe='')}" + ("" if number is None else f"?round={number}")


# --- Paging -----------------------------------------------------------------------------------------------------------
# Pages of a long list.

_ROWS = 50


@dataclass(frozen=True)
class ListPage:
    """One page of a list.

    Attributes:
        rows: its rows.
        number: the number of the page, from 1.
        pages: number of pages.
        total: number of rows of the whole list.
    """

    rows: Sequence[Any]
    number: int
    pages: int
    total: int


def page_of(rows: Sequence[Any], request: Request) -> ListPage:
    """The page of a list that a request names; the nearest one if that page does not exist."""
    asked = request.query_params.get("page", "1")
    pages = max(1, -(-len(rows) // _ROWS))
    number = min(max(int(asked), 1), pages) if asked.isdecimal() and len(asked) < 10 else 1
    return ListPage(rows[(number - 1) * _ROWS : number * _ROWS], number, pages, len(rows))


# --- Queries ----------------------------------------------------------------------------------------------------------

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Queries:
    """Reads the fleet from another thread's event loop; errors are those of the services.

    Attributes:
        viewer: answers queries about the fleet.
        operator: answers queries about what is planned and allowed.
        identity: lists what operators changed.
        loop: the coordinator's event loop, the only one in which the fleet may be read.
    """

    viewer: ViewServicer
    operator: OperatorServicer
    identity: IdentityServicer
    loop: asyncio.AbstractEventLoop

    async def fleet(self) -> view_pb2.GetFleetResponse:
        """The properties of the whole fleet."""
        return await self._asked(self.viewer.GetFleet(view_pb2.GetFleetRequest(), None))

    async def budgets(self) -> list[operator_pb2.SupplyBudget]:
        """The budgets in force, and the watts of each supply."""
        answer = await self._asked(self.operator.GetBudgets(operator_pb2.GetBudgetsRequest(), None))
        return list(answer.supplies)

    async def batteries(self) -> list[operator_pb2.Battery]:
        """The batteries of supplies and devices."""
        answer = await self._asked(self.operator.GetBatteries(operator_pb2.GetBatteriesRequest(), None))
        return list(answer.batteries)

    async def devices(self) -> list[view_pb2.DeviceView]:
        """All devices by id, without their fronts."""
        answers = await self._streamed(self.viewer.ListDevices, view_pb2.ListDevicesRequest())
        return [device for answer in answers for device in answer.devices]

    async def device(self, device_id: str) -> view_pb2.DeviceView:
        """One device with its fronts and times."""
        request = view_pb2.ListDevicesRequest(device_ids=[device_id], with_fronts=True, with_times=True)
        (answer,) = await self._streamed(self.viewer.ListDevices, request)
        found: view_pb2.DeviceView = answer.devices[0]
        return found

    async def runs(self) -> list[view_pb2.RunView]:
        """All runs with their times, oldest first."""
        answers = await self._streamed(self.viewer.ListRuns, view_pb2.ListRunsRequest(with_times=True))
        return [run for answer in answers for run in answer.runs]

    async def rounds(self, run_id: str, with_devices: bool = False) -> list[view_pb2.RoundView]:
        """The rounds of a run, oldest first: their totals, or with their devices."""
        request = view_pb2.StreamRoundsRequest(run_id=run_id, without_devices=not with_devices, with_times=True)
        return await self._streamed(self.viewer.StreamRounds, request)

    async def round(self, run_id: str, number: int, device_id: str = "") -> view_pb2.RoundView:
        """One round with its devices, or with one of them."""
        request = view_pb2.StreamRoundsRequest(run_id=run_id, round=number, device_id=device_id)
        (found,) = await self._streamed(self.viewer.StreamRounds, request)
        return found

    async def preview(self, request: operator_pb2.PreviewPlanRequest) -> operator_pb2.PreviewPlanResponse:
        """The next round as it would be planned; nothing changes."""
        return await self._asked(self.operator.PreviewPlan(request, None))

    async def events(self, request: view_pb2.ListEventsRequest) -> list[view_pb2.FleetEvent]:
        """What happened in the fleet, newest first."""
        answers = await self._streamed(self.viewer.ListEvents, request)
        return [event for answer in answers for event in answer.events]

    async def audit_log(self) -> list[identity_pb2.AuditEntry]:
        """What operators changed or tried to change, newest first."""
        answers = await self._streamed(self.identity.ReadAuditLog, identity_pb2.ReadAuditLogRequest())
        return [entry for answer in answers for entry in answer.entries][::-1]

    async def _asked(self, query: Coroutine[Any, Any, Answer]) -> Answer:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(query, self.loop))

    async def _streamed(self, method: Callable[[Any, Any], AsyncIterator[Answer]], request: Any) -> list[Answer]:
        async def all_messages() -> list[Answer]:
            found = []
            async for message in method(request, None):
                found.append(message)
                await asyncio.sleep(0)  # sessions are answered between two messages
            return found

        return await self._asked(all_messages())
