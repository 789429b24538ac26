"""The agent's session with the coordinator: reconnects by itself, and repeats unacknowledged reports."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import grpc

from edge_agent.session.certificate_keeper import Connect, RevokedCertificates
from edge_agent.session.grants import GrantKeeper
from edge_agent.session.outbox import Outbox, SessionPace, UnusableAnswerError, require_usable
from edge_agent.session.status import SessionNews
from edge_agent.settings import ConnectionSettings
from edge_agent.workloads.loading import SHIPPED
from wattfleet.common.console import plain_text
from wattfleet.common.identity.channels import HandshakeError
from wattfleet.common.tasks import MAX_S, Backoff, stop_tasks, with_timeout
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import MeasuredUnit, Workload
from wattfleet_proto.convert import board_sample_to_message, measured_from_messages, workload_from_message
from wattfleet_proto.device_state import BoardSample
from wattfleet_proto.limits import MAX_ID_CHARACTERS, MAX_OTHER_KINDS, MAX_REASON_LENGTH, MAX_UNITS, PROFILE_MODES
from wattfleet_proto.names import ProtocolVersionError, common_version
from wattfleet_proto.v1 import duty_pb2, session_pb2

_log = logging.getLogger(__name__)


# --- Requests ---------------------------------------------------------------------------------------------------------
# The coordinator's requests other than trainings: fronts of workloads, and measurements before their first round.


_MOST_ANNOUNCED = 32
"""Maximum of workloads read from one announcement."""

_MOST_UNITS = MAX_UNITS + MAX_OTHER_KINDS
"""Maximum of devices and kinds of board whose measurements of one workload are read."""

_MOST_ORDERS = 32
"""Maximum of waiting orders."""

_MAX_SHOWN = 60
"""Maximum of characters of an unknown name in the log."""


@dataclass(frozen=True)
class Announced:
    """A workload that a run is going to train.

    Attributes:
        workload: the workload as the coordinator describes it.
        units: what a few other devices of this kind and of other kinds have measured; None for nothing new.
    """

    workload: Workload
    units: tuple[MeasuredUnit, ...] | None = None


@dataclass(frozen=True)
class ProfileOrder:
    """An order to measure modes without an app.

    Attributes:
        workload: the workload to measure.
        synthetic: the shipped workload to train while measuring.
        modes: maximum number of measured modes, including earlier ones.
    """

    workload: Workload
    synthetic: str
    modes: int


class CoordinatorRequests:
    """Queues the coordinator's requests for the device."""

    def __init__(self) -> None:
        """Start with no requests."""
        self._announced: Sequence[Announced] = ()
        self._orders: list[ProfileOrder] = []
        self._changed = asyncio.Event()

    def announced(self, message: session_pb2.WorkloadsAnnounced) -> None:
        """Store the workloads of all live runs; log and leave out those that are invalid."""
        if len(message.workloads) > _MOST_ANNOUNCED:
            _log.error(
                "the coordinator announced %d workloads; only %d are used", len(message.workloads), _MOST_ANNOUNCED
            )
        measured = _measured(message)
        found = []
        for each in message.workloads[:_MOST_ANNOUNCED]:
            try:
                workload = workload_from_message(each)
                found.append(Announced(workload, tuple(measured.get(workload.name, ()))))
            except InvalidInputError as error:
                _log.error("the coordinator announced an invalid workload: %s", _shown(error))
        self._announced = found
        self._changed.set()

    def ordered(self, message: session_pb2.ProfileOrder) -> None:
        """Store an order to measure modes; log one that cannot be carried out."""
        try:
            order = _order(message)
        except InvalidInputError as error:
            _log.error("the coordinator sent an invalid order to measure: %s", _shown(error))
            return
        if len(self._orders) >= _MOST_ORDERS:
            _log.error("an order to measure %r is dropped: too many are waiting", order.workload.name)
            return
        self._orders.append(order)
        self._changed.set()

    async def next(self) -> tuple[Sequence[Announced], Sequence[ProfileOrder]]:
        """Wait for a request; return the workloads of all live runs and the new orders."""
        await self._changed.wait()
        self._changed.clear()
        orders, self._orders = self._orders, []
        return self._announced, orders

    def repeat(self) -> None:
        """Make `next` return the announced workloads once more, for a device that was prepared again."""
        if self._announced or self._orders:
            self._changed.set()


def _measured(message: session_pb2.WorkloadsAnnounced) -> dict[str, list[MeasuredUnit]]:
    """Return other devices' measurements by workload; log and leave out those that are invalid."""
    found: dict[str, list[MeasuredUnit]] = {}
    for each in message.measured[: _MOST_ANNOUNCED * _MOST_UNITS]:
        units = found.setdefault(each.workload, [])
        if len(units) < _MOST_UNITS:
            try:
                units.append(MeasuredUnit(each.board[:MAX_ID_CHARACTERS], measured_from_messages(each.modes)))
            except InvalidInputError as error:
                _log.error("the coordinator sent invalid measurements of another device: %s", _shown(error))
    return found


def _order(message: session_pb2.ProfileOrder) -> ProfileOrder:
    _, most = PROFILE_MODES
    if not 1 <= message.modes <= most:
        raise InvalidInputError(f"modes must be 1 to {most:,}, not {message.modes:,}")
    workload = workload_from_message(message.workload)
    synthetic = message.synthetic or workload.name
    if synthetic not in SHIPPED:
        # Only the owner of the device may name a function to import: the agent runs as root.
        raise InvalidInputError(
            f"{plain_text(synthetic, _MAX_SHOWN)!r} is not a workload that ships with the agent: use one of"
            f" {', '.join(SHIPPED)}"
        )
    return ProfileOrder(workload, synthetic, message.modes)


def _shown(error: InvalidInputError) -> str:
    return plain_text(str(error), MAX_REASON_LENGTH)


# --- Coordinator session ----------------------------------------------------------------------------------------------

WELCOME_TIMEOUT_S = 60.0
"""Time to wait for the answer to a Hello, s. A restarted coordinator needs a while to welcome a large fleet."""

_MAX_BACKOFF_OF_A_SMALL_FLEET_S = 5.0
_SILENT_LEASES = 3
_DISPLACED_SPREAD_S = 60.0
_END: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it
_REFUSALS = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED}
_LOST = (asyncio.TimeoutError, asyncio.InvalidStateError, grpc.aio.InternalError)
"""Errors other than an error status that reading and writing raise once the connection is lost."""
_AWAY = "away"
"""One common cause for all attempts that do not reach the coordinator."""


class CoordinatorSession:
    """Delivers one device's reports to the coordinator.

    After a reconnect, all unacknowledged reports are sent again. So are the latest state and front even if they were
    acknowledged, as a restarted coordinator does not know what the device is doing.

    Attributes:
        connected: whether there is a session, to which the coordinator has welcomed this device.
        attempted: set once the first session or attempt has ended, and never cleared.
        grants: the power that the device may draw beyond idling.
        requests: the coordinator's requests.
        duty_figures: returns how the device keeps its duty, for the coordinator; None without a duty.
        board_sample: returns the latest sample of the board's sensors, for the coordinator; None if they cannot be
            read.
    """

    def __init__(
        self,
        connect: Connect,
        hello: session_pb2.Hello,
        on_welcome: Callable[[session_pb2.Welcome], Awaitable[None]],
        outbox: Outbox,
        settings: ConnectionSettings = ConnectionSettings(),
        news: SessionNews | None = None,
        revoked: RevokedCertificates | None = None,
    ) -> None:
        """Prepare a session; `run` opens it.

        Args:
            connect: opens a connection to the coordinator.
            hello: describes this device.
            on_welcome: called with the answer to every Hello.
            outbox: the reports to deliver.
            settings: the session's timeouts.
            news: reports the session's state to the owner; with None, it is only logged.
            revoked: the revoked certificates that the coordinator names; None forgets them at the end.
        """
        self._connect = connect
        self._hello = deepcopy(hello)
        self._is_displaced = False
        self._has_stray_hello = False
        self._last_refusal = ""
        self._on_welcome = on_welcome
        self._outbox = outbox
        self._settings = settings
        self._news = news or SessionNews()
        self._revoked = revoked or RevokedCertificates()
        self.connected = False
        self.attempted = asyncio.Event()
        self.grants = GrantKeeper()
        self.grants.on_change = self._report_grant
        # Without a report, what was set aside for the training would count for good.
        self.grants.on_never_began = lambda plan_id: self.report_energy(session_pb2.TrainingEnergy(plan_id=plan_id))
        self.requests = CoordinatorRequests()
        self.duty_figures: Callable[[], duty_pb2.DutyFigures | None] = lambda: None
        self.board_sample: Callable[[], BoardSample | None] = lambda: None
        self._is_lease_due = False
        self._is_to_reconnect = False
        self._pace = SessionPace()
        self._wake = asyncio.Event()
        self._acknowledged = asyncio.Condition()

    def report_state(self, report: session_pb2.StateReport) -> None:
        """Report the device's state."""
        self._put(session_pb2.SessionRequest(state=report))

    def report_front(self, report: session_pb2.FrontReport) -> None:
        """Report the device's front."""
        self._put(session_pb2.SessionRequest(front=report))

    def report_observation(self, report: session_pb2.Observation) -> None:
        """Report the time and power of a round's training."""
        self._put(session_pb2.SessionRequest(observation=report))

    def report_energy(self, report: session_pb2.TrainingEnergy) -> None:
        """Report the energy of a training."""
        self._put(session_pb2.SessionRequest(energy=report))

    def report_removed(self, workload: str) -> None:
        """Report that the device has removed its data of a workload."""
        self._put(session_pb2.SessionRequest(removed=session_pb2.WorkloadRemoved(workload=workload)))

    def report_unplanned(self, run_id: str, is_refused: bool) -> None:
        """Report that an app of a run trains without a plan, or was refused to."""
        told = session_pb2.UnplannedTraining(run_id=run_id, is_refused=is_refused)
        self._put(session_pb2.SessionRequest(unplanned=told))

    def reconnect(self) -> None:
        """End the session cleanly and open the next one at once, on a new connection. A grant stays in force."""
        self._is_to_reconnect = True
        self._wake.set()

    async def flush(self, timeout_s: float) -> bool:
        """Wait until everything reported so far is acknowledged; return False if that takes too long."""
        last = self._outbox.last_sequence

        async def drained() -> None:
            async with self._acknowledged:
                await self._acknowledged.wait_for(lambda: not self._outbox.has_any_up_to(last))

        try:
            await with_timeout(timeout_s, drained())
        except asyncio.TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """Keep a session open until cancelled. Whatever the coordinator answers, the agent tries again."""
        backoff, welcomed_before = Backoff(), False
        while True:
            try:
                async for _ in self._acknowledgements():
                    backoff.reset()
                    welcomed_before, self._is_displaced = True, False
            except grpc.aio.AioRpcError as error:
                code, details = error.code(), plain_text(error.details() or "", MAX_REASON_LENGTH)
                # On first contact, a duplicate id is an error. Later it is this device's own session that has not yet
                # expired.
                if code in _REFUSALS or (code is grpc.StatusCode.ALREADY_EXISTS and not welcomed_before):
                    self._news.failed(f"the coordinator refused this device: {details}; trying again")
                elif code is grpc.StatusCode.ABORTED and self._has_stray_hello:
                    self._has_stray_hello = False
                    self._news.failed("an earlier attempt of this agent reached the coordinator late; reconnecting")
                elif code is grpc.StatusCode.ABORTED:
                    self._yield_to_other_agent(details)
                    welcomed_before = True
                else:
                    self._news.failed(
                        f"the coordinator cannot be reached ({code.name}: {details}); reconnecting", _AWAY
                    )
            except _LOST:
                self._news.failed("the coordinator cannot be reached (no answer); reconnecting", _AWAY)
            except HandshakeError as error:
                self._news.failed(f"{error}; trying again")
            except (UnusableAnswerError, ProtocolVersionError) as error:
                self._news.failed(f"the coordinator cannot be used: {error}; trying again")
            self.attempted.set()
            if self._is_to_reconnect:
                self._is_to_reconnect = False
                continue
            # The coordinator states the time over which its whole fleet should reconnect.
            spread_s = _DISPLACED_SPREAD_S if self._is_displaced else self._pace.reconnect_s
            await backoff.pause(self._max_backoff_s, spread_s)

    def _yield_to_other_agent(self, details: str) -> None:
        """Leave the session to another agent with the same installation name, such as one from a copied disk.

        If both sent the name in their Hello, they would end each other's sessions for ever. Without the name, the
        coordinator accepts this agent only after the other one has disconnected.
        """
        self._news.failed(f"{details}. This agent waits until the other one has disconnected")
        self._is_displaced = True
        self._hello.ClearField("installation")

    async def _acknowledgements(self) -> AsyncIterator[None]:
        """Run one session from Hello to its end; yield after every acknowledgement."""
        async with self._connect() as stub:
            call: Any = stub.Session(None)
            sender: asyncio.Task[None] | None = None
            is_answered = False
            try:
                self.grants.greeting()
                await with_timeout(self._answer_timeout_s, call.write(session_pb2.SessionRequest(hello=self._hello)))
                self._pace = replace(self._pace, lease_s=0.0)
                while (response := await with_timeout(self._answer_timeout_s, call.read())) is not _END:
                    is_answered = True
                    if response is None:  # gRPC's status for bytes that cannot be parsed as the message
                        raise UnusableAnswerError("it sent a damaged message")
                    body = response.WhichOneof("body")
                    if body is not None and (body == "welcome") == (sender is not None):
                        raise UnusableAnswerError(f"it sent {'a second Welcome' if sender else 'no Welcome first'}")
                    if body == "welcome":
                        common_version(response.welcome.protocol)
                        require_usable(response.welcome)
                        self._follow_pace(response.welcome)
                        self.connected = True
                        await self.grants.welcomed(response.welcome.grant_lifetime_s)
                        self._news.connected()
                        self._outbox.requeue_latest()
                        self._wake.set()
                        sender = asyncio.create_task(self._send(call), name="session sender")
                        await self._on_welcome(response.welcome)
                    elif body == "grant":
                        await self.grants.receive(response.grant)
                    elif body == "announced":
                        self.requests.announced(response.announced)
                    elif body == "profile":
                        self.requests.ordered(response.profile)
                    elif body == "revoked":
                        self._revoked.receive(response.revoked.serials)
                    elif body == "ack":
                        ack = response.ack
                        self._follow_pace(ack)
                        if ack.lease_number:
                            await self.grants.acknowledged(ack.lease_number, ack.grant_lifetime_s, ack.is_renewed)
                        async with self._acknowledged:
                            self._outbox.acknowledge(response.ack.sequence)
                            self._acknowledged.notify_all()
                        if response.ack.refusal:
                            self._log_refusal(response.ack.refusal)
                        yield
            except grpc.aio.AioRpcError as error:
                is_answered |= error.code() is not grpc.StatusCode.UNAVAILABLE
                raise
            finally:
                self.connected = False
                # After a network partition, an unanswered Hello may arrive after the next one, and replace its session.
                self._has_stray_hello |= not is_answered
                # An error of the sender has also ended the session, and is handled there.
                await stop_tasks(sender)
                call.cancel()

    def _log_refusal(self, reason: str) -> None:
        """Log once why a report was refused, since a front is sent again after each reconnect."""
        if reason != self._last_refusal:
            _log.error("the coordinator refused a report: %s", plain_text(reason, MAX_REASON_LENGTH))
        self._last_refusal = reason

    @property
    def _answer_timeout_s(self) -> float:
        if not self.connected:
            return WELCOME_TIMEOUT_S
        # Every lease is answered. Without this timeout, a connection that loses all data would stay open for minutes.
        return max(self._settings.silence_timeout_s, _SILENT_LEASES * self._pace.lease_s)

    @property
    def _max_backoff_s(self) -> float:
        # A coordinator that has not stated a time to reconnect may have a very large fleet.
        return MAX_S if self._pace.reconnect_s == 0.0 else _MAX_BACKOFF_OF_A_SMALL_FLEET_S

    def _follow_pace(self, answer: session_pb2.Welcome | session_pb2.Ack) -> None:
        """Adopt the coordinator's intervals for leases and reconnects."""
        before, self._pace = self._pace, self._pace.after(answer)
        if self._pace.lease_s < before.lease_s:
            self._wake.set()  # the next lease may already be due

    async def _send(self, call: Any) -> None:
        """Send reports as they are added. Send leases at the session's start, regularly, and when the grant changes."""
        sent = 0
        self._is_lease_due = True
        leased_s, share = -float("inf"), 0.0
        while not self._is_to_reconnect:
            # Before the reports, so that the coordinator never gets a state before the grant that caused it.
            if self._is_lease_due or time.monotonic() >= leased_s + share * self._pace.lease_s:
                self._is_lease_due = False
                lease = self.grants.lease()
                if (figures := self.duty_figures()) is not None:
                    lease.duty.CopyFrom(figures)
                if (sample := self.board_sample()) is not None:
                    lease.sample.CopyFrom(board_sample_to_message(sample))
                await call.write(session_pb2.SessionRequest(lease=lease))
                # Random, so that the leases of many devices do not synchronize.
                leased_s, share = time.monotonic(), random.uniform(0.5, 0.8)
            for request in self._outbox.after(sent):
                await call.write(request)
                sent = request.sequence
            self._wake.clear()
            if self._outbox.after(sent) or self._is_lease_due or self._is_to_reconnect:
                continue
            with suppress(asyncio.TimeoutError):
                left_s = leased_s + share * self._pace.lease_s - time.monotonic()
                await with_timeout(max(0.0, left_s), self._wake.wait())
        await call.done_writing()

    def _report_grant(self) -> None:
        self._is_lease_due = True
        self._wake.set()

    def _put(self, request: session_pb2.SessionRequest) -> None:
        self._outbox.add(request)
        self._wake.set()
