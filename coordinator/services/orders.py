"""What the coordinator tells devices by itself: their grants, the workloads of live runs, and what to measure."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from itertools import islice

import grpc

from coordinator.errors import QuotaExceededError
from coordinator.settings import SessionSettings
from coordinator.state.fleet import Fleet
from coordinator.state.records import DeviceRecord, run_of
from coordinator.state.rounds.device_grant import Grant
from coordinator.state.shared_modes import Kind, SharedModes
from wattfleet.modes import Measurement, Workload
from wattfleet_io.tasks import background_task, stop_tasks
from wattfleet_proto.convert import measured_to_message, mode_to_message, workload_to_message
from wattfleet_proto.v1 import session_pb2

_log = logging.getLogger(__name__)

_SENT_AT_ONCE = 5
"""Grants that are sent in one step of the event loop; leases of other devices are answered between two steps."""

MAX_UNSENT_ORDERS = 32
"""Orders to measure, each of another workload, that may wait for a device to read them. Agents keep as many."""

_SHARE_AFTER_S = 1.0
"""Measured modes are passed on so long after a report: by then, most devices of a round have reported theirs."""

_PAUSE_S, _SPREAD_S = 0.005, 3.0
"""Pauses between steps that begin trainings: each device confirms at once, and others need answers as well.

A thousand devices are told in a second. For more than 3,000 the pauses are shorter, so that ten thousand are told
before their agents stop waiting for their grants (`grant_timeout_s`, 10 s). A busy event loop makes them longer.
"""


class ResponseStream:
    """The responses to one device: its gRPC stream takes one at a time, as fast as the device reads."""

    def __init__(self, write: Callable[[session_pb2.SessionResponse], Awaitable[None]]) -> None:
        """Write to a gRPC stream."""
        self._write = write
        self._lock = asyncio.Lock()
        # By kind of order, and the workload that is to be measured.
        self._waiting: dict[tuple[str, str], session_pb2.SessionResponse] = {}
        self._sending: asyncio.Task[None] | None = None

    async def write(self, response: session_pb2.SessionResponse) -> None:
        """Write a response after those before it."""
        async with self._lock:
            await self._write(response)

    def send_soon(self, response: session_pb2.SessionResponse) -> None:
        """Write an order in the background; it replaces one of its kind that a slow reader has not taken yet.

        Orders to measure replace each other only if they are of the same workload.

        Raises:
            QuotaExceededError: too many orders to measure wait.
        """
        kind, workload = response.WhichOneof("body") or "", response.profile.workload.name
        unsent = self._unsent_profiles()
        if kind == "profile" and workload not in unsent and len(unsent) >= MAX_UNSENT_ORDERS:
            raise QuotaExceededError(f"it has not taken {len(unsent)} earlier orders yet: repeat the command later")
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
                if self._waiting[subject] is response:  # otherwise a newer one has replaced it meanwhile
                    del self._waiting[subject]

    def close(self) -> list[str]:
        """Stop sending, since the session has ended; returns the workloads whose orders to measure were not sent."""
        if self._sending is not None:
            self._sending.cancel()
        return self._unsent_profiles()

    def _unsent_profiles(self) -> list[str]:
        return [workload for kind, workload in self._waiting if kind == "profile"]


class Orders:
    """Sends orders to devices with a session; another device receives its grant when its next session begins."""

    def __init__(
        self,
        fleet: Fleet,
        max_workloads: int = SessionSettings().max_workloads,
        shared: SharedModes | None = None,
        share_after_s: float = _SHARE_AFTER_S,
    ) -> None:
        """Start without any session.

        Args:
            fleet: decides on the grants, and knows the workloads.
            max_workloads: limit on the workloads that are announced to a device.
            shared: the measured modes that devices learn from each other; None for none.
            share_after_s: how long after a report measured modes are passed on, seconds.
        """
        self._fleet = fleet
        self._max_workloads = max_workloads
        self._shared = shared or SharedModes(0)
        self._share_after_s = share_after_s
        self._to_share: set[tuple[Kind, str]] = set()
        # By kind, for devices that share no modes themselves: what was announced after how many changes.
        self._announcements: dict[Kind, tuple[int, Sequence[Workload], session_pb2.SessionResponse]] = {}
        self._sharing: asyncio.Task[None] | None = None
        self._streams: dict[str, ResponseStream] = {}
        # Of agents of protocol 2.1 or later; older ones know no workloads.
        self._know_workloads: set[str] = set()
        # Of agents of protocol 2.2 or later.
        self._learn_from_others: set[str] = set()
        self._not_announced: dict[str, None] = {}
        self._announcing: asyncio.Task[None] | None = None
        # Devices whose grants wait for their step: those that may act on an older grant go first.
        self._changed: dict[str, None] = {}
        self._first: dict[str, None] = {}
        self._sending: asyncio.Task[None] | None = None

    @property
    def share_modes(self) -> int:
        """Measured modes of a workload that devices of one kind learn from each other."""
        return self._shared.most

    def begin(
        self, device_id: str, stream: ResponseStream, knows_workloads: bool = False, learns_from_others: bool = False
    ) -> None:
        """Send a device's orders to a stream from now on.

        Args:
            device_id: the device.
            stream: the responses of its session.
            knows_workloads: the agent speaks protocol 2.1 or later.
            learns_from_others: the agent speaks protocol 2.2 or later.
        """
        self._streams[device_id] = stream
        (self._learn_from_others.add if learns_from_others else self._learn_from_others.discard)(device_id)
        if not knows_workloads:
            self._know_workloads.discard(device_id)
            return
        self._know_workloads.add(device_id)
        if self._fleet.flower.live_workloads():
            self._announce(device_id)

    def end(self, device_id: str, stream: ResponseStream) -> None:
        """Stop sending to a stream, since its session has ended."""
        for workload in stream.close():
            _log.warning(
                "%s: its session ended before it took the order to measure %r: repeat the order", device_id, workload
            )
        if self._streams.get(device_id) is stream:  # otherwise a newer session has begun
            del self._streams[device_id]
            self._know_workloads.discard(device_id)
            self._learn_from_others.discard(device_id)

    def knows_workloads(self, device_id: str) -> bool:
        """Whether a device has a session, and an agent that knows workloads."""
        return device_id in self._know_workloads

    def announce_workloads(self) -> None:
        """Announce the workloads of all live runs to all devices that know workloads, in the background."""
        self._announce_soon(self._know_workloads)

    def modes_measured(self, device: DeviceRecord, workload: str, measured: tuple[Measurement, ...]) -> None:
        """Pass on what a device has measured of a workload to others of its kind that have measured less, soon.

        Args:
            device: the device.
            workload: name of the workload.
            measured: the first modes that it has measured.
        """
        if all(workload != live.name for live in self._fleet.flower.live_workloads()):
            return  # reported again once it is announced
        if self._fleet.agents.claims.exclusion_reason(device, workload) is not None:
            measured = ()
        kind = Kind(device.board, device.provenance)
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
            self._announce_soon(each for each in self._learn_from_others if self._may_learn(each, shared, live))

    def _may_learn(self, device_id: str, shared: Collection[tuple[Kind, str]], live: Collection[str]) -> bool:
        """Whether a device has measured fewer modes of a live workload than it may learn from others now."""
        device = self._fleet.agents.devices.get(device_id)
        if device is None:
            return False
        names = {name for kind, name in shared if kind == (device.board, device.provenance) and name in live}
        if not names:
            return False
        experienced = {each.name for each in device.fronts if each.profiled_modes >= self._shared.most}
        return not names <= experienced

    def _announce_soon(self, device_ids: Iterable[str]) -> None:
        self._not_announced.update(dict.fromkeys(sorted(device_ids)))
        if self._announcing is None or self._announcing.done():
            self._announcing = background_task("announce workloads", self._announce_in_steps())

    def order_profile(self, device_id: str, order: session_pb2.ProfileOrder) -> None:
        """Order a device that knows workloads to measure modes.

        Raises:
            QuotaExceededError: the device has not taken too many earlier orders.
        """
        self._streams[device_id].send_soon(session_pb2.SessionResponse(profile=order))

    def send_due(self, only: str | None = None) -> None:
        """Send the grants that have changed to devices with a session, or to one device only.

        The grants of many devices are sent in the background, in small steps. Each is compared with the fleet's state
        when it is sent, since plans may be trimmed or given up meanwhile.
        """
        if only is not None:
            self._send([only])
            return
        changed, first = self._fleet.rounds.grants.due()
        self._changed.update((each, None) for each in changed if each in self._streams)
        self._first.update((each, None) for each in first if each in self._streams)
        if self._sending is None or self._sending.done():
            self._sending = background_task("send grants", self._send_in_steps())

    async def close(self) -> None:
        """Stop sending, since the coordinator stops; each device receives its grant from the next one."""
        await stop_tasks(self._sending, self._announcing, self._sharing)

    async def _announce_in_steps(self) -> None:
        loop = asyncio.get_running_loop()
        while waiting := self._not_announced:
            begun_s = loop.time()
            for device_id in list(islice(waiting, _SENT_AT_ONCE)):
                del waiting[device_id]
                if device_id in self._know_workloads:
                    self._announce(device_id)
            busy_s = loop.time() - begun_s
            await asyncio.sleep(max(busy_s, min(_PAUSE_S, _SPREAD_S * _SENT_AT_ONCE / max(1, len(waiting)))))

    def _announce(self, device_id: str) -> None:
        self._streams[device_id].send_soon(self._announcement(device_id))

    def _announcement(self, device_id: str) -> session_pb2.SessionResponse:
        """The workloads of all live runs, with what others have measured of them."""
        workloads = self._fleet.flower.live_workloads()[: self._max_workloads]
        device = self._fleet.agents.devices.get(device_id)
        if device is None or device_id not in self._learn_from_others:
            return session_pb2.SessionResponse(announced=_announced(workloads))
        kind = Kind(device.board, device.provenance)
        if self._shared.is_kept(device_id, kind):
            return self._with_measured(device_id, kind, workloads)
        # Thousands of devices of a kind are told the same.
        changes, announced, response = self._announcements.get(kind, (-1, (), session_pb2.SessionResponse()))
        if (changes, announced) != (self._shared.changes, workloads):
            response = self._with_measured(device_id, kind, workloads)
            self._announcements[kind] = self._shared.changes, workloads, response
        return response

    def _with_measured(self, device_id: str, kind: Kind, workloads: Sequence[Workload]) -> session_pb2.SessionResponse:
        measured = [
            session_pb2.MeasuredUnit(workload=workload.name, modes=map(measured_to_message, unit))
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
            # For how long the loop was busy with this step and what came of it: the next pause is at least as long.
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
    """The message for a grant.

    Args:
        grant: the grant.
        workload: name of what its plan trains.
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
    )
