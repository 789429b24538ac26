"""Server-sent events: the watts of a supply with every snapshot, changes of pages, and why updates fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from coordinator.page.failures import noted, unexpected_text
from coordinator.page.snapshots import WHOLE_FLEET, Snapshot, Snapshots
from wattfleet.errors import WattfleetError
from wattfleet_identity.http_server import caller_of

_STOP_CHECK_S = 0.5
_MAX_VIEWERS = 40


async def updates(request: Request) -> Response:
    """Answer with updates until the viewer leaves or may no longer read, or the coordinator stops."""
    snapshots: Snapshots = request.app.state.snapshots
    if snapshots.viewers >= _MAX_VIEWERS:
        text = f"{_MAX_VIEWERS} viewers already receive updates, which is the limit: close one, or reload by hand"
        return JSONResponse({"error": "Too many viewers", "detail": text}, status_code=503)
    return StreamingResponse(_stream(request, snapshots), media_type="text/event-stream")


async def _stream(request: Request, snapshots: Snapshots) -> AsyncIterator[str]:
    caller = caller_of(request.scope)
    snapshots.viewers += 1
    supply = request.query_params.get("supply", WHOLE_FLEET)
    try:
        seen: Snapshot | None = None
        failure: str | None = None
        while not caller.is_stopping():
            try:
                caller.role()
            except WattfleetError as error:
                yield _event({"text": str(error), "final": True}, "failure")
                return
            try:
                seen = await asyncio.wait_for(snapshots.after(seen), _STOP_CHECK_S)
            except (TimeoutError, asyncio.TimeoutError):
                if snapshots.failure is not None and snapshots.failure != failure:
                    failure = snapshots.failure
                    yield _event({"text": failure}, "failure")
                continue
            failure = None
            yield _event({"version": seen.version, "watts": asdict(seen.watts.get(supply, seen.watts[WHOLE_FLEET]))})
    except Exception as error:
        yield _event({"text": unexpected_text(noted(error, request.url.path))}, "failure")
    finally:
        snapshots.viewers -= 1


def _event(content: dict[str, Any], kind: str = "message") -> str:
    return f"event: {kind}\ndata: {json.dumps(content)}\n\n"
