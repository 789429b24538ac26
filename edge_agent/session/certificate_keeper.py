"""Keeps the agent's certificate valid: renews it at two thirds of its life, and reconnects with the new one."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime
from pathlib import Path

import grpc

from wattfleet.common.atomic_files import make_state_folder, read_regular_file, replace_file
from wattfleet.common.clock import utc_now
from wattfleet.common.identity.channels import Endpoint, HandshakeError, require_identity, why_refused
from wattfleet.common.identity.renewal import TIMEOUT_S, RenewalSchedule, refusal, renewal_request, store_renewed
from wattfleet.common.parsing import parse_json
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet_proto.v1 import enrolment_pb2_grpc, session_pb2_grpc

_log = logging.getLogger(__name__)


# --- Connection -------------------------------------------------------------------------------------------------------
# Connections to the coordinator: every attempt opens a new one, with the identity that is then on disk.


# A long-lived channel retries at gRPC's own intervals, up to two minutes apart, and keeps using a dead connection.
# Channels that exist at the same time must share neither backoff nor connection.
_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)

Connect = Callable[[], AbstractAsyncContextManager["session_pb2_grpc.SessionServiceAsyncStub"]]
"""Opens a new connection to the coordinator; leaving the context closes it.

It raises a `HandshakeError` if the identity cannot be used, or client and coordinator do not accept each other.
"""


def connects_to(endpoint: Endpoint) -> Connect:
    """Return a function that opens connections to a coordinator."""

    @asynccontextmanager
    async def connect() -> AsyncIterator[session_pb2_grpc.SessionServiceAsyncStub]:
        async with channel_to(endpoint) as channel:
            yield session_pb2_grpc.SessionServiceStub(channel)

    return connect


@asynccontextmanager
async def channel_to(endpoint: Endpoint) -> AsyncIterator[grpc.aio.Channel]:
    """Open a new channel.

    Raises:
        HandshakeError: the identity cannot be used, or client and coordinator do not accept each other.
    """
    try:
        opened = endpoint.async_channel(_OPTIONS)
    except InvalidInputError as error:
        raise HandshakeError(str(error)) from None
    try:
        async with opened as channel:
            yield channel
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE and _is_handshake(error.details() or ""):
            refused = await asyncio.to_thread(why_refused, endpoint)
            if refused is not None:
                raise refused from None
        raise


def _is_handshake(details: str) -> bool:
    """Return whether gRPC's text may describe a failed handshake rather than an unreachable coordinator."""
    return any(words in details for words in ("Socket closed", "handshake", "verification check"))


# --- Revoked certificates ---------------------------------------------------------------------------------------------
# The viewers and operators who may no longer read the metrics, also while the coordinator is unreachable.


class RevokedCertificates:
    """The revoked certificates that the coordinator has named last.

    Args:
        path: stores them; None keeps them in memory only.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._serials = frozenset[str]()
        if path is None:
            return
        try:
            self._serials = frozenset(map(str, parse_json(read_regular_file(path))["serials"]))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.error("%s: cannot be read (%s); the coordinator sends it again", path, error)

    def receive(self, serials: Iterable[str]) -> None:
        """Replace them by those that the coordinator names now; a failure to store them is logged."""
        received = frozenset(serials)
        if received == self._serials:
            return
        self._serials = received
        if self._path is None:
            return
        try:
            make_state_folder(self._path.parent)
            replace_file(self._path, json.dumps({"serials": sorted(received)}).encode() + b"\n")
        except OSError as error:
            _log.error(
                "%s: cannot be written: %s; after a restart, revoked viewers may read until the coordinator is reached",
                self._path,
                error.strerror,
            )

    def is_revoked(self, serial: str) -> bool:
        """Return whether a certificate was revoked, by its serial number; called from any thread."""
        return serial in self._serials


# --- Certificate keeper -----------------------------------------------------------------------------------------------

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
