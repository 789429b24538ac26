"""The agents' side of the fleet: devices with their sessions, states and fronts."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace

from coordinator.errors import UnknownRecordError
from coordinator.state.claims import Claims
from coordinator.state.names import abbreviate, require_name
from coordinator.state.placement import Placement
from coordinator.state.records import LONGEST_TEXT, DeviceRecord
from coordinator.state.workload_fronts import EVERY_WORKLOAD, UsualLengths, WorkloadFront
from wattfleet.choosing import Front
from wattfleet.errors import ImplausibleError, InvalidInputError
from wattfleet.modes import Workload, require_workload_name
from wattfleet.planning import Offer
from wattfleet_proto.device_state import DeviceState

_DIGEST = re.compile("([0-9a-f]{64})?")


class Agents:
    """All devices as their agents report them. Each change returns the record to store.

    Attributes:
        devices: every known device by its id.
        claims: checks whether reports are plausible, and keeps each device's trust.
    """

    def __init__(
        self,
        devices: Sequence[DeviceRecord],
        placement: Placement,
        claims: Claims,
        max_workloads: int = 32,
    ) -> None:
        """Start from what a store holds; no device is connected yet.

        Args:
            devices: known devices.
            placement: the supply that each device is behind.
            claims: checks what devices report.
            max_workloads: the most workloads per device whose fronts are kept.
        """
        self.devices = {record.device_id: replace(record, state=DeviceState.OFFLINE) for record in devices}
        self._connected: set[str] = set()
        # A device that loses its session goes on measuring.
        self._profiling = {each.device_id for each in devices if each.state is DeviceState.PROFILING}
        self._placement = placement
        self._max_workloads = max_workloads
        self.claims = claims
        for record in devices:  # an earlier version may have stored fronts that this one refuses
            for known in record.fronts:
                self._check(record, known)

    def get(self, device_id: str) -> DeviceRecord:
        """One device.

        Raises:
            UnknownRecordError: the device never connected.
        """
        if device_id not in self.devices:
            raise UnknownRecordError(f"unknown device {device_id!r}: it never connected; is its agent running?")
        return self.devices[device_id]

    def is_connected(self, device_id: str) -> bool:
        """Whether a device has a session."""
        return device_id in self._connected

    def is_profiling(self, device_id: str) -> bool:
        """Whether a device was measuring its power modes at its last report."""
        return device_id in self._profiling

    def usual_lengths(self) -> UsualLengths:
        """The epoch lengths assumed for devices that do not know their own, from the fronts that devices have now."""
        return UsualLengths(device.fronts for device in self.devices.values())

    def left_out(self, workload: str | None = None) -> dict[str, str]:
        """The reasons why devices are left out of rounds because of their claims, by device id.

        Args:
            workload: what the rounds train; None for any.
        """
        reasons = {each.device_id: self.claims.exclusion_reason(each, workload) for each in self.devices.values()}
        return {device_id: reason for device_id, reason in reasons.items() if reason is not None}

    # --- reports ------------------------------------------------------------------------------------------------

    def connect(
        self, device_id: str, board: str, provenance: str, mode_count: int, names_workloads: bool = False
    ) -> DeviceRecord:
        """Begin a device's session, or replace the one that it has.

        Args:
            device_id: the device.
            board: its kind of board.
            provenance: where its measurements come from.
            mode_count: the number of its power modes.
            names_workloads: its agent speaks protocol 2.1 or later. A front for every workload then dates from before
                its upgrade and is dropped; agents report their fronts again in each session.

        Raises:
            InvalidInputError: the id or the board is not printable, or the id was enrolled as another kind of board.
        """
        if not device_id or not board or mode_count < 1:
            raise InvalidInputError("a device must have an id, a kind of board and at least one power mode")
        require_name("a device's id", device_id)
        require_name("a device's kind of board", board)
        known = self.devices.get(device_id)
        if known and (known.board, known.provenance) != (board, provenance):
            raise InvalidInputError(
                f"{device_id} is enrolled as {known.provenance} {known.board}, not as {provenance} {board}:"
                " choose another device id"
            )
        self._placement.supply_of(device_id)  # refuse a misplaced device here, not when a round is planned
        self._connected.add(device_id)
        record = known or DeviceRecord(device_id, board, provenance, mode_count)
        if names_workloads:
            record = self._without_front(record, EVERY_WORKLOAD)
        return self._put(replace(record, state=DeviceState.ENROLLED, mode_count=mode_count, detail=""))

    def disconnect(self, device_id: str) -> DeviceRecord:
        """End a device's session."""
        self._connected.discard(device_id)
        return self._put(replace(self.get(device_id), state=DeviceState.OFFLINE, detail=""))

    def report_state(self, device_id: str, state: DeviceState, profiled_modes: int, detail: str) -> DeviceRecord:
        """Record what a device reports that it is doing."""
        detail = detail[:LONGEST_TEXT]
        before = self.get(device_id)
        (self._profiling.add if state is DeviceState.PROFILING else self._profiling.discard)(device_id)
        return self._put(replace(before, state=state, profiled_modes=profiled_modes, detail=detail))

    def assume_ready(self, device_id: str) -> None:
        """In a copy for a preview, assume that a device that trains is ready for the next round."""
        if (device := self.devices[device_id]).state is DeviceState.TRAINING:
            self._put(replace(device, state=DeviceState.READY))

    def report_front(
        self,
        device_id: str,
        front: Front,
        idle_w: float,
        profiled_modes: int,
        reference_digest: str,
        workload: Workload | None = None,
        minibatches_per_epoch: int | None = None,
        is_idle_with_duty: bool = False,
    ) -> DeviceRecord:
        """Record a device's predicted front for a workload, and its idle power.

        If the device has fronts for too many workloads, the one reported longest ago is dropped.

        Args:
            device_id: the device.
            front: its front.
            idle_w: watts while parked.
            profiled_modes: the number of modes that it has measured for the workload.
            reference_digest: digest of the reference predictor behind the front; empty for none.
            workload: as the device knows it; None if the front counts for every workload.
            minibatches_per_epoch: in one pass over the device's data; None if it is unknown.
            is_idle_with_duty: while parked, the device answers requests.

        Raises:
            ImplausibleError: no board of this kind can draw this much power.
            InvalidInputError: the idle power is negative or not finite, the digest is malformed, or an epoch has no
                minibatches.
        """
        before = self.get(device_id)
        Offer(device_id, front, idle_w)  # checks the planner's own requirements before anything is stored
        self.claims.require_plausible_front(before, front, idle_w, is_idle_with_duty)
        if not _DIGEST.fullmatch(reference_digest):
            raise InvalidInputError(
                f"{device_id}: a reference's digest must have 64 hexadecimal digits, not {abbreviate(reference_digest)}"
            )
        if minibatches_per_epoch is not None and minibatches_per_epoch < 1:
            raise InvalidInputError(
                f"{device_id}: an epoch has 1 or more minibatches, not {minibatches_per_epoch}: leave the number out if"
                " it is unknown"
            )
        reported = WorkloadFront(front, workload, minibatches_per_epoch, profiled_modes, sys.intern(reference_digest))
        self.claims.front_accepted(device_id, reported.name)
        # A device that names its workloads was upgraded meanwhile: drop its old front for every workload.
        replaced = {reported.name, EVERY_WORKLOAD}
        others = tuple(each for each in before.fronts if each.name not in replaced)
        known = next((each for each in before.fronts if each.name == reported.name), None)
        if known is not None and known.front.equals(front):
            reported = replace(reported, front=known.front)
            reported = known if reported == known else reported
        dropped = others[: max(0, len(others) + 1 - self._max_workloads)]
        self.claims.forget(device_id, [each.name for each in dropped])
        after = replace(before, fronts=(*others[len(dropped) :], reported), idle_w=idle_w)
        if workload is None:
            after = replace(after, profiled_modes=profiled_modes)
        if after == before:
            return before
        return self._put(after)

    def report_no_front(
        self,
        device_id: str,
        reason: str,
        idle_w: float,
        workload: str = EVERY_WORKLOAD,
        is_idle_with_duty: bool = False,
    ) -> DeviceRecord:
        """Record why a device has no front for a workload now, and drop its earlier front.

        Rounds in flight continue as planned. New rounds leave the device out until it reports a front.

        Args:
            device_id: the device.
            reason: for people.
            idle_w: watts while parked.
            workload: name of the workload; `EVERY_WORKLOAD` if its one front counts for all.
            is_idle_with_duty: while parked, the device answers requests.

        Raises:
            ImplausibleError: no board of this kind can idle at this much power.
            InvalidInputError: the idle power is negative or not finite.
        """
        if not 0 <= idle_w < math.inf:
            raise InvalidInputError(f"{device_id}: the idle power must be finite and at least 0 W, not {idle_w:g}")
        self.claims.require_plausible_front(self.get(device_id), None, idle_w, is_idle_with_duty)
        after = replace(self._without_front(self.get(device_id), workload), idle_w=idle_w)
        self.claims.front_refused(device_id, workload, reason[:LONGEST_TEXT])
        return self._put(after)

    def remove_workload(self, device_id: str, workload: str) -> DeviceRecord:
        """Drop a device's front for a workload, because the device has removed its stored data of this workload.

        Raises:
            InvalidInputError: no workload can have this name.
        """
        require_workload_name(workload)
        return self._put(self._without_front(self.get(device_id), workload))

    def forget(self, device_ids: Collection[str]) -> None:
        """Remove disconnected devices."""
        for device_id in device_ids:
            del self.devices[device_id]
            self._profiling.discard(device_id)
        self.claims.forget_devices(device_ids)

    def refuse_front(self, device_id: str, reason: str, workload: str = EVERY_WORKLOAD) -> DeviceRecord:
        """Leave a device out of a workload's new rounds until it reports a plausible front.

        Its older front and its idle power stay.
        """
        self.claims.front_refused(device_id, workload, reason)
        return self.get(device_id)

    def _without_front(self, record: DeviceRecord, workload: str) -> DeviceRecord:
        """Return a device's record without its front for a workload, and drop its claims about this workload."""
        self.claims.forget(record.device_id, [workload])
        return replace(record, fronts=tuple(each for each in record.fronts if each.name != workload))

    def _check(self, record: DeviceRecord, known: WorkloadFront) -> None:
        if record.idle_w is None:
            return
        try:
            self.claims.require_plausible_front(record, known.front, record.idle_w)
        except ImplausibleError as error:
            self.claims.front_refused(record.device_id, known.name, str(error))

    def _put(self, record: DeviceRecord) -> DeviceRecord:
        self.devices[record.device_id] = record
        return record
