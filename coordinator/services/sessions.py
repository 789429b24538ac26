"""The session service: one stream per agent, from its Hello until it disconnects or goes silent."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from coordinator.errors import ForeignDeviceError, UnknownRecordError
from coordinator.identity.callers import certificate_of
from coordinator.identity.certified_device import require_own
from coordinator.references import ServedReferences
from coordinator.repository.repository import FleetRepository
from coordinator.services.device_reports import DeviceReports
from coordinator.services.event_log import EventLog
from coordinator.services.live_sessions import LiveSessions
from coordinator.services.orders import Orders, ResponseStream
from coordinator.services.peer_quotas import host_of
from coordinator.services.pending_reports import PendingReports
from coordinator.services.state_times import StateTimes
from coordinator.settings import PeerSettings, SessionSettings
from coordinator.state.enrolments import Enrolments
from coordinator.state.leases import Lease, Leases
from coordinator.state.names import require_name
from coordinator.state.records import StoredRecord
from coordinator.store.errors import StoreUnavailableError
from wattfleet.errors import ImplausibleError, InvalidInputError
from wattfleet_identity.certificates import Certificate
from wattfleet_io.token_bucket import TokenBucket
from wattfleet_proto.convert import (
    provenance_from_message,
)
from wattfleet_proto.error_boundary import refuse
from wattfleet_proto.v1 import session_pb2, session_pb2_grpc
from wattfleet_proto.version import REVOCATIONS_MINOR, SHARING_MINOR, WORKLOADS_MINOR, common_version

if TYPE_CHECKING:
    from coordinator.reference_metadata import ReferenceMetadata

_log = logging.getLogger(__name__)

_CHUNK_BYTES = 64 * 1024
_MAX_LOGGED_REFUSALS = 10
"""The most refused reports of one session that are logged; `wattfleet coordinator devices` always shows the reason."""

_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the stubs


class SessionServicer(session_pb2_grpc.SessionServiceServicer):
    """Accepts agents' reports and sends them orders."""

    def __init__(
        self,
        repository: FleetRepository,
        leases: Leases,
        orders: Orders,
        references: ServedReferences,
        profile_modes: int,
        state_times: StateTimes,
        now_s: Callable[[], float] = time.monotonic,
        settings: SessionSettings = SessionSettings(),
        peers: PeerSettings = PeerSettings(),
        metadata: ReferenceMetadata | None = None,
        has_certificate: Callable[[str], bool] = lambda device_id: False,
        events: EventLog | None = None,
    ) -> None:
        """Serve one fleet.

        Args:
            repository: the fleet and its store.
            leases: the sessions' leases.
            orders: sends orders to devices.
            references: the published predictors, from which agents transfer.
            profile_modes: the most modes that each agent measures.
            state_times: records since when devices are in their states.
            now_s: the clock of the leases, in seconds.
            settings: timeouts and limits.
            peers: the limits on the messages of one session.
            metadata: the signed metadata of references; None if they are not signed.
            has_certificate: returns whether the device with an id has a valid certificate.
            events: the log of what happens to the fleet; None for one that stores nothing.
        """
        self._events = events or EventLog(repository.fleet)
        self._repository = repository
        self._fleet = repository.fleet
        self._leases = leases
        self._orders = orders
        self._references = references
        self._profile_modes = profile_modes
        self._state_times = state_times
        self._now_s = now_s
        self._settings = settings
        self._enrolments = Enrolments(settings.max_new_devices_per_connection, settings.max_new_devices_per_host)
        self._peers = peers
        self._metadata = metadata
        self._has_certificate = has_certificate
        self._reports = DeviceReports(repository, orders, state_times, now_s, self._events)
        self._live = LiveSessions()
        self._is_closing = False

    async def Session(  # type: ignore[override]  # noqa: N802 - named by the protocol; it writes to its context
        self, request_iterator: Any, context: Any
    ) -> None:
        """Serve one agent's session."""
        try:
            async with asyncio.timeout(self._settings.lease_s):
                first = await context.read()
        except TimeoutError:
            return  # no Hello
        if first is _EOF:
            return
        protocol = common_version(first.hello.protocol)
        knows_workloads = protocol.minor >= WORKLOADS_MINOR
        certificate = certificate_of(context)
        lease = self._begin(first.hello, context.peer(), knows_workloads, certificate)
        stream = ResponseStream(context.write)
        ended: tuple[grpc.StatusCode, str] | None = None
        try:
            await stream.write(session_pb2.SessionResponse(welcome=self._welcome(protocol)))
            minor = protocol.minor
            self._orders.begin(
                lease.device_id, stream, knows_workloads, minor >= SHARING_MINOR, minor >= REVOCATIONS_MINOR
            )
            del first, protocol  # frees the memory, because ten thousand sessions last for days
            # Grants that became due after the Hello may have been sent to the session that this one replaces.
            self._fleet.rounds.grants.session_began(lease.device_id, self._now_s())
            await self._serve(lease, context, stream)
        except asyncio.CancelledError:
            ended = self._live.why_ended(lease)
            if ended is None:
                raise  # the agent disconnected
        finally:
            self._orders.end(lease.device_id, stream)
            self._clean_up(lease)
        if ended is not None:
            await refuse(context, *ended)

    def _begin(
        self, hello: session_pb2.Hello, connection: str, knows_workloads: bool, certificate: Certificate | None
    ) -> Lease:
        """Begin the session of a Hello, and return its lease.

        Args:
            hello: the session's first message.
            connection: the agent's address and port.
            knows_workloads: the agent speaks protocol 2.1 or later.
            certificate: the certificate of the connection; None on plaintext.

        Raises:
            ForeignDeviceError: the certificate belongs to another device, or the device has one and does not use it.
            InvalidInputError: the Hello is malformed, or the id is enrolled as another kind of board.
            DuplicateSessionError: another installation has a session for this device.
            TooManyDevicesError: the connection or its host has reached its limit of new devices.
        """
        try:
            require_own(hello, certificate, self._has_certificate)
        except ForeignDeviceError as error:
            _log.warning("a session from %s is refused: %s", host_of(connection), error)
            raise
        is_new = hello.device_id not in self._fleet.agents.devices
        if is_new:
            self._enrolments.require_room(connection, host_of(connection), hello.device_id)
        provenance = provenance_from_message(hello.provenance)
        if hello.installation:
            require_name("an installation", hello.installation)
        is_proven = certificate is not None
        if not is_proven:
            self._leases.require_free(hello.device_id, hello.installation)
        connected = self._fleet.agents.connect(
            hello.device_id, hello.board, provenance, hello.mode_count, knows_workloads
        )
        self._fleet.rounds.grants.greeted(hello.device_id)
        if is_new:
            self._enrolments.add(connection, host_of(connection))
        lease, replaced = self._leases.begin(hello.device_id, hello.installation, self._now_s(), is_proven)
        if replaced is not None:
            self._live.end(
                replaced,
                grpc.StatusCode.ABORTED,
                f"{hello.device_id}: replaced by a newer session of the same device. If two agents run from copies of "
                "one disk, give each device its own id and remove the file 'installation' from its"
                " state directory",
            )
        self._live.begin(lease)
        self._state_times.note(connected)
        self._events.connected(connected)
        # A Welcome acknowledges nothing that must be on disk, so agents can connect while the disk is full.
        self._repository.save_soon(connected)
        return lease

    def _welcome(self, protocol: session_pb2.ProtocolVersion) -> session_pb2.Welcome:
        pace = self._leases.pace
        return session_pb2.Welcome(
            reference_digest=self._references.in_force[0],
            further_reference_digests=self._references.in_force[1:],
            profile_modes=self._profile_modes,
            lease_s=pace.lease_s,
            reconnect_s=pace.reconnect_s,
            protocol=protocol,
            grant_lifetime_s=self._fleet.rounds.grants.lifetime_s,
            share_modes=self._orders.share_modes if protocol.minor >= SHARING_MINOR else 0,
        )

    async def _serve(self, lease: Lease, context: Any, stream: ResponseStream) -> None:
        """Receive and acknowledge reports until the agent disconnects."""
        sequence = refused = 0
        pending: PendingReports | None = None
        rate = TokenBucket.full(self._peers.messages_per_s, self._peers.messages_at_once, self._now_s())
        try:
            while (request := await context.read()) is not _EOF:
                self._leases.renew(lease, self._now_s())
                if (wait_s := rate.take_later(self._now_s())) > 0:
                    await asyncio.sleep(wait_s)
                number, record = request.sequence, None
                # A repeated report was applied before. Messages without a number, such as leases, are always applied.
                refusal = ""
                if not 0 < number <= sequence:
                    try:
                        record = await self._reports.take(lease.device_id, request)
                    except ImplausibleError as error:  # the session continues: only this report is refused
                        refusal, refused = str(error), refused + 1
                        if refused <= _MAX_LOGGED_REFUSALS:
                            _log.warning("a report is refused: %s", refusal)
                    sequence = max(sequence, number)
                lease_number, is_renewed = request.lease.number, False
                if request.HasField("lease"):
                    is_renewed = self._reports.take_lease(lease.device_id, request.lease)
                del request
                is_report = record is not None or number
                if is_report and (pending or not await self._stored(record)):
                    pending = pending or self._pending_reports(lease, stream)
                    pending.add(number, record)
                else:
                    await self._acknowledge(stream, number, lease_number, is_renewed, refusal)
                del record
        finally:
            if pending is not None:
                pending.close()

    async def _stored(self, record: StoredRecord | None) -> bool:
        """Store a report; return False if this fails, or takes so long that leases would go unanswered."""
        if record is None:
            return True
        try:
            async with asyncio.timeout(self._settings.store_timeout_s):
                await self._repository.save(record)
        except (StoreUnavailableError, TimeoutError):
            return False
        return True

    def _pending_reports(self, lease: Lease, stream: ResponseStream) -> PendingReports:
        return PendingReports(
            lease.device_id,
            self._repository,
            partial(self._acknowledge, stream),
            partial(self._live.end, lease),
            self._settings.max_unstored_reports,
        )

    async def _acknowledge(
        self,
        stream: ResponseStream,
        sequence: int,
        lease_number: int = 0,
        is_renewed: bool = False,
        refusal: str = "",
    ) -> None:
        pace = self._leases.pace
        ack = session_pb2.Ack(
            sequence=sequence,
            lease_s=pace.lease_s,
            reconnect_s=pace.reconnect_s,
            lease_number=lease_number,
            grant_lifetime_s=self._fleet.rounds.grants.lifetime_s,
            is_renewed=is_renewed,
            refusal=refusal,
        )
        await stream.write(session_pb2.SessionResponse(ack=ack))

    def _clean_up(self, lease: Lease) -> None:
        """Clean up after a session's handler."""
        self._live.forget(lease)
        # When this coordinator stops, its devices stay stored as connected, so that the next one expects them back.
        if self._leases.end(lease) and not self._is_closing:
            # Nothing waits for this record, so it is stored with the next transaction.
            disconnected = self._fleet.agents.disconnect(lease.device_id)
            self._repository.save_soon(disconnected)
            self._fleet.duties.report(lease.device_id, None)
            self._state_times.note(disconnected)
            self._events.disconnected(disconnected, is_expected_back=lease.is_reconnecting)
            self._fleet.samples.forget([lease.device_id])
            self._fleet.presets.forget([lease.device_id])

    def reconnect_all(self, reason: str) -> int:
        """End all sessions so that the devices reconnect, spread over time, and receive a new Welcome.

        Returns:
            The number of sessions.
        """
        leases = self._live.leases()
        for lease in leases:
            self._leases.expect_reconnect(lease, self._now_s())
            self._live.end(lease, grpc.StatusCode.UNAVAILABLE, reason)
        return len(leases)

    async def sweep(self) -> None:
        """End the sessions of devices that have gone silent, until cancelled."""
        while True:
            await asyncio.sleep(self._settings.check_s)
            if missing := self._leases.take_missing(self._now_s()):
                _log.warning("%d devices did not reconnect and are no longer expected", len(missing))
                # Store them as offline, so that the next start does not wait for them again.
                self._repository.save_soon(*map(self._fleet.agents.get, missing))
                self._events.missing(missing)
            self._events.check()
            for lease in self._leases.expired(self._now_s()):
                self._live.end(lease, grpc.StatusCode.DEADLINE_EXCEEDED, f"{lease.device_id}: its lease has expired")

    async def close(self) -> None:
        """End all sessions, because the coordinator stops; the devices reconnect to the next one."""
        self._is_closing = True
        await self._live.end_all(grpc.StatusCode.UNAVAILABLE, "the coordinator is stopping")

    async def FetchReference(  # noqa: N802 - named by the protocol
        self, request: session_pb2.FetchReferenceRequest, context: Any
    ) -> AsyncIterator[session_pb2.FetchReferenceResponse]:
        """Stream a reference predictor, manifest first."""
        artefact = self._references.of_digest(request.digest)
        begin = request.weights_offset
        if begin > len(artefact.weights):
            raise InvalidInputError(f"offset {begin} is beyond the end of the weights ({len(artefact.weights)} bytes)")
        yield session_pb2.FetchReferenceResponse(
            manifest=artefact.manifest, weights_offset=begin, weights_bytes=len(artefact.weights)
        )
        for offset in range(begin, len(artefact.weights), _CHUNK_BYTES):
            yield session_pb2.FetchReferenceResponse(weights_chunk=artefact.weights[offset : offset + _CHUNK_BYTES])

    async def FetchMetadata(  # noqa: N802 - named by the protocol
        self, request: session_pb2.FetchMetadataRequest, context: Any
    ) -> session_pb2.FetchMetadataResponse:
        """Send a file of the references' signed metadata."""
        if self._metadata is None:
            raise UnknownRecordError("this coordinator serves no signed metadata of references")
        content = await asyncio.to_thread(self._metadata.file, request.name)
        return session_pb2.FetchMetadataResponse(content=content, coordinator_unix_s=time.time())
