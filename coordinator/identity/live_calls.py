"""Long calls in progress and their certificates, which TLS checks only at handshakes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from wattfleet_identity.certificate_check import InvalidCertificateError
from wattfleet_identity.certificates import Certificate

Check = Callable[[Certificate], None]
"""Raises an `InvalidCertificateError` if a certificate is no longer valid."""


class LiveCalls:
    """Ends the calls whose certificate has expired or was revoked."""

    def __init__(self) -> None:
        """Start without any call."""
        self._calls: dict[asyncio.Task[object], tuple[Certificate, Check]] = {}
        self._ended: dict[asyncio.Task[object], InvalidCertificateError] = {}

    @contextmanager
    def holding(self, certificate: Certificate, require_valid: Check) -> Iterator[None]:
        """Register a call of the current task while it is in progress.

        Args:
            certificate: the caller's certificate.
            require_valid: checks it.

        Raises:
            InvalidCertificateError: the certificate became invalid during the call.
        """
        task = asyncio.current_task()
        assert task is not None, "a handler runs in a task"
        self._calls[task] = certificate, require_valid
        try:
            yield
        except asyncio.CancelledError:
            if (why := self._ended.get(task)) is None:
                raise  # the caller has disconnected
            task.uncancel()
            raise why from None
        finally:
            self._calls.pop(task, None)
            self._ended.pop(task, None)

    def end_invalid(self) -> int:
        """End the calls whose certificate is no longer valid, and return their number."""
        before = len(self._ended)
        for task, (certificate, require_valid) in self._calls.items():
            if task in self._ended:
                continue
            try:
                require_valid(certificate)
            except InvalidCertificateError as error:
                self._ended[task] = error
                task.cancel()
        return len(self._ended) - before

    async def keep_ending(self, every_s: float, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """End calls whose certificate expires or is revoked, until cancelled."""
        while True:
            await sleep(every_s)
            self.end_invalid()
