"""The page of the next round with another budget or policy, from the same dry run as `plan --dry-run`."""

from __future__ import annotations

import math
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from coordinator.display.plan_values import preview_values
from coordinator.display.view_values import Values
from coordinator.page.drawing import drawn
from coordinator.page.paging import page_of
from coordinator.page.snapshots import Snapshots
from wattfleet.errors import InvalidInputError, WattfleetError
from wattfleet.planning.policies import policy_names
from wattfleet_proto.v1 import operator_pb2


async def what_if(request: Request) -> Response:
    """Answer with the page of the next round, as it is and as it would be."""
    snapshots: Snapshots = request.app.state.snapshots
    snapshot = await snapshots.newest()
    asked = {
        name: request.query_params.get(name, "").strip() for name in ("budget_w", "policy", "clients", "deadline_s")
    }
    content: dict[str, Any] = {
        "asked": asked,
        "snapshot": snapshot,
        "policies": policy_names(),
        "now": None,
        "then": None,
        "problem": "",
        "changes": [],
        "page": None,
    }
    try:
        request_then = _request_of(asked)
        now = preview_values(await snapshots.queries.preview(operator_pb2.PreviewPlanRequest()))
        content["now"] = now
        if any(asked.values()):
            then = preview_values(await snapshots.queries.preview(request_then))
            content |= {"then": then, "changes": _changes(now, then)}
        content["page"] = page_of(_selected_first(content["then"] or now), request)
    except WattfleetError as error:
        content["problem"] = str(error)
    return await drawn(request, "what_if.html", content)


def _request_of(asked: dict[str, str]) -> operator_pb2.PreviewPlanRequest:
    """Convert a filled form to a request.

    Raises:
        InvalidInputError: a field is not a valid number.
    """
    clients = _number_in(asked["clients"], "the number of devices")
    if clients is not None and clients != int(clients):
        raise InvalidInputError(f"the number of devices must be whole, not {clients:g}")
    return operator_pb2.PreviewPlanRequest(
        site_budget_w=_number_in(asked["budget_w"], "the budget"),
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
