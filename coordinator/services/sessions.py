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
from coordinator.references import ReferenceShelf
from coordinator.repository.repository import FleetRepository
from coordinator.services.event_log import log_connected, log_offline, log_state
from coordinator.services.orders import Orders, ResponseStream
from coordinator.services.peer_quotas import host_of
from coordinator.services.pending_reports import PendingReports
from coordinator.services.state_times import StateTimes
from coordinator.settings import PeerSettings, SessionSettings
from coordinator.state.enrolments import Enrolments
from coordinator.state.leases import Lease, Leases
from coordinator.state.names import require_name
from coordinator.state.records import DeviceRecord, StoredRecord
from coordinator.state.workload_fronts import EVERY_WORKLOAD
from coordinator.store.errors import StoreUnavailableError
from wattfleet.errors import ImplausibleError, InvalidInputError
from wattfleet_identity.certificates import Certificate
from wattfleet_io.token_bucket import TokenBucket
from wattfleet_proto.convert import (
    board_sample_from_message,
    front_from_message,
    kept_duty_from_message,
    measured_from_messages,
    phase_from_message,
    presets_from_messages,
    provenance_from_message,
    state_from_message,
    workload_from_message,
)
from wattfleet_proto.device_state import DeviceState, GrantPhase
from wattfleet_proto.error_boundary import refuse
from wattfleet_proto.message_sizes import MAX_PLAN_ID_CHARACTERS
from wattfleet_proto.v1 import session_pb2, session_pb2_grpc
from wattfleet_proto.version import SHARING_MINOR, WORKLOADS_MINOR, common_version

if TYPE_CHECKING:
    from coordinator.reference_metadata import ReferenceMetadata

_log = logging.getLogger(__name__)

_CHUNK_BYTES = 64 * 1024
_MAX_LOGGED_REFUSALS = 10
"""Refused reports of one session that are logged; `wattfleet coordinator devices` shows the reason in any case."""

_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it


class SessionServicer(session_pb2_grpc.SessionServiceServicer):
    """Takes agents' reports and sends them orders."""

    def __init__(
        self,
        repository: FleetRepository,
        leases: Leases,
        orders: Orders,
        references: ReferenceShelf,
        profile_modes: int,
        state_times: StateTimes,
        now_s: Callable[[], float] = time.monotonic,
        settings: SessionSettings = SessionSettings(),
        peers: PeerSettings = PeerSettings(),
        metadata: ReferenceMetadata | None = None,
        has_certificate: Callable[[str], bool] = lambda device_id: False,
    ) -> None:
        """Serve one fleet.

        Args:
            repository: the fleet and its store.
            leases: the sessions' leases.
            orders: sends orders to devices.
            references: the published predictors, one of which agents transfer from.
            profile_modes: modes that each agent measures at most.
            state_times: notes since when devices are in their states.
            now_s: the clock of the leases.
            settings: timeouts and limits.
            peers: the limits on the messages of one session.
            metadata: the signed metadata of references; None where they are not signed.
            has_certificate: whether a device, by its id, has a valid certificate.
        """
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
        self._handlers: dict[Lease, asyncio.Task[Any]] = {}
        self._ended: dict[Lease, tuple[grpc.StatusCode, str]] = {}
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
            self._orders.begin(lease.device_id, stream, knows_workloads, protocol.minor >= SHARING_MINOR)
            del first, protocol  # frees the memory: ten thousand sessions last for days
            # Grants that were due since the Hello may have gone to the session that this one replaces.
            self._fleet.rounds.grants.session_began(lease.device_id, self._now_s())
            await self._serve(lease, context, stream)
        except asyncio.CancelledError:
            ended = self._ended.get(lease)
            if ended is None:
                raise  # the agent disconnected
            this = asyncio.current_task()
            assert this is not None, "a handler is a task"
            this.uncancel()
        finally:
            self._orders.end(lease.device_id, stream)
            self._clean_up(lease)
        if ended is not None:
            await refuse(context, *ended)

    def _begin(
        self, hello: session_pb2.Hello, connection: str, knows_workloads: bool, certificate: Certificate | None
    ) -> Lease:
        """Begin the session of a Hello; returns its lease.

        Args:
            hello: the session's first message.
            connection: the agent's address and port.
            knows_workloads: the agent speaks protocol 2.1 or later.
            certificate: that of the connection; None on plaintext.

        Raises:
            ForeignDeviceError: the certificate is that of another device, or the device has one and does not use it.
            InvalidInputError: the Hello is malformed, or the id is enrolled as another kind of board.
            DuplicateSessionError: another installation has a session for this device.
            TooManyDevicesError: the connection has enrolled as many new devices as it may.
        """
        try:
            self._require_own(hello, certificate)
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
        if is_new:
            self._enrolments.add(connection, host_of(connection))
        lease, replaced = self._leases.begin(hello.device_id, hello.installation, self._now_s(), is_proven)
        if replaced is not None:
            self._end(
                replaced,
                grpc.StatusCode.ABORTED,
                f"{hello.device_id}: replaced by a newer session of the same device. If two agents run, one from"
                " a copy of the other's disk: give each device its own id and remove the file 'installation' from its"
                " state directory",
            )
        this = asyncio.current_task()
        assert this is not None, "a handler is a task"
        self._handlers[lease] = this
        self._state_times.note(connected)
        log_connected(connected)
        # A Welcome acknowledges nothing that must be on disk: agents can connect while the disk is full.
        self._repository.save_soon(connected)
        return lease

    def _require_own(self, hello: session_pb2.Hello, certificate: Certificate | None) -> None:
        """Make sure that a device is the one that its certificate names."""
        if certificate is None:
            if self._has_certificate(hello.device_id):
                raise ForeignDeviceError(
                    f"{hello.device_id} has a certificate: its agent must use it, at the coordinator's address with TLS"
                )
            return
        peer = certificate.peer
        for what, claimed, certified in (
            ("device", hello.device_id, peer.name),
            ("board", hello.board, peer.board),
            ("installation", hello.installation, peer.installation),
        ):
            if certified and claimed != certified:
                raise ForeignDeviceError(
                    f"{hello.device_id}: the certificate is for the {what} {certified!r}, not {claimed!r}: enrol this"
                    " device with `wattfleet agent join`"
                )

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
        """Take and acknowledge reports until the agent disconnects."""
        sequence = refused = 0
        pending: PendingReports | None = None
        rate = TokenBucket.full(self._peers.messages_per_s, self._peers.messages_at_once, self._now_s())
        try:
            while (request := await context.read()) is not _EOF:
                self._leases.renew(lease, self._now_s())
                if (wait_s := rate.take_later(self._now_s())) > 0:
                    await asyncio.sleep(wait_s)
                number, record = request.sequence, None
                # A repeated report was taken before. Messages without a number, such as leases, are always taken.
                refusal = ""
                if not 0 < number <= sequence:
                    try:
                        record = await self._take(lease.device_id, request)
                    except ImplausibleError as error:  # the session lasts: only this report is refused
                        refusal, refused = str(error), refused + 1
                        if refused <= _MAX_LOGGED_REFUSALS:
                            _log.warning("a report is refused: %s", refusal)
                    sequence = max(sequence, number)
                lease_number, is_renewed = request.lease.number, False
                if request.HasField("lease"):
                    self._take_duty(lease.device_id, request.lease)
                    self._take_sample(lease.device_id, request.lease)
                    is_renewed = self._take_lease(lease.device_id, request.lease)
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
        """Store a report; returns False if that fails, or takes so long that leases would go unanswered."""
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
            partial(self._end, lease),
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

    def _take_duty(self, device_id: str, lease: session_pb2.Lease) -> None:
        """Take how a device keeps its duty; figures that no device can have are left out."""
        try:
            kept = kept_duty_from_message(lease.duty) if lease.HasField("duty") else None
        except InvalidInputError as error:
            _log.debug("%s: %s", device_id, error)
            return
        if self._fleet.duties.report(device_id, kept):
            self._fleet.rounds.is_trim_due = True  # its front beside the duty may have arrived before

    def _take_sample(self, device_id: str, lease: session_pb2.Lease) -> None:
        """Take what a board's sensors said; agents before protocol 2.7 send no sample."""
        if not lease.HasField("sample"):
            return
        try:
            if self._fleet.samples.report(device_id, board_sample_from_message(lease.sample)):
                self._state_times.note_throttling(device_id)
        except InvalidInputError as error:
            _log.debug("%s: a sample is left out: %s", device_id, error)

    def _take_presets(self, record: DeviceRecord, report: session_pb2.FrontReport) -> None:
        """Take what a front's report says of the board's presets."""
        try:
            presets = presets_from_messages(report.presets)
        except InvalidInputError as error:
            _log.debug("%s: its presets are left out: %s", record.device_id, error)
            presets = ()
        name = record.fronts[-1].name
        self._fleet.presets.report(record.device_id, name, presets, [each.name for each in record.fronts])

    def _take_lease(self, device_id: str, lease: session_pb2.Lease) -> bool:
        """Take a device's word on which grant is in force; returns whether this grant is renewed."""
        grants = self._fleet.rounds.grants
        # From now on, as the device counts from before it sent this lease.
        grants.renew(device_id, self._now_s())
        phase = phase_from_message(lease.phase) if lease.grant_id else GrantPhase.OVER
        grants.confirm(device_id, lease.grant_id, lease.plan_id, phase, self._now_s())
        is_renewed = grants.may_be_renewed(device_id)
        self._orders.send_due(device_id)
        return is_renewed

    async def _take(self, device_id: str, request: session_pb2.SessionRequest) -> StoredRecord | None:
        """Take one report; returns the record to store before it is acknowledged, even if nothing has changed."""
        body = request.WhichOneof("body")
        if body == "state":
            state = state_from_message(request.state.state)
            if state is DeviceState.OFFLINE:
                raise InvalidInputError(f"{device_id}: a device cannot report that it is offline")
            before = self._fleet.agents.get(device_id)
            after = self._fleet.agents.report_state(
                device_id, state, request.state.profiled_modes, request.state.detail
            )
            self._state_times.note(after)
            log_state(before, after)
            return after
        if body == "front":
            report = request.front
            workload = workload_from_message(report.workload) if report.HasField("workload") else None
            measured = measured_from_messages(report.measured)
            if report.no_front:
                name = EVERY_WORKLOAD if workload is None else workload.name
                return self._fleet.agents.report_no_front(
                    device_id, report.no_front, report.idle_w, name, report.is_idle_with_duty
                )
            try:
                reported = self._fleet.agents.report_front(
                    device_id,
                    front_from_message(report.front),
                    report.idle_w,
                    report.profiled_modes,
                    report.reference_digest,
                    workload,
                    report.minibatches_per_epoch if report.HasField("minibatches_per_epoch") else None,
                    report.is_idle_with_duty,
                )
            except ImplausibleError as error:
                name = EVERY_WORKLOAD if workload is None else workload.name
                self._fleet.agents.refuse_front(device_id, str(error), name)
                raise
            self._take_presets(reported, report)
            if workload is not None:
                self._orders.modes_measured(reported, workload.name, measured)
            return reported
        if body == "removed":
            return self._fleet.agents.remove_workload(device_id, request.removed.workload)
        if body == "observation":
            seen = request.observation
            require_name("a plan's id", seen.plan_id, MAX_PLAN_ID_CHARACTERS)
            try:
                await self._repository.load_round(seen.plan_id)
                return self._fleet.observe(device_id, seen.plan_id, seen.epoch_s, seen.power_w, seen.beside_duty)
            except UnknownRecordError as error:
                # For example after the store was replaced. If refused, the agent would repeat it forever.
                _log.warning("%s: an observation is dropped: %s", device_id, error)
        if body == "hello":
            raise InvalidInputError(f"{device_id}: a session must have exactly one Hello")
        return None  # a lease, or a message of a newer agent

    def _clean_up(self, lease: Lease) -> None:
        """Clean up after a session's handler."""
        self._handlers.pop(lease, None)
        self._ended.pop(lease, None)
        # When this coordinator stops, its devices stay stored as connected: the next one expects them back.
        if self._leases.end(lease) and not self._is_closing:
            # Nobody waits for this record, so it goes with the next transaction.
            disconnected = self._fleet.agents.disconnect(lease.device_id)
            self._repository.save_soon(disconnected)
            self._fleet.duties.report(lease.device_id, None)
            self._state_times.note(disconnected)
            log_offline(disconnected)
            self._fleet.samples.forget([lease.device_id])
            self._fleet.presets.forget([lease.device_id])

    def _end(self, lease: Lease, code: grpc.StatusCode, details: str) -> None:
        handler = self._handlers.get(lease)
        if handler is not None and lease not in self._ended:
            self._ended[lease] = code, details
            handler.cancel()

    def reconnect_all(self, reason: str) -> int:
        """End all sessions so that the devices reconnect, spread over time, and receive a new Welcome.

        Returns:
            The number of sessions.
        """
        leases = [lease for lease in self._handlers if lease not in self._ended]
        for lease in leases:
            self._leases.expect_reconnect(lease, self._now_s())
            self._end(lease, grpc.StatusCode.UNAVAILABLE, reason)
        return len(leases)

    async def sweep(self) -> None:
        """End the sessions of devices that have gone silent, until cancelled."""
        while True:
            await asyncio.sleep(self._settings.check_s)
            if missing := self._leases.take_missing(self._now_s()):
                _log.warning("%d devices did not reconnect and are no longer expected", len(missing))
                # Stored as offline, so that the next start does not wait for them again.
                self._repository.save_soon(*map(self._fleet.agents.get, missing))
            for lease in self._leases.expired(self._now_s()):
                self._end(lease, grpc.StatusCode.DEADLINE_EXCEEDED, f"{lease.device_id}: its lease has expired")

    async def close(self) -> None:
        """End all sessions, since the coordinator stops; the devices reconnect to the next one."""
        self._is_closing = True
        handlers = list(self._handlers.values())
        for lease in list(self._handlers):
            self._end(lease, grpc.StatusCode.UNAVAILABLE, "the coordinator is stopping")
        await asyncio.gather(*handlers, return_exceptions=True)

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
