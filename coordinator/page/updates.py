"""Server-sent events: the site's watts with every snapshot, and word when what pages show has changed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from coordinator.page.snapshots import Snapshot, Snapshots

_STOP_CHECK_S = 0.5
_MAX_VIEWERS = 40


async def updates(request: Request) -> Response:
    """A stream of updates, until the viewer leaves or the coordinator stops."""
    snapshots: Snapshots = request.app.state.snapshots
    if snapshots.viewers >= _MAX_VIEWERS:
        return Response(f"more than {_MAX_VIEWERS} viewers: this page is not updated", status_code=503)
    return StreamingResponse(_stream(request, snapshots), media_type="text/event-stream")


async def _stream(request: Request, snapshots: Snapshots) -> AsyncIterator[str]:
    snapshots.viewers += 1
    try:
        seen: Snapshot | None = None
        while not request.app.state.is_stopping():
            try:
                seen = await asyncio.wait_for(snapshots.after(seen), _STOP_CHECK_S)
            except (TimeoutError, asyncio.TimeoutError):
                continue
            yield f"data: {json.dumps({'version': seen.version, 'watts': asdict(seen.watts)})}\n\n"
    finally:
        snapshots.viewers -= 1
