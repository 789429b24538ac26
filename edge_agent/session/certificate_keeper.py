"""Keeps the agent's certificate valid: renews it at two thirds of its life, and reconnects with the new one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import datetime

import grpc

from edge_agent.session.connection import channel_to
from wattfleet.errors import WattfleetError
from wattfleet_identity.endpoint import Endpoint, require_identity
from wattfleet_identity.handshakes import HandshakeError
from wattfleet_identity.renewal import TIMEOUT_S, RenewalSchedule, refusal, renewal_request, store_renewed
from wattfleet_io.clock import utc_now
from wattfleet_proto.v1 import enrolment_pb2_grpc

_log = logging.getLogger(__name__)

_LONGEST_WAIT_S = 3600.0
"""Longest time between two checks, s: the date may be set and an identity may appear at any moment."""


class CertificateKeeper:
    """Renews one agent's certificate.

    Args:
        endpoint: the coordinator, and the folder with the certificate.
        on_renewed: called after a renewal.
        now: returns the time of day.
        now_s: a monotonic clock, s.
        sleep: waits for a number of seconds.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        on_renewed: Callable[[], None],
        now: Callable[[], datetime] = utc_now,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._endpoint = endpoint
        self._on_renewed = on_renewed
        self._schedule = None if endpoint.folder is None else RenewalSchedule(endpoint.folder, now, now_s)
        self._sleep = sleep
        self._problem = ""

    async def run(self) -> None:
        """Renew the certificate whenever it is due, until cancelled."""
        while self._schedule is not None:
            if (wait_s := self._wait_s(self._schedule)) > 0:
                await self._sleep(min(wait_s, _LONGEST_WAIT_S))
            elif await self._renewed():
                self._schedule.renewed()
            else:
                self._schedule.failed()
        await asyncio.Event().wait()  # plaintext has no certificate

    def _wait_s(self, schedule: RenewalSchedule) -> float:
        """Return the seconds until the certificate is due for renewal or, without one, until the next check for one."""
        try:
            return _LONGEST_WAIT_S if self._endpoint.identity() is None else schedule.wait_s()
        except WattfleetError as error:  # the session reports it, too
            self._note(f"the certificate cannot be read: {error}")
            return _LONGEST_WAIT_S

    async def _renewed(self) -> bool:
        """Renew the certificate, and log a failure once. Returns whether there is a new certificate."""
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
        _log.info("certificate renewed; it expires on %s", f"{renewed.not_after:%Y-%m-%d}")
        self._problem = ""
        self._on_renewed()
        return True

    def _note(self, problem: str) -> None:
        if problem != self._problem:
            _log.warning("%s", problem)
        self._problem = problem
