"""The agent's session with the coordinator: it reconnects by itself and repeats what was not acknowledged."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from copy import deepcopy
from typing import Any

import grpc

from edge_agent.session.connection import Connect
from edge_agent.session.orders import Orders
from edge_agent.session.outbox import Outbox
from wattfleet.errors import InvalidInputError
from wattfleet_io.backoff import LONGEST_S, Backoff
from wattfleet_io.tasks import stop_tasks, with_timeout
from wattfleet_proto.v1 import session_pb2
from wattfleet_proto.version import ProtocolVersionError, common_version

_log = logging.getLogger(__name__)

_LONGEST_BACKOFF_OF_A_SMALL_FLEET_S = 5.0
# A coordinator to which a large fleet comes back may take a while to welcome each.
_WELCOMED_WITHIN_S = 60.0
# Each lease is answered. A network that loses everything without a word would otherwise be noticed after minutes.
_SILENCE_BORNE_S = 15.0
_LEASES_UNANSWERED = 3
_LONGEST_SPREAD_S = 120.0
_LOOKS_AGAIN_AFTER_S = 60.0
_END: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it
_REFUSALS = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED}


class CoordinatorSession:
    """One device's reports on their way to the coordinator.

    What the outbox holds is sent anew after a reconnect until it is acknowledged, and the newest state and front even
    then: a coordinator that lost its connection knows nothing of what the device is doing.

    Attributes:
        connected: whether the coordinator has welcomed this device, and the session lasts.
        away: set for good once an attempt at a session has ended, whether or not it began.
        orders: what the coordinator changes of a round in flight.
    """

    def __init__(
        self,
        connect: Connect,
        hello: session_pb2.Hello,
        on_welcome: Callable[[session_pb2.Welcome], Awaitable[None]],
        outbox: Outbox,
    ) -> None:
        """Prepare a session; `run` opens it.

        Args:
            connect: opens a connection to the coordinator.
            hello: who this is.
            on_welcome: called with the answer to every Hello.
            outbox: what waits to be delivered.
        """
        self._connect = connect
        self._hello = deepcopy(hello)
        self._is_displaced = False
        self._on_welcome = on_welcome
        self._outbox = outbox
        self.connected = False
        self.away = asyncio.Event()
        self.orders = Orders()
        self._lease_s = 0.0
        self._reconnect_s = 0.0
        self._wake = asyncio.Event()
        self._acknowledged = asyncio.Condition()

    def report_state(self, report: session_pb2.StateReport) -> None:
        """Report what the device is doing."""
        self._put(session_pb2.SessionRequest(state=report))

    def report_front(self, report: session_pb2.FrontReport) -> None:
        """Report the device's front."""
        self._put(session_pb2.SessionRequest(front=report))

    def report_observation(self, report: session_pb2.Observation) -> None:
        """Report what a round's training needed."""
        self._put(session_pb2.SessionRequest(observation=report))

    async def flush(self, timeout_s: float) -> bool:
        """Wait until everything reported so far is acknowledged; False if that takes too long."""
        last = self._outbox.last_sequence

        async def drained() -> None:
            async with self._acknowledged:
                await self._acknowledged.wait_for(lambda: not self._outbox.has_up_to(last))

        try:
            await with_timeout(timeout_s, drained())
        except asyncio.TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """Keep the session until cancelled.

        Raises:
            InvalidInputError: the coordinator refuses this device for good; the text is its reason.
        """
        backoff, met_before = Backoff(), False
        while True:
            try:
                async for met in self._session():
                    backoff.reset()
                    met_before, self._is_displaced = met, False
            except grpc.aio.AioRpcError as error:
                code = error.code()
                # A duplicate on first contact is a mistake; later it is this device's own session not yet lapsed.
                if code in _REFUSALS or (code is grpc.StatusCode.ALREADY_EXISTS and not met_before):
                    raise InvalidInputError(f"the coordinator refused this device: {error.details()}") from None
                if code is grpc.StatusCode.ABORTED:
                    self._displaced(error.details())
                    met_before = True
                else:
                    _log.warning("coordinator away (%s: %s)", code.name, error.details())
            except asyncio.TimeoutError:
                _log.warning("coordinator away (no answer any more)")
            except ProtocolVersionError as error:
                raise InvalidInputError(f"the coordinator cannot be understood: {error}") from None
            self.away.set()
            # A large fleet that lost its coordinator is spread over the seconds that it takes to welcome it.
            spread_s = _LOOKS_AGAIN_AFTER_S if self._is_displaced else self._reconnect_s
            await backoff.pause(self._longest_backoff_s, spread_s)

    def _displaced(self, details: str | None) -> None:
        """Another agent of this installation has taken the session: no longer take it back by the name of both.

        Else the two would end each other's sessions for ever. Without the name, the coordinator has the device back
        once the other has left.
        """
        _log.error("%s. This one waits until the other has left", details)
        self._is_displaced = True
        self._hello.ClearField("installation")

    async def _session(self) -> AsyncIterator[bool]:
        """One session from Hello to its end; yields at every acknowledgement, from which on it may be called sound.

        Raises:
            AioRpcError: it ended with an error.
            TimeoutError: the coordinator does not answer any more.
        """
        async with self._connect() as stub:
            call: Any = stub.Session(None)
            sender: asyncio.Task[None] | None = None
            try:
                await with_timeout(self._silence_borne_s, call.write(session_pb2.SessionRequest(hello=self._hello)))
                self._lease_s = 0.0
                while (response := await with_timeout(self._silence_borne_s, call.read())) is not _END:
                    if response.HasField("welcome"):
                        spoken = common_version(response.welcome.protocol)
                        self.connected = True
                        self._paced(response.welcome.lease_s, response.welcome.reconnect_s)
                        self._outbox.take_up_again()
                        self._wake.set()
                        sender = asyncio.create_task(self._send(call, spoken.minor), name="session sender")
                        await self._on_welcome(response.welcome)
                    elif response.HasField("reassign"):
                        await self.orders.came(response.reassign)
                    elif response.HasField("ack"):
                        self._paced(response.ack.lease_s, response.ack.reconnect_s)
                        async with self._acknowledged:
                            self._outbox.acknowledged(response.ack.sequence)
                            self._acknowledged.notify_all()
                        yield True
            finally:
                self.connected = False
                # An error of the sender has ended the session, too, and is handled there.
                await stop_tasks(sender)
                call.cancel()

    @property
    def _silence_borne_s(self) -> float:
        if not self.connected:
            return _WELCOMED_WITHIN_S
        return max(_SILENCE_BORNE_S, _LEASES_UNANSWERED * self._lease_s)

    @property
    def _longest_backoff_s(self) -> float:
        # A coordinator that never told how large its fleet is may have a very large one.
        return LONGEST_S if self._reconnect_s == 0.0 else _LONGEST_BACKOFF_OF_A_SMALL_FLEET_S

    def _paced(self, lease_s: float, reconnect_s: float) -> None:
        """Take over how often the coordinator wants to hear something; zeros say nothing."""
        if 0 < lease_s < self._lease_s:
            self._wake.set()  # the next one may be due already
        self._lease_s = lease_s or self._lease_s
        self._reconnect_s = min(reconnect_s or self._reconnect_s, _LONGEST_SPREAD_S)

    async def _send(self, call: Any, minor: int) -> None:
        """Write reports as they come, and a lease where there is none for a while."""
        sent = 0
        while True:
            for request in self._outbox.after(sent):
                await call.write(_understood(request, minor))
                sent = request.sequence
            self._wake.clear()
            if self._outbox.after(sent):
                continue
            try:
                # At random, so that leases which began together do not stay so.
                await with_timeout(self._lease_s * random.uniform(0.5, 0.8), self._wake.wait())
            except asyncio.TimeoutError:
                await call.write(session_pb2.SessionRequest(lease=session_pb2.Lease()))

    def _put(self, request: session_pb2.SessionRequest) -> None:
        self._outbox.add(request)
        self._wake.set()


def _understood(request: session_pb2.SessionRequest, minor: int) -> session_pb2.SessionRequest:
    """A report as a coordinator takes it that speaks a minor version of the protocol."""
    if minor >= 1 or not request.HasField("front"):
        return request
    # Before 1.1 nothing was known of starts, and a front's epochs had to ascend by themselves.
    older = session_pb2.SessionRequest()
    older.CopyFrom(request)
    del older.front.front.points[:]
    for point in request.front.front.points:
        if not older.front.front.points or point.epoch_s > older.front.front.points[-1].epoch_s:
            older.front.front.points.append(point)
    return older
