"""The page of events: changes of devices and runs since the coordinator started, and the audit log."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from coordinator.page.drawing import drawn
from coordinator.page.paging import page_of
from coordinator.page.snapshots import Snapshots
from wattfleet_identity.http_server import caller_of
from wattfleet_identity.peers import Role

_AUDIT_ENTRIES = 200


async def events(request: Request) -> Response:
    """Answer with the page of events; as with the commands, the audit log is only for operators."""
    snapshots: Snapshots = request.app.state.snapshots
    await snapshots.newest()
    may_read = caller_of(request.scope).role() is Role.OPERATOR if request.app.state.has_authority else True
    entries = (await snapshots.queries.audit_log())[:_AUDIT_ENTRIES] if may_read else []
    content = {
        "page": page_of(list(snapshots.events.events), request),
        "may_read_audit_log": may_read,
        "entries": entries,
        "most_entries": _AUDIT_ENTRIES,
    }
    return await drawn(request, "events.html", content)
