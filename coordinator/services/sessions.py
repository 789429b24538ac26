"""The session service: one stream per agent, from its Hello until it disconnects or goes silent."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from coordinator.errors import ForeignDeviceError, StoreUnavailableError, UnknownRecordError
from coordinator.identity.access import certificate_of, require_own
from coordinator.references.published import ServedReferences
from coordinator.repository.repository import FleetRepository
from coordinator.services.event_log import EventLog, StateTimes
from coordinator.services.orders import Orders, ResponseStream
from coordinator.services.request_limits import STATUS, host_of
from coordinator.settings import PeerSettings, SessionSettings
from coordinator.state.identities import Enrolments
from coordinator.state.leases import Lease, Leases
from coordinator.state.names import require_name
from coordinator.state.records import DeviceRecord, StoredRecord
from coordinator.state.workload_fronts import UNNAMED
from wattfleet.common.identity.certificates import Certificate
from wattfleet.common.tasks import TokenBucket, background_task
from wattfleet.core.errors import ImplausibleError, InvalidInputError, WattfleetError
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
from wattfleet_proto.error_boundary import refuse, status_of
from wattfleet_proto.limits import MAX_PLAN_ID_CHARACTERS, is_flower_run
from wattfleet_proto.names import common_version
from wattfleet_proto.v1 import session_pb2, session_pb2_grpc

if TYPE_CHECKING:
    from coordinator.references.metadata import ReferenceMetadata

_log = logging.getLogger(__name__)


# --- Pending reports --------------------------------------------------------------------------------------------------
# Reports of one session that could not be stored in time: acknowledged once they are on disk.


class PendingReports:
    """The reports that one session has yet to acknowledge."""

    def __init__(
        self,
        device_id: str,
        repository: FleetRepository,
        acknowledge: Callable[[int], Awaitable[None]],
        end: Callable[[grpc.StatusCode, str], None],
        limit: int,
    ) -> None:
        """Start without any report.

        Args:
            device_id: the session's device.
            repository: the fleet and its store.
            acknowledge: acknowledges the report with this number to the agent.
            end: ends the session if its reports can never be stored.
            limit: the most reports that may wait. It exceeds the size of an agent's outbox, because a new session
                begins by sending it.
        """
        self._device_id = device_id
        self._repository = repository
        self._acknowledge = acknowledge
        self._end = end
        self._limit = limit
        self._waiting: deque[tuple[int, StoredRecord | None]] = deque()
        self._storing: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: int, record: StoredRecord | None) -> None:
        """Add a report; a repeated report has no record, and waits until all earlier ones are stored.

        Raises:
            StoreUnavailableError: too many reports wait.
        """
        if len(self._waiting) >= self._limit:
            raise StoreUnavailableError(
                f"{self._device_id}: {self._limit} reports wait while the store is unavailable: reconnect and send the"
                " current state"
            )
        # The fleet has the device's newest record, which replaces the older ones.
        self._waiting.append((sequence, None if isinstance(record, DeviceRecord) else record))
        if record is not None:
            self._repository.save_soon(record)
        if self._storing is None or self._storing.done():
            self._storing = background_task("store waiting reports", self._store())

    def close(self) -> None:
        """Stop with the session; the agent repeats what was not acknowledged."""
        if self._storing is not None:
            self._storing.cancel()

    async def _store(self) -> None:
        try:
            while self._waiting:
                waiting = list(self._waiting)
                records = [record for _, record in waiting if record is not None]
                device = self._repository.fleet.agents.get(self._device_id)
                await self._repository.save_until_stored(device, *records)
                for sequence, _ in waiting:
                    await self._acknowledge(sequence)
                    self._waiting.popleft()
        except grpc.aio.BaseError:
            return  # the device disconnected, which ends the session
        except WattfleetError as error:
            self._end(status_of(error, STATUS), str(error))
        except Exception:
            _log.exception("%s: its reports could not be stored", self._device_id)
            self._end(grpc.StatusCode.INTERNAL, "internal error; see the service's log")


# --- Device reports ---------------------------------------------------------------------------------------------------
# Applies the reports of agents' sessions to the fleet's state.


class DeviceReports:
    """Applies the reports of all sessions.

    Args:
        repository: the fleet and its store.
        orders: is notified of measured modes and renewed grants, because further orders may follow.
        state_times: records since when devices are in their states.
        now_s: the clock of the grants, in seconds.
        events: the log of what happens to the fleet; None for one that stores nothing.
    """

    def __init__(
        self,
        repository: FleetRepository,
        orders: Orders,
        state_times: StateTimes,
        now_s: Callable[[], float] = time.monotonic,
        events: EventLog | None = None,
    ) -> None:
        self._events = events or EventLog(repository.fleet)
        self._repository = repository
        self._fleet = repository.fleet
        self._orders = orders
        self._state_times = state_times
        self._now_s = now_s

    async def take(self, device_id: str, request: session_pb2.SessionRequest) -> StoredRecord | None:
        """Apply one report, and record what it changes about the device; returns and raises as `_applied`."""
        try:
            return await self._applied(device_id, request)
        finally:
            if request.WhichOneof("body") in ("front", "observation", "removed"):
                self._events.device_changed(device_id)

    async def _applied(self, device_id: str, request: session_pb2.SessionRequest) -> StoredRecord | None:
        """Apply one report.

        Returns:
            The record to store before the report is acknowledged, even if nothing has changed; None if there is nothing
            to store.
        """
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
            self._events.reported(before, after)
            return after
        if body == "front":
            report = request.front
            workload = workload_from_message(report.workload) if report.HasField("workload") else UNNAMED
            measured = measured_from_messages(report.measured)
            if report.no_front:
                return self._fleet.agents.report_no_front(
                    device_id, report.no_front, report.idle_w, workload.name, report.is_idle_with_duty
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
                self._fleet.agents.refuse_front(device_id, str(error), workload.name)
                raise
            self._take_presets(reported, report)
            self._orders.modes_measured(reported, workload.name, measured)
            return reported
        if body == "removed":
            return self._fleet.agents.remove_workload(device_id, request.removed.workload)
        if body == "unplanned":
            run_id = request.unplanned.run_id
            if is_flower_run(run_id):
                self._events.unplanned_training(device_id, run_id, request.unplanned.is_refused)
            else:  # if it was refused, the agent would repeat it forever
                _log.warning("%s: a report of an unplanned training is dropped: its run's id is invalid", device_id)
            return None
        if body == "observation":
            seen = request.observation
            require_name("a plan's id", seen.plan_id, MAX_PLAN_ID_CHARACTERS)
            try:
                await self._repository.load_round(seen.plan_id)
                return self._fleet.observe(device_id, seen.plan_id, seen.epoch_s, seen.power_w, seen.beside_duty)
            except UnknownRecordError as error:
                # For example after the store was replaced. If refused, the agent would repeat it forever.
                _log.warning("%s: an observation is dropped: %s", device_id, error)
        if body == "energy":
            drawn = request.energy
            require_name("a plan's id", drawn.plan_id, MAX_PLAN_ID_CHARACTERS)
            try:
                await self._repository.load_round(drawn.plan_id)
                changed = self._fleet.report_energy(device_id, drawn.plan_id, drawn.energy_j, drawn.lasted_s)
            except UnknownRecordError as error:
                # For example after the store was replaced. If refused, the agent would repeat it forever.
                _log.warning("%s: the energy of a training is dropped: %s", device_id, error)
            else:
                self._repository.save_soon(*changed[1:])  # in the transaction of the first one
                return changed[0] if changed else None
        if body == "hello":
            raise InvalidInputError(f"{device_id}: a session must have exactly one Hello")
        return None  # a lease, or a message of a newer agent

    def take_lease(self, device_id: str, lease: session_pb2.Lease) -> bool:
        """Apply a lease: the device's figures, and which grant it reports as in force.

        Returns:
            Whether this grant is renewed.
        """
        self._take_duty(device_id, lease)
        self._take_sample(device_id, lease)
        grants = self._fleet.rounds.grants
        # The lifetime counts from now; the device counts it from before it sent this lease.
        grants.renew(device_id, self._now_s())
        phase = phase_from_message(lease.phase) if lease.grant_id else GrantPhase.OVER
        grants.confirm(device_id, lease.grant_id, lease.plan_id, phase, self._now_s())
        is_renewed = grants.may_be_renewed(device_id)
        self._orders.send_due(device_id)
        return is_renewed

    def _take_duty(self, device_id: str, lease: session_pb2.Lease) -> None:
        """Record how well a device keeps its duty; impossible figures are left out."""
        try:
            kept = kept_duty_from_message(lease.duty) if lease.HasField("duty") else None
        except InvalidInputError as error:
            _log.debug("%s: %s", device_id, error)
            return
        self._fleet.duties.report(device_id, kept)

    def _take_sample(self, device_id: str, lease: session_pb2.Lease) -> None:
        """Record a sample of a board's sensors, if there is one."""
        if not lease.HasField("sample"):
            return
        try:
            if self._fleet.report_sample(device_id, board_sample_from_message(lease.sample)):
                self._state_times.note_throttling(device_id)
        except InvalidInputError as error:
            _log.debug("%s: a sample is dropped: %s", device_id, error)
        else:
            self._events.device_changed(device_id)

    def _take_presets(self, record: DeviceRecord, report: session_pb2.FrontReport) -> None:
        """Record the board's presets from the report of a front."""
        try:
            presets = presets_from_messages(report.presets)
        except InvalidInputError as error:
            _log.debug("%s: its presets are dropped: %s", record.device_id, error)
            presets = ()
        name = record.fronts[-1].name
        self._fleet.presets.report(record.device_id, name, presets, [each.name for each in record.fronts])


# --- Live sessions ----------------------------------------------------------------------------------------------------
# The sessions in progress, so that the coordinator can end one with a reason for its agent.


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


# --- Sessions ---------------------------------------------------------------------------------------------------------

STORE_TIMEOUT_S = 3.0
"""Time to wait until a report is stored, s. After that, the lease is renewed first, and the report is acknowledged
later."""

MAX_UNSTORED_REPORTS = 1500
"""The most reports of one session that wait for the store. With more, the session ends."""

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
        refuses_unplanned: bool = False,
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
            refuses_unplanned: whether devices refuse trainings without a plan.
        """
        self._events = events or EventLog(repository.fleet)
        self._refuses_unplanned = refuses_unplanned
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
        certificate = certificate_of(context)
        lease = self._begin(first.hello, context.peer(), certificate)
        stream = ResponseStream(context.write)
        ended: tuple[grpc.StatusCode, str] | None = None
        try:
            await stream.write(session_pb2.SessionResponse(welcome=self._welcome(protocol)))
            self._orders.begin(lease.device_id, stream)
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

    def _begin(self, hello: session_pb2.Hello, connection: str, certificate: Certificate | None) -> Lease:
        """Begin the session of a Hello, and return its lease.

        Args:
            hello: the session's first message.
            connection: the agent's address and port.
            certificate: the certificate of the connection; None on plaintext.
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
        connected = self._fleet.agents.connect(hello.device_id, hello.board, provenance, hello.mode_count)
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
            share_modes=self._orders.share_modes,
            refuses_unplanned=self._refuses_unplanned,
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
            async with asyncio.timeout(STORE_TIMEOUT_S):
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
            MAX_UNSTORED_REPORTS,
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
