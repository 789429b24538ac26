"""Applies the reports of agents' sessions to the fleet's state."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from coordinator.errors import UnknownRecordError
from coordinator.repository.repository import FleetRepository
from coordinator.services.event_log import EventLog
from coordinator.services.orders import Orders
from coordinator.services.state_times import StateTimes
from coordinator.state.names import require_name
from coordinator.state.records import DeviceRecord, StoredRecord
from coordinator.state.workload_fronts import EVERY_WORKLOAD
from wattfleet.errors import ImplausibleError, InvalidInputError
from wattfleet_proto.convert import (
    board_sample_from_message,
    front_from_message,
    kept_duty_from_message,
    measured_from_messages,
    phase_from_message,
    presets_from_messages,
    state_from_message,
    workload_from_message,
)
from wattfleet_proto.device_state import DeviceState, GrantPhase
from wattfleet_proto.message_sizes import MAX_PLAN_ID_CHARACTERS
from wattfleet_proto.v1 import session_pb2

_log = logging.getLogger(__name__)


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

        Raises:
            ImplausibleError: the report is refused, because its values are impossible for the device.
            InvalidInputError: the message is malformed.
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
        """Record a sample of a board's sensors; agents before protocol 2.7 send none."""
        if not lease.HasField("sample"):
            return
        try:
            if self._fleet.samples.report(device_id, board_sample_from_message(lease.sample)):
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
