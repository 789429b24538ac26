"""Messages that the coordinator sends to devices on its own.

They are grants, the workloads of live runs, what to measure, and which certificates were revoked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from itertools import islice

import grpc

from coordinator.errors import QuotaExceededError
from coordinator.repository.repository import FleetRepository
from coordinator.services.event_log import EventLog
from coordinator.settings import SessionSettings
from coordinator.state.fleet import Fleet
from coordinator.state.measuring import LearningKind, SharedModes
from coordinator.state.records import DeviceRecord, RoundRecord, run_of
from coordinator.state.rounds.grants import Grant
from wattfleet.common.tasks import background_task, stop_tasks
from wattfleet.core.budgets import InForce
from wattfleet.core.errors import first_few
from wattfleet.core.modes import Measurement, Workload
from wattfleet_proto.convert import measured_to_message, mode_to_message, workload_to_message
from wattfleet_proto.v1 import session_pb2

_log = logging.getLogger(__name__)

_SENT_AT_ONCE = 5
"""Grants sent in one step of the event loop; leases of other devices are answered between two steps."""

MAX_UNSENT_ORDERS = 32
"""The most orders to measure, each of a different workload, that may wait to be read; agents keep the same number."""

_SHARE_AFTER_S = 1.0
"""Seconds from a report until measured modes are passed on; most devices of a round have reported by then."""

_PAUSE_S, _SPREAD_S = 0.005, 3.0
"""Seconds between steps that begin trainings: each device confirms at once, and others need answers as well.

A thousand devices receive their grants in a second. For more than 3,000 devices the pauses are shorter, so that ten
thousand receive theirs before their agents stop waiting (10 s, `GRANT_TIMEOUT_S` in `device_trainings`). A busy event
loop makes the pauses longer.
"""


class ResponseStream:
    """The responses to one device; its gRPC stream accepts one at a time, as fast as the device reads."""

    def __init__(self, write: Callable[[session_pb2.SessionResponse], Awaitable[None]]) -> None:
        """Write to a gRPC stream."""
        self._write = write
        self._lock = asyncio.Lock()
        # By kind of order, and the workload to measure.
        self._waiting: dict[tuple[str, str], session_pb2.SessionResponse] = {}
        self._sending: asyncio.Task[None] | None = None

    async def write(self, response: session_pb2.SessionResponse) -> None:
        """Write a response after all earlier ones."""
        async with self._lock:
            await self._write(response)

    def send_soon(self, response: session_pb2.SessionResponse) -> None:
        """Write an order in the background; it replaces an unsent order of its kind.

        Orders to measure replace each other only if they name the same workload.

        Raises:
            QuotaExceededError: too many orders to measure wait.
        """
        kind, workload = response.WhichOneof("body") or "", response.profile.workload.name
        unsent = self._unsent_profiles()
        if kind == "profile" and workload not in unsent and len(unsent) >= MAX_UNSENT_ORDERS:
            raise QuotaExceededError(f"it has not received {len(unsent)} earlier orders yet: repeat the command later")
        self._waiting[kind, workload] = response
        if self._sending is None or self._sending.done():
            self._sending = background_task("send an order", self._send())

    async def _send(self) -> None:
        async with self._lock:
            while self._waiting:
                subject, response = next(iter(self._waiting.items()))
                try:
                    await self._write(response)
                except grpc.aio.BaseError:
                    return  # the device disconnected: its next session begins with the newest grant
                if self._waiting[subject] is response:  # otherwise a newer order has replaced it meanwhile
                    del self._waiting[subject]

    def close(self) -> list[str]:
        """Stop sending, because the session has ended; return the workloads whose orders to measure were not sent."""
        if self._sending is not None:
            self._sending.cancel()
        return self._unsent_profiles()

    def _unsent_profiles(self) -> list[str]:
        return [workload for kind, workload in self._waiting if kind == "profile"]


class Orders:
    """Sends orders to devices with a session; other devices receive their grants when their next session begins."""

    def __init__(
        self,
        fleet: Fleet,
        max_workloads: int = SessionSettings().max_workloads,
        shared: SharedModes | None = None,
        share_after_s: float = _SHARE_AFTER_S,
        revoked: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """Start without any session.

        Args:
            fleet: decides on the grants, and knows the workloads.
            max_workloads: limit on the workloads that are announced to a device.
            shared: the measured modes that devices learn from each other; None if they share none.
            share_after_s: seconds from a report until measured modes are passed on.
            revoked: returns the serial numbers of the certificates that devices must not accept any more.
        """
        self._fleet = fleet
        self._revoked = revoked
        self._max_workloads = max_workloads
        self._shared = shared or SharedModes(0)
        self._share_after_s = share_after_s
        self._to_share: set[tuple[LearningKind, str]] = set()
        # By kind, for devices that share no modes themselves: the number of changes, and the announcement after them.
        self._announcements: dict[LearningKind, tuple[int, Sequence[Workload], session_pb2.SessionResponse]] = {}
        self._sharing: asyncio.Task[None] | None = None
        self._streams: dict[str, ResponseStream] = {}
        # Devices that wait for an announcement, with the method that sends it.
        self._not_announced: dict[tuple[Callable[[str], None], str], None] = {}
        self._announcing: asyncio.Task[None] | None = None
        # Devices whose grants wait for their step; those that may act on an older grant come first.
        self._changed: dict[str, None] = {}
        self._first: dict[str, None] = {}
        self._sending: asyncio.Task[None] | None = None

    @property
    def share_modes(self) -> int:
        """The most measured modes of a workload that devices of one kind learn from each other."""
        return self._shared.most

    def begin(self, device_id: str, stream: ResponseStream) -> None:
        """Begin to send a device's orders to a stream, the responses of its session."""
        self._streams[device_id] = stream
        if self._revoked():
            self._tell_of_revocations(device_id)
        if self._fleet.flower.live_workloads():
            self._announce(device_id)

    def end(self, device_id: str, stream: ResponseStream) -> None:
        """Stop sending to a stream, because its session has ended."""
        for workload in stream.close():
            _log.warning(
                "%s: its session ended before it received the order to measure %r: repeat the order",
                device_id,
                workload,
            )
        if self._streams.get(device_id) is stream:  # otherwise a newer session has begun
            del self._streams[device_id]

    def has_session(self, device_id: str) -> bool:
        """Whether a device has a session, so that orders can be sent to it."""
        return device_id in self._streams

    def announce_workloads(self) -> None:
        """Announce the workloads of all live runs to all devices, in the background."""
        self._announce_soon(self._streams)

    def announce_revocations(self) -> None:
        """Tell all devices which certificates were revoked, in the background."""
        self._announce_soon(self._streams, self._tell_of_revocations)

    def modes_measured(self, device: DeviceRecord, workload: str, measured: tuple[Measurement, ...]) -> None:
        """Schedule passing on a device's measured modes of a workload to devices that have measured fewer.

        Args:
            device: the device.
            workload: name of the workload.
            measured: the first modes that it has measured.
        """
        if all(workload != live.name for live in self._fleet.flower.live_workloads()):
            return  # the device reports its modes again once the workload is announced
        if self._fleet.agents.claims.exclusion_reason(device, workload) is not None:
            measured = ()
        kind = LearningKind(device.board, device.provenance)
        if self._shared.report(device.device_id, kind, workload, measured):
            self._to_share.add((kind, workload))
            if self._sharing is None or self._sharing.done():
                self._sharing = background_task("share measured modes", self._share())

    async def _share(self) -> None:
        while self._to_share:
            await asyncio.sleep(self._share_after_s)
            shared, self._to_share = self._to_share, set()
            live = {workload.name for workload in self._fleet.flower.live_workloads()[: self._max_workloads]}
            self._shared.keep(live)
            self._announce_soon(each for each in self._streams if self._may_learn(each, shared, live))

    def _may_learn(self, device_id: str, shared: Collection[tuple[LearningKind, str]], live: Collection[str]) -> bool:
        """Whether a device has measured fewer modes of a live workload than it can now learn from others."""
        device = self._fleet.agents.devices.get(device_id)
        if device is None:
            return False
        names = {name for kind, name in shared if kind.provenance == device.provenance and name in live}
        if not names:
            return False
        experienced = {each.name for each in device.fronts if each.profiled_modes >= self._shared.most}
        return not names <= experienced

    def _announce_soon(self, device_ids: Iterable[str], announce: Callable[[str], None] | None = None) -> None:
        self._not_announced.update(dict.fromkeys((announce or self._announce, each) for each in sorted(device_ids)))
        if self._announcing is None or self._announcing.done():
            self._announcing = background_task("announce workloads", self._announce_in_steps())

    def order_profile(self, device_id: str, order: session_pb2.ProfileOrder) -> None:
        """Order a device with a session to measure modes.

        Raises:
            QuotaExceededError: too many earlier orders wait for the device.
        """
        self._streams[device_id].send_soon(session_pb2.SessionResponse(profile=order))

    def send_due(self, only: str | None = None) -> None:
        """Send the grants that have changed to devices with a session, or to one device only.

        The grants of many devices are sent in the background, in small steps. Each is compared with the fleet's state
        when it is sent, because plans may be trimmed or abandoned meanwhile.
        """
        if only is not None:
            self._send([only])
            return
        changed, first = self._fleet.rounds.grants.due()
        self._changed.update((each, None) for each in changed if each in self._streams)
        self._first.update((each, None) for each in first if each in self._streams)
        is_sending = self._sending is not None and not self._sending.done()
        if (self._changed or self._first) and not is_sending:
            self._sending = background_task("send grants", self._send_in_steps())

    async def close(self) -> None:
        """Stop sending, because the coordinator stops; each device receives its grant from the next coordinator."""
        await stop_tasks(self._sending, self._announcing, self._sharing)

    async def _announce_in_steps(self) -> None:
        loop = asyncio.get_running_loop()
        while waiting := self._not_announced:
            begun_s = loop.time()
            for announce, device_id in list(islice(waiting, _SENT_AT_ONCE)):
                del waiting[announce, device_id]
                announce(device_id)
            busy_s = loop.time() - begun_s
            await asyncio.sleep(max(busy_s, min(_PAUSE_S, _SPREAD_S * _SENT_AT_ONCE / max(1, len(waiting)))))

    def _announce(self, device_id: str) -> None:
        if device_id in self._streams:
            self._streams[device_id].send_soon(self._announcement(device_id))

    def _tell_of_revocations(self, device_id: str) -> None:
        if device_id in self._streams:
            revoked = session_pb2.RevokedCertificates(serials=self._revoked())
            self._streams[device_id].send_soon(session_pb2.SessionResponse(revoked=revoked))

    def _announcement(self, device_id: str) -> session_pb2.SessionResponse:
        """The announcement to a device: the workloads of all live runs, with the modes that others have measured."""
        workloads = self._fleet.flower.live_workloads()[: self._max_workloads]
        device = self._fleet.agents.devices.get(device_id)
        if device is None:
            return session_pb2.SessionResponse(announced=_announced(workloads))
        kind = LearningKind(device.board, device.provenance)
        if self._shared.is_kept(device_id, kind):
            return self._with_measured(device_id, kind, workloads)
        # Thousands of devices of a kind receive the same message.
        changes, announced, response = self._announcements.get(kind, (-1, (), session_pb2.SessionResponse()))
        if (changes, announced) != (self._shared.changes, workloads):
            response = self._with_measured(device_id, kind, workloads)
            self._announcements[kind] = self._shared.changes, workloads, response
        return response

    def _with_measured(
        self, device_id: str, kind: LearningKind, workloads: Sequence[Workload]
    ) -> session_pb2.SessionResponse:
        measured = [
            session_pb2.MeasuredUnit(
                workload=workload.name, modes=map(measured_to_message, unit.measured), board=unit.board
            )
            for workload in workloads
            for unit in self._shared.of_others(device_id, kind, workload.name)
        ]
        return session_pb2.SessionResponse(announced=_announced(workloads, measured))

    async def _send_in_steps(self) -> None:
        loop = asyncio.get_running_loop()
        busy_s = 0.0
        while waiting := self._changed or self._first:
            pause_s = max(busy_s, min(_PAUSE_S, _SPREAD_S * _SENT_AT_ONCE / len(waiting)))
            if waiting is self._changed:
                pause_s = 0.0
            step = list(islice(waiting, _SENT_AT_ONCE))
            for device_id in step:
                del waiting[device_id]
            begun_s = loop.time()
            self._send(step)
            await asyncio.sleep(pause_s)
            # The time that the loop was busy with this step and its consequences: the next pause is at least as long.
            busy_s = loop.time() - begun_s - pause_s

    def _send(self, device_ids: Collection[str]) -> None:
        for device_id, grant in self._fleet.take_orders(self._streams.__contains__, device_ids):
            _log.debug("%s: grant of %.1f W for %s", device_id, grant.limit_w, grant.plan_id or "no plan")
            message = grant_to_message(grant, self._fleet.flower.workload_of(run_of(grant.plan_id)))
            self._streams[device_id].send_soon(session_pb2.SessionResponse(grant=message))


def _announced(
    workloads: Sequence[Workload], measured: Sequence[session_pb2.MeasuredUnit] = ()
) -> session_pb2.WorkloadsAnnounced:
    return session_pb2.WorkloadsAnnounced(workloads=map(workload_to_message, workloads), measured=measured)


def grant_to_message(grant: Grant, workload: str = "") -> session_pb2.Grant:
    """Convert a grant to its message.

    Args:
        grant: the grant.
        workload: name of its plan's workload.
    """
    granted = grant.assignment
    return session_pb2.Grant(
        id=grant.grant_id,
        plan_id=grant.plan_id,
        mode=None if granted is None else mode_to_message(granted.mode),
        power_limit_w=grant.limit_w,
        longest_s=grant.longest_s,
        workload=workload,
        batch=0 if granted is None else granted.batch or 0,
        measuring=(
            None
            if grant.measuring is None
            else session_pb2.Measuring(modes=grant.measuring.modes, longest_s=grant.measuring.longest_s)
        ),
        planned_s=grant.planned_s,
        counts_energy=grant.counts_energy,
    )


# --- Trimmer ----------------------------------------------------------------------------------------------------------
# Keeps the rounds in flight within the budgets: trims them, orders their devices, and stores the changes.

TRIM_CHECK_S = 1.0
"""Time between two checks whether rounds exceed their budget, s; a fleet that reconnects at once is trimmed once."""


class Trimmer:
    """Trims when a budget changes, and when devices may draw more than the plans in flight took into account."""

    def __init__(
        self,
        repository: FleetRepository,
        orders: Orders,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        events: EventLog | None = None,
    ) -> None:
        """Trim one fleet's rounds.

        Args:
            repository: the fleet and its store.
            orders: sends orders to devices.
            sleep: waits for the given seconds.
            events: the log of what happens to the fleet; None for one that stores nothing.
        """
        self._events = events or EventLog(repository.fleet)
        self._repository = repository
        self._orders = orders
        self._sleep = sleep

    def budget_changed(self, supply: str, in_force: InForce) -> None:
        """Put a supply's new budget in force."""
        self._put_in_force(self._repository.fleet.set_budget(supply, in_force))

    async def watch(self) -> None:
        """End grants that have lapsed, and trim whatever has come to exceed its budget, until cancelled."""
        is_failing = False
        while True:
            await self._sleep(TRIM_CHECK_S)
            fleet = self._repository.fleet
            try:
                if lapsed := fleet.check_grants():
                    _log.warning("the grants of devices without contact have lapsed: %s", first_few(lapsed))
                self._put_in_force(fleet.trim())
                is_failing = False
            except Exception:
                # The error boundary of the watch: an error in one round must not stop the coordinator.
                if not is_failing:
                    _log.exception("rounds in flight could not be trimmed; retrying")
                is_failing = True

    def _put_in_force(self, trimmed: Sequence[RoundRecord]) -> None:
        self._orders.send_due()  # before anything is stored, because the budget has changed already
        if trimmed:
            self._repository.save_soon(*trimmed)
        for record in trimmed:
            self._events.trimmed(record)
