"""The pages of runs: all runs, and one run with its rounds, devices, modes, and predicted and observed values."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from coordinator.display.round_details import round_details, slowest_first
from coordinator.display.run_totals import is_over_budget, run_totals
from coordinator.display.run_words import has_labels
from coordinator.display.view_values import Values, round_values, run_values
from coordinator.errors import UnknownRecordError
from coordinator.page.drawing import drawn
from coordinator.page.paging import page_of
from coordinator.page.queries import Queries
from coordinator.page.snapshots import Snapshots
from coordinator.page.timeline import Timeline
from wattfleet.errors import InvalidInputError
from wattfleet_proto.metric_names import metric_order
from wattfleet_proto.run_names import label_of

_STATES = ("running", "finished", "failed")


async def runs(request: Request) -> Response:
    """Answer with the page of all runs, newest first, with the cost of each."""
    snapshots: Snapshots = request.app.state.snapshots
    label, state = (request.query_params.get(name, "").strip() for name in ("label", "state"))
    problem, wanted = "", {}
    try:
        wanted = dict([label_of(label)] if label else ())
    except InvalidInputError as error:
        problem = str(error)
    kept = [each for each in (await snapshots.queries.runs())[::-1] if _keeps(run_values(each), wanted, state)]
    page = page_of([] if problem else kept, request)
    asked = {"label": label, "state": state}
    rows = []
    for view in page.rows:
        with suppress(UnknownRecordError):  # deleted meanwhile
            rows.append(await snapshots.run_costs.of(view))
    content = {
        "page": replace(page, rows=rows),
        "asked": asked,
        "states": _STATES,
        "problem": problem,
        "is_filtered": any(asked.values()),
        "query": lambda number: "?" + urlencode({**{k: v for k, v in asked.items() if v}, "page": number}),
        "label_query": lambda key, value: "?" + urlencode({"label": f"{key}={value}"}),
    }
    return await drawn(request, "runs.html", content)


async def run(request: Request) -> Response:
    """Answer with the page of one run, with one of its rounds in full: the newest, unless the request names another."""
    run_id, asked = request.path_params["run_id"], request.query_params.get("round", "")
    snapshots: Snapshots = request.app.state.snapshots
    queries: Queries = snapshots.queries
    views = await queries.rounds(run_id)
    found = next((each for each in await queries.runs() if each.run_id == run_id), None)
    rounds = [_with_over_budget(round_values(view)) for view in reversed(views)]
    content = {
        "run": None if found is None else run_totals(found, views),
        "run_id": run_id,
        "name": run_id if found is None else run_values(found)["name"],
        "label_query": lambda key, value: "?" + urlencode({"label": f"{key}={value}"}),
        "page": page_of(rounds, request),
        "metrics": sorted({name for each in rounds for name in each["metrics"]}, key=metric_order)[:4],
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
            **_with_over_budget(details),
            "device_page": page_of(devices, request),
            "not_selected": reasons.most_common(),
            "timeline": Timeline.of(devices, details),
        }
    return await drawn(request, "run.html", content)


def _keeps(run: Values, labels: Mapping[str, str], state: str) -> bool:
    """Whether a run is listed."""
    words = "failed" if run["error"] else "finished" if run["finished"] else "running"
    return has_labels(run, labels) and state in ("", words)


def _with_over_budget(round_: Values) -> Values:
    return {**round_, "over_budget": is_over_budget(round_)}
