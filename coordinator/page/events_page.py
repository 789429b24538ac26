"""The page of events: what happened to devices, runs, rounds and budgets, and the audit log."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from coordinator.display.event_words import EVENT_KINDS, subject
from coordinator.display.run_words import RunNames
from coordinator.display.view_values import Values, event_values
from coordinator.page.drawing import drawn
from coordinator.page.links import device_link, run_link
from coordinator.page.paging import page_of
from coordinator.page.snapshots import Snapshots
from wattfleet.errors import WattfleetError
from wattfleet_identity.http_server import caller_of
from wattfleet_identity.peers import Role
from wattfleet_proto.v1 import view_pb2

_EVENTS = 2_000
_AUDIT_ENTRIES = 200
_OFFERED_RUNS = 50
_FILTERS = ("kind", "device", "run", "supply")


async def events(request: Request) -> Response:
    """Answer with the page of events; as with the commands, the audit log is only for operators."""
    snapshots: Snapshots = request.app.state.snapshots
    snapshot = await snapshots.newest()
    asked = {name: request.query_params.get(name, "").strip() for name in _FILTERS}
    names = RunNames(snapshot.runs)
    may_read = caller_of(request.scope).role() is Role.OPERATOR if request.app.state.has_authority else True
    entries = (await snapshots.queries.audit_log())[:_AUDIT_ENTRIES] if may_read else []
    found: list[Values] = []
    problem = ""
    try:
        found = await _found(snapshots, asked, names)
    except WattfleetError as error:
        problem = str(error)
    content = {
        "page": page_of(found, request),
        "asked": asked,
        "problem": problem,
        "kinds": EVENT_KINDS,
        "runs": _offered_runs(snapshot.runs, asked["run"]),
        "supplies": snapshot.supplies,
        "is_filtered": any(asked.values()),
        "query": lambda number: "?" + urlencode({**{k: v for k, v in asked.items() if v}, "page": number}),
        "most_events": _EVENTS,
        "may_read_audit_log": may_read,
        "entries": entries,
        "most_entries": _AUDIT_ENTRIES,
    }
    return await drawn(request, "events.html", content)


async def _found(snapshots: Snapshots, asked: dict[str, str], names: RunNames) -> list[Values]:
    """The events that a filter keeps, newest first.

    Raises:
        InvalidInputError: the kind or the supply does not exist.
    """
    wanted = view_pb2.ListEventsRequest(
        kinds=[asked["kind"]] if asked["kind"] else (),
        device_id=asked["device"],
        run_id=asked["run"],
        supply=asked["supply"],
        limit=_EVENTS,
    )
    values = [event_values(each) for each in await snapshots.queries.events(wanted)]
    return [{**each, "subject": subject(each, names), "link": _link(each)} for each in values]


def _link(event: Values) -> str | None:
    """The address of the page that shows what an event is about; None if there is none."""
    if event["kind"] == "device":
        return device_link(event["device_id"])
    if event["kind"] in ("run", "round"):
        return run_link(event["run_id"], event["round"] or None)
    if event["kind"] == "budget":
        return "/?" + urlencode({"supply": event["supply"]})
    return None


def _offered_runs(runs: Any, asked: str) -> list[Values]:
    """The newest runs, newest first, and the one that is asked for."""
    newest = list(runs[: -_OFFERED_RUNS - 1 : -1])
    return newest + [each for each in runs[:-_OFFERED_RUNS] if each["run_id"] == asked]
