"""Runs, and one run with its rounds: who trained, in which mode, and what was predicted and observed."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from coordinator.display.plan_values import round_device_values
from coordinator.display.view_values import Values, round_values, run_values
from coordinator.page.drawing import drawn
from coordinator.page.paging import page_of
from coordinator.page.queries import Queries
from coordinator.page.snapshots import Snapshots
from coordinator.page.timeline import Timeline
from wattfleet_proto.convert import plan_from_message
from wattfleet_proto.metric_names import metric_order
from wattfleet_proto.v1 import view_pb2


async def runs(request: Request) -> Response:
    """The page of all runs, newest first."""
    snapshots: Snapshots = request.app.state.snapshots
    snapshot = await snapshots.newest()
    return await drawn(request, "runs.html", {"page": page_of(snapshot.runs[::-1], request)})


async def run(request: Request) -> Response:
    """The page of one run, with one of its rounds in full: the newest, unless another is asked for."""
    run_id, asked = request.path_params["run_id"], request.query_params.get("round", "")
    snapshots: Snapshots = request.app.state.snapshots
    queries: Queries = snapshots.queries
    views = await queries.rounds(run_id)
    found = next((each for each in await queries.runs() if each.run_id == run_id), None)
    rounds = [round_values(view) for view in reversed(views)]
    content = {
        "run": None if found is None else run_values(found),
        "run_id": run_id,
        "page": page_of(rounds, request),
        "metrics": sorted({name for each in rounds for name in each["metrics"]}, key=metric_order)[:4],
        "shown": None,
        "is_newest": not asked,
    }
    if rounds:
        number = int(asked) if asked.isdecimal() and len(asked) < 9 else rounds[0]["round"]
        view = await queries.round(run_id, number)
        devices, left_out = await asyncio.to_thread(_devices_of, view)
        content["shown"] = {
            **round_values(view),
            "device_page": page_of(devices, request),
            "not_selected": left_out,
            "timeline": Timeline.of(devices, round_values(view)),
        }
    return await drawn(request, "run.html", content)


def _devices_of(view: view_pb2.RoundView) -> tuple[list[Values], list[tuple[str, int]]]:
    """The selected devices, and for each reason of the others how many have it, the most frequent first."""
    if view.unplanned:
        return [], []
    counts: dict[str, int] = {}
    for decision in plan_from_message(view.plan, view.epochs).decisions:
        if not decision.selected:
            counts[decision.reason] = counts.get(decision.reason, 0) + 1
    return round_device_values(view), sorted(counts.items(), key=lambda each: -each[1])
