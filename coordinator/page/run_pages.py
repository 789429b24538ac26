"""The pages of runs, and the what-if page."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any
from urllib.parse import urlencode

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from coordinator.display.values import (
    ENERGY_GROUPS,
    assumption,
    energy_rows,
    forecast_values,
    groups_of,
    is_in_month,
    is_over_budget,
    month_of,
    preview_values,
    round_details,
    round_values,
    run_totals,
    run_values,
    slowest_first,
)
from coordinator.display.words import RunNames, Values, has_labels
from coordinator.errors import UnknownRecordError
from coordinator.page.plots import Timeline, drawn
from coordinator.page.queries import Queries, page_of
from coordinator.page.snapshots import Snapshots
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet.core.planning.policies import policy_names
from wattfleet_proto.names import label_of, metric_order
from wattfleet_proto.v1 import operator_pb2

# --- Run pages --------------------------------------------------------------------------------------------------------
# The pages of runs: all runs, one run with its rounds and devices, and the energy of all of them by month.


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
    forecast = None
    with suppress(InvalidInputError):  # the run has ended, or has only begun
        if found is not None:
            forecast = await asyncio.to_thread(forecast_values, found, views, time.time())
    content = {
        "run": None if found is None else run_totals(found, views),
        "forecast": forecast,
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


async def energy(request: Request) -> Response:
    """Answer with the page of the energy of trainings, by month and by site, run or device."""
    snapshots: Snapshots = request.app.state.snapshots
    by = request.query_params.get("by", "site")
    month = request.query_params.get("month", f"{datetime.now(timezone.utc):%Y-%m}").strip()
    problem, rows = "", []
    try:
        groups, only = groups_of(by), month_of(month) if month else None
    except InvalidInputError as error:
        problem = str(error)
    else:
        views = [view for view in await snapshots.queries.runs() if is_in_month(view, only)]
        found = {}
        for view in views:
            with suppress(UnknownRecordError):  # deleted meanwhile
                found[view.run_id] = await snapshots.run_energies.of(view)
        supplies = {each.device_id: each.supply for each in await snapshots.queries.devices() if each.supply}
        rows = energy_rows(found, {view.run_id: view.name for view in views}, supplies, groups, only)
    content = {
        "by": by,
        "month": month,
        "groups": ENERGY_GROUPS,
        "problem": problem,
        "page": page_of(rows, request),
        "total_j": sum(row["training_j"] or 0.0 for row in rows),
        "query": lambda number: "?" + urlencode({"by": by, "month": month, "page": number}),
    }
    return await drawn(request, "energy.html", content)


def _keeps(run: Values, labels: Mapping[str, str], state: str) -> bool:
    """Whether a run is listed."""
    words = "failed" if run["error"] else "finished" if run["finished"] else "running"
    return has_labels(run, labels) and state in ("", words)


def _with_over_budget(round_: Values) -> Values:
    return {**round_, "over_budget": is_over_budget(round_)}


# --- What if page -----------------------------------------------------------------------------------------------------
# The page of the next round with other budgets or another policy, from the same dry run as `plan --dry-run`.

_BUDGET = "budget:"
"""Before the name of a supply, in the name of the field with its assumed budget."""


async def what_if(request: Request) -> Response:
    """Answer with the page of the next round, as it is and as it would be."""
    snapshots: Snapshots = request.app.state.snapshots
    snapshot = await snapshots.newest()
    asked = {name: _text_in(request.query_params, name) for name in ("policy", "clients", "deadline_s")}
    budgets = {each["supply"]: _text_in(request.query_params, _BUDGET + each["supply"]) for each in snapshot.supplies}
    names = RunNames(snapshot.runs)
    now, problem_now = await _planned(snapshots.queries, operator_pb2.PreviewPlanRequest())
    then: Values | None = None
    problem = problem_now
    if any(asked.values()) or any(budgets.values()):
        try:
            request_then = _request_of(asked, budgets)
        except InvalidInputError as error:
            problem = str(error)
        else:
            then, problem = await _planned(snapshots.queries, request_then)
    shown = then or now
    content: dict[str, Any] = {
        "asked": asked,
        "budgets": budgets,
        "field": _BUDGET,
        "snapshot": snapshot,
        "policies": policy_names(),
        "now": now,
        "then": then,
        "problem": problem,
        "problem_now": problem_now if then is not None else "",
        "changes": _changes(now, then) if now is not None and then is not None else [],
        "supplies": _supplies(snapshot.supplies, now, then),
        "page": None if shown is None else page_of(_selected_first(shown), request),
        "round_text": None if shown is None else _round_text(shown, names),
        "assumption": None if shown is None else assumption(shown, names),
        "query": lambda number: _query(asked, budgets, number),
    }
    return await drawn(request, "what_if.html", content)


async def _planned(queries: Queries, request: operator_pb2.PreviewPlanRequest) -> tuple[Values | None, str]:
    """The values of a preview, or why there is none."""
    try:
        return preview_values(await queries.preview(request)), ""
    except WattfleetError as error:
        return None, str(error)


def _text_in(params: QueryParams, name: str) -> str:
    return params.get(name, "").strip()


def _request_of(asked: Mapping[str, str], budgets: Mapping[str, str]) -> operator_pb2.PreviewPlanRequest:
    """Convert a filled form to a request."""
    clients = _number_in(asked["clients"], "the number of devices")
    if clients is not None and clients != int(clients):
        raise InvalidInputError(f"the number of devices must be whole, not {clients:g}")
    numbers = {supply: _number_in(text, f"the budget of {supply}") for supply, text in budgets.items()}
    return operator_pb2.PreviewPlanRequest(
        budgets_w={supply: watts for supply, watts in numbers.items() if watts is not None},
        policy=asked["policy"],
        clients=None if clients is None else min(int(clients), 2**31),
        deadline_s=_number_in(asked["deadline_s"], "the deadline"),
    )


def _number_in(text: str, what: str) -> float | None:
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise InvalidInputError(f"{what} must be a number of 0 or more, not {text!r}")
    return value


def _query(asked: Mapping[str, str], budgets: Mapping[str, str], number: int) -> str:
    """The URL query of one page of the list of devices."""
    assumed = {_BUDGET + supply: text for supply, text in budgets.items()}
    return "?" + urlencode({**{name: text for name, text in {**asked, **assumed}.items() if text}, "page": number})


def _round_text(plan: Values, names: RunNames) -> str:
    run = "a new run" if plan["run_id"] is None else f"run {names.of(plan['run_id'])}"
    return f"Round {plan['round']} of {run}, {plan['epochs']:g} local epoch{'' if plan['epochs'] == 1 else 's'}"


def _supplies(supplies: Sequence[Values], now: Values | None, then: Values | None) -> list[Values]:
    """Each supply with its watts in both plans; None for a plan that is not possible."""
    plans = [{} if plan is None else {use["supply"]: use for use in plan["supplies"]} for plan in (now, then)]
    return [{**each, "now": plans[0].get(each["supply"]), "then": plans[1].get(each["supply"])} for each in supplies]


def _selected_first(plan: Values) -> list[Values]:
    considered = sorted(plan["devices"], key=lambda each: (not each["selected"], each["device_id"]))
    return [*considered, *({**each, "selected": False, "mode": None} for each in plan["not_looked_at"])]


def _changes(now: Values, then: Values) -> list[Values]:
    """The devices that drop out, join, or get another mode or limit, with reasons; those dropping out come first."""
    planned_before = {each["device_id"]: each for each in now["devices"]}
    found: list[tuple[int, str, Values, Values | None]] = []
    for each in then["devices"]:
        was = planned_before.get(each["device_id"])
        was_selected = was is not None and was["selected"]
        if was_selected and not each["selected"]:
            found.append((0, "drops out", each, None))
        elif each["selected"] and not was_selected:
            found.append((1, "comes in", each, None))
        elif each["selected"] and was is not None and was["mode"] != each["mode"]:
            found.append((2, "another mode", each, was["mode"]))
    ordered = sorted(found, key=lambda each: (each[0], each[2]["device_id"]))
    return [{**device, "what": what, "mode_before": before} for _, what, device, before in ordered]
