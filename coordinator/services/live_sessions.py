"""The sessions in progress, so that the coordinator can end one with a reason for its agent."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from coordinator.state.leases import Lease


class LiveSessions:
    """The tasks that serve sessions, by lease."""

    def __init__(self) -> None:
        """Start without any session."""
        self._handlers: dict[Lease, asyncio.Task[Any]] = {}
        self._ended: dict[Lease, tuple[grpc.StatusCode, str]] = {}

    def begin(self, lease: Lease) -> None:
        """Register the current task as the one that serves a session."""
        this = asyncio.current_task()
        assert this is not None, "a handler runs in a task"
        self._handlers[lease] = this

    def leases(self) -> list[Lease]:
        """The leases of the sessions that are not being ended."""
        return [lease for lease in self._handlers if lease not in self._ended]

    def end(self, lease: Lease, code: grpc.StatusCode, details: str) -> None:
        """End a session by cancelling its task, unless this has been done already.

        Args:
            lease: the session's lease.
            code: the status that its agent receives.
            details: the reason and the remedy.
        """
        handler = self._handlers.get(lease)
        if handler is not None and lease not in self._ended:
            self._ended[lease] = code, details
            handler.cancel()

    async def end_all(self, code: grpc.StatusCode, details: str) -> None:
        """End all sessions, and wait for their tasks."""
        handlers = list(self._handlers.values())
        for lease in list(self._handlers):
            self.end(lease, code, details)
        await asyncio.gather(*handlers, return_exceptions=True)

    def why_ended(self, lease: Lease) -> tuple[grpc.StatusCode, str] | None:
        """Why the current task's session was ended; its cancellation is then undone.

        None if something else cancelled it.
        """
        ended = self._ended.get(lease)
        if ended is not None:
            self._handlers[lease].uncancel()
        return ended

    def forget(self, lease: Lease) -> None:
        """Remove a session whose task is about to end."""
        self._handlers.pop(lease, None)
        self._ended.pop(lease, None)
