"""The agents' side of the coordinator: one stream per device, from its Hello until it goes silent."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import grpc

from coordinator.errors import UnknownRecordError
from coordinator.references import ReferenceShelf
from coordinator.services.late_reports import LateReports
from coordinator.settings import SessionSettings
from coordinator.state.fleet import Fleet
from coordinator.state.leases import Lease, Leases
from coordinator.state.names import require_name
from coordinator.state.orders import Orders, Outlet, order_message
from coordinator.state.records import ObservedTraining, StoredRecord
from coordinator.store.archive import recalled
from coordinator.store.errors import StoreUnavailableError
from coordinator.store.writer import Writer
from wattfleet.errors import InvalidInputError
from wattfleet_proto.convert import front_from_message, provenance_from_message, state_from_message
from wattfleet_proto.device_state import DeviceState
from wattfleet_proto.error_boundary import refuse
from wattfleet_proto.v1 import session_pb2, session_pb2_grpc
from wattfleet_proto.version import common_version

_log = logging.getLogger(__name__)

_CHUNK_BYTES = 64 * 1024
_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it


class SessionServicer(session_pb2_grpc.SessionServiceServicer):
    """Takes what agents report, and tells them what they are to do."""

    def __init__(
        self,
        fleet: Fleet,
        writer: Writer,
        leases: Leases,
        orders: Orders,
        references: ReferenceShelf,
        profile_modes: int,
        now_s: Callable[[], float] = time.monotonic,
        settings: SessionSettings = SessionSettings(),
    ) -> None:
        """Serve one fleet.

        Args:
            fleet: what is known.
            writer: keeps what changed.
            leases: the sessions.
            orders: what devices are to be told.
            references: the predictors that are handed out, one of which agents transfer from.
            profile_modes: modes that each agent measures at most.
            now_s: the clock of the leases.
            settings: timeouts and limits.
        """
        self._fleet = fleet
        self._writer = writer
        self._leases = leases
        self._orders = orders
        self._references = references
        self._profile_modes = profile_modes
        self._now_s = now_s
        self._settings = settings
        self._handlers: dict[Lease, asyncio.Task[Any]] = {}
        self._ended: dict[Lease, tuple[grpc.StatusCode, str]] = {}
        self._is_closing = False

    async def Session(  # type: ignore[override]  # noqa: N802 - named by the protocol; it writes to its context
        self, request_iterator: Any, context: Any
    ) -> None:
        """One agent's session, from its Hello until it goes silent."""
        try:
            async with asyncio.timeout(self._settings.lease_s):
                first = await context.read()
        except TimeoutError:
            return  # it never began
        if first is _EOF:
            return
        spoken = common_version(first.hello.protocol)
        lease = self._begin(first.hello)
        outlet = Outlet(context.write)
        ended: tuple[grpc.StatusCode, str] | None = None
        try:
            await outlet.write(session_pb2.SessionResponse(welcome=self._welcome(spoken)))
            del first, spoken  # ten thousand sessions would keep them for as long as they last
            self._orders.begin(lease.device_id, outlet)
            if (order := self._fleet.standing_order(lease.device_id)) is not None:
                outlet.tell(order_message(order))
            await self._serve(lease, context, outlet)
        except asyncio.CancelledError:
            ended = self._ended.get(lease)
            if ended is None:
                raise  # the agent hung up
            this = asyncio.current_task()
            assert this is not None, "a handler is a task"
            this.uncancel()
        finally:
            self._orders.end(lease.device_id, outlet)
            self._over(lease)
        if ended is not None:
            await refuse(context, *ended)

    def _begin(self, hello: session_pb2.Hello) -> Lease:
        """Take a Hello; the new session's lease.

        Raises:
            InvalidInputError: it cannot be a device, or is enrolled as another kind of board.
            DuplicateSessionError: another agent has a session for this device.
        """
        provenance = provenance_from_message(hello.provenance)
        if hello.installation:
            require_name("an installation", hello.installation)
        self._leases.require_free(hello.device_id, hello.installation)
        connected = self._fleet.connect(hello.device_id, hello.board, provenance, hello.mode_count)
        lease, replaced = self._leases.begin(hello.device_id, hello.installation, self._now_s())
        if replaced is not None:
            self._end(
                replaced,
                grpc.StatusCode.ABORTED,
                f"{hello.device_id}: a newer session of the same installation has begun. If two agents run, one from a"
                " copy of the other's disk: give each device an id of its own, and remove the file 'installation' from"
                " its state directory",
            )
        this = asyncio.current_task()
        assert this is not None, "a handler is a task"
        self._handlers[lease] = this
        _log.debug("%s connected", lease.device_id)
        # A Welcome acknowledges nothing that would have to last: a full disk keeps no agent out.
        self._writer.save_soon(connected)
        return lease

    def _welcome(self, spoken: session_pb2.ProtocolVersion) -> session_pb2.Welcome:
        pace = self._leases.pace
        return session_pb2.Welcome(
            reference_digest=self._references.digest,
            profile_modes=self._profile_modes,
            lease_s=pace.lease_s,
            reconnect_s=pace.reconnect_s,
            protocol=spoken,
        )

    async def _serve(self, lease: Lease, context: Any, outlet: Outlet) -> None:
        """Acknowledge what comes up until nothing does."""
        sequence = 0
        late: LateReports | None = None
        try:
            while (request := await context.read()) is not _EOF:
                self._leases.renew(lease, self._now_s())
                number, record = request.sequence, None
                # What came before is there already. What has no number, as leases have none, is taken as it comes.
                if not 0 < number <= sequence:
                    record = await self._taken(lease.device_id, request)
                    sequence = max(sequence, number)
                del request
                is_report = record is not None or number
                if is_report and (late or not await self._stored(record)):
                    late = late or self._late(lease, outlet)
                    late.add(number, record)
                else:
                    await self._acknowledge(outlet, number)
                del record
        finally:
            if late is not None:
                late.close()

    async def _stored(self, record: StoredRecord | None) -> bool:
        """Store what was reported; False where that fails or takes so long that leases would go unanswered."""
        if record is None:
            return True
        try:
            async with asyncio.timeout(self._settings.store_timeout_s):
                await self._writer.saved(record)
        except (StoreUnavailableError, TimeoutError):
            return False
        return True

    def _late(self, lease: Lease, outlet: Outlet) -> LateReports:
        return LateReports(
            lease.device_id,
            self._fleet,
            self._writer,
            partial(self._acknowledge, outlet),
            partial(self._end, lease),
            self._settings.max_unstored_reports,
        )

    async def _acknowledge(self, outlet: Outlet, sequence: int) -> None:
        pace = self._leases.pace
        ack = session_pb2.Ack(sequence=sequence, lease_s=pace.lease_s, reconnect_s=pace.reconnect_s)
        await outlet.write(session_pb2.SessionResponse(ack=ack))

    async def _taken(self, device_id: str, request: session_pb2.SessionRequest) -> StoredRecord | None:
        """Take one report; what is to be stored before it is acknowledged, also where nothing is new to the fleet."""
        body = request.WhichOneof("body")
        if body == "state":
            state = state_from_message(request.state.state)
            if state is DeviceState.OFFLINE:
                raise InvalidInputError(f"{device_id}: a device cannot report that it is offline")
            return self._fleet.report_state(device_id, state, request.state.profiled_modes, request.state.detail)
        if body == "front":
            report = request.front
            return self._fleet.report_front(
                device_id,
                front_from_message(report.front),
                report.idle_w,
                report.profiled_modes,
                report.reference_digest,
            )
        if body == "observation":
            seen = request.observation
            observed = ObservedTraining(device_id, seen.epoch_s, seen.power_w)
            try:
                await recalled(self._fleet, self._writer, seen.plan_id)
                return self._fleet.observe(seen.plan_id, observed)
            except UnknownRecordError as error:
                # Of a store that was replaced, say. Refusing it would have the agent repeat it for ever.
                _log.warning("%s: an observation is let go: %s", device_id, error)
        if body == "hello":
            raise InvalidInputError(f"{device_id}: a session has one Hello")
        return None  # a lease, or of a kind that only newer agents know

    def _over(self, lease: Lease) -> None:
        """Note the end of a session's handler."""
        self._handlers.pop(lease, None)
        self._ended.pop(lease, None)
        # One that only this coordinator's end has ended is expected back after its restart.
        if self._leases.end(lease) and not self._is_closing:
            # Nobody waits for it, and a device that is known to be connected no more is so after a restart anyway.
            self._writer.save_soon(self._fleet.disconnect(lease.device_id))
            _log.debug("%s disconnected", lease.device_id)

    def _end(self, lease: Lease, code: grpc.StatusCode, details: str) -> None:
        handler = self._handlers.get(lease)
        if handler is not None and lease not in self._ended:
            self._ended[lease] = code, details
            handler.cancel()

    def have_all_back(self, why: str) -> int:
        """End all sessions so that their devices come back and get another Welcome, spread by what they were told.

        Returns:
            The number of sessions.
        """
        leases = [lease for lease in self._handlers if lease not in self._ended]
        for lease in leases:
            self._leases.call_back(lease, self._now_s())
            self._end(lease, grpc.StatusCode.UNAVAILABLE, why)
        return len(leases)

    async def sweep(self) -> None:
        """End the sessions of devices that have gone silent, for as long as the coordinator serves."""
        while True:
            await asyncio.sleep(self._settings.check_s)
            if missing := self._leases.missing(self._now_s()):
                _log.warning("%d devices did not come back, and are waited for no more", len(missing))
                # Stored as what they were, each later start would wait for them again.
                self._writer.save_soon(*map(self._fleet.device, missing))
            for lease in self._leases.lapsed(self._now_s()):
                self._end(lease, grpc.StatusCode.DEADLINE_EXCEEDED, f"{lease.device_id}: nothing was heard any more")

    async def close(self) -> None:
        """End all sessions, since the coordinator stops; their devices come back to it, or to the next one."""
        self._is_closing = True
        handlers = list(self._handlers.values())
        for lease in list(self._handlers):
            self._end(lease, grpc.StatusCode.UNAVAILABLE, "the coordinator stops")
        await asyncio.gather(*handlers, return_exceptions=True)

    async def FetchReference(  # noqa: N802 - named by the protocol
        self, request: session_pb2.FetchReferenceRequest, context: Any
    ) -> AsyncIterator[session_pb2.FetchReferenceResponse]:
        """The reference predictor, manifest first."""
        artefact = self._references.of_digest(request.digest)
        begin = request.weights_offset
        if begin > len(artefact.weights):
            raise InvalidInputError(f"the weights have {len(artefact.weights)} bytes, none from {begin} on")
        yield session_pb2.FetchReferenceResponse(manifest=artefact.manifest, weights_offset=begin)
        for offset in range(begin, len(artefact.weights), _CHUNK_BYTES):
            yield session_pb2.FetchReferenceResponse(weights_chunk=artefact.weights[offset : offset + _CHUNK_BYTES])
