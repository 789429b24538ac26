"""Runs, and one run with its rounds: who trained, in which mode, and what was predicted and observed."""

from __future__ import annotations

import asyncio
from collections import Counter

from starlette.requests import Request
from starlette.responses import Response

from coordinator.display.round_details import round_details, slowest_first
from coordinator.display.view_values import round_values, run_values
from coordinator.page.drawing import drawn
from coordinator.page.paging import page_of
from coordinator.page.queries import Queries
from coordinator.page.snapshots import Snapshots
from coordinator.page.timeline import Timeline


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
        "metrics": sorted({name for each in rounds for name in each["metrics"]})[:4],
        "shown": None,
        "is_newest": not asked,
    }
    if rounds:
        number = int(asked) if asked.isdecimal() and len(asked) < 9 else rounds[0]["round"]
        view = await queries.round(run_id, number)
        details = await asyncio.to_thread(round_details, view)
        devices = [] if view.unplanned else slowest_first(details["selected"])
        reasons = Counter(each["reason"] for each in details["not_selected"])
        content["shown"] = {
            **details,
            "device_page": page_of(devices, request),
            "not_selected": reasons.most_common(),
            "timeline": Timeline.of(devices, details),
        }
    return await drawn(request, "run.html", content)
