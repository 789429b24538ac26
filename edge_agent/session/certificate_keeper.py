"""Keeps the agent's certificate valid: renews it at two thirds of its life, and reconnects with the new one."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from datetime import datetime

import grpc

from edge_agent.session.connection import channel_to
from wattfleet.errors import WattfleetError
from wattfleet_identity.endpoint import Endpoint, require_identity
from wattfleet_identity.handshakes import HandshakeError
from wattfleet_identity.renewal import TIMEOUT_S, due_at, refusal, renewal_request, store_renewed
from wattfleet_io.clock import utc_now
from wattfleet_proto.v1 import enrolment_pb2_grpc

_log = logging.getLogger(__name__)

_LONGEST_WAIT_S = 3600.0
"""The date may be set at any moment, and an identity may appear: both are looked at so often."""

_JITTER = 0.1
"""Share of the time that is left, over which a fleet that was enrolled together spreads its renewals."""

_FIRST_RETRY_S, _LONGEST_RETRY_S = 60.0, 3600.0


class CertificateKeeper:
    """Renews one agent's certificate.

    Args:
        endpoint: the coordinator, and the folder with the certificate.
        on_renewed: called after a renewal.
        now: the time.
        sleep: waits for so many seconds.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        on_renewed: Callable[[], None],
        now: Callable[[], datetime] = utc_now,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._endpoint = endpoint
        self._on_renewed = on_renewed
        self._now = now
        self._sleep = sleep
        self._problem = ""

    async def run(self) -> None:
        """Renew the certificate whenever it is due, until cancelled."""
        retry_s, lateness = _FIRST_RETRY_S, random.uniform(0, _JITTER)
        while True:
            if (wait_s := self._due_in_s(lateness)) > 0:
                await self._sleep(min(wait_s, _LONGEST_WAIT_S))
                continue
            if await self._renewed():
                retry_s, lateness = _FIRST_RETRY_S, random.uniform(0, _JITTER)
                continue
            await self._sleep(random.uniform(0.5, 1.0) * retry_s)
            retry_s = min(_LONGEST_RETRY_S, 2 * retry_s)

    def _due_in_s(self, lateness: float) -> float:
        """Seconds until the certificate is due; without one, until it is looked for again."""
        try:
            if self._endpoint.folder is None or self._endpoint.identity() is None:
                return _LONGEST_WAIT_S
            due, end = due_at(self._endpoint.folder), require_identity(self._endpoint.folder).certificate.not_after
        except WattfleetError as error:  # the session says so, too
            self._note(f"the certificate cannot be read: {error}")
            return _LONGEST_WAIT_S
        return ((due - self._now()) + lateness * (end - due)).total_seconds()

    async def _renewed(self) -> bool:
        """Renew the certificate, and log a failure once; returns whether there is a new one."""
        assert self._endpoint.folder is not None, "a certificate was due"
        try:
            identity = require_identity(self._endpoint.folder)
            async with channel_to(self._endpoint) as channel:
                stub = enrolment_pb2_grpc.EnrolmentServiceStub(channel)
                answer = await stub.Renew(renewal_request(identity), timeout=TIMEOUT_S)
            store_renewed(self._endpoint.folder, identity, answer)
        except HandshakeError as error:
            self._note(str(error))
            return False
        except grpc.aio.AioRpcError as error:
            self._note(f"the certificate could not be renewed: {refusal(error)}; trying again")
            return False
        except WattfleetError as error:
            self._note(f"the certificate could not be renewed: {error}; trying again")
            return False
        renewed = require_identity(self._endpoint.folder).certificate
        _log.info("the certificate is renewed; it expires on %s", f"{renewed.not_after:%Y-%m-%d}")
        self._problem = ""
        self._on_renewed()
        return True

    def _note(self, problem: str) -> None:
        if problem != self._problem:
            _log.warning("%s", problem)
        self._problem = problem
