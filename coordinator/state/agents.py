"""The agents' side of the fleet: devices with their sessions, states and fronts."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from coordinator.errors import UnknownRecordError
from coordinator.settings import ClaimSettings
from coordinator.state.names import abbreviate, require_name
from coordinator.state.records import LONGEST_TEXT, DeviceRecord, ObservedTraining, RoundRecord
from coordinator.state.workload_fronts import UNNAMED, UsualLengths, WorkloadFront
from wattfleet.core.budgets import Supplies
from wattfleet.core.choosing import Front
from wattfleet.core.errors import ImplausibleError, InvalidInputError
from wattfleet.core.modes import Workload, require_workload_name
from wattfleet.core.planning import (
    Offer,
    PowerRange,
    PredictionError,
    Trust,
    contradiction_of,
    prediction_error,
    require_plausible_observation,
    require_plausible_power,
)
from wattfleet_proto.device_state import DeviceState

# --- Placement --------------------------------------------------------------------------------------------------------
# The supply that each device is behind, and the operator's rules for individual devices.


@dataclass(frozen=True)
class DeviceRules:
    """The operator's rules for one device.

    Attributes:
        limit_w: the most watts that it may draw; None if it has no limit of its own.
        tags: words that rules use to select devices.
    """

    limit_w: float | None = None
    tags: frozenset[str] = frozenset()


class Placement(Protocol):
    """The supply that each device is behind, and its rules."""

    def supply_of(self, device_id: str) -> str:
        """The supply that a device is behind.

        Raises:
            InvalidInputError: the site file does not place the device.
        """
        ...

    def rules_of(self, device_id: str) -> DeviceRules:
        """The rules for a device."""
        ...


@dataclass(frozen=True)
class OnlySite:
    """A placement with all devices behind the only site, and without rules."""

    supplies: Supplies

    def __post_init__(self) -> None:
        if len(self.supplies.roots) > 1:
            raise InvalidInputError("with several sites, a site file has to place every device behind one of them")

    def supply_of(self, device_id: str) -> str:
        """The only site's supply."""
        return self.supplies.roots[0]

    def rules_of(self, device_id: str) -> DeviceRules:
        """No rules."""
        return DeviceRules()


class AssignedPlacement:
    """A placement in which an invite put some devices behind another supply."""

    def __init__(self, placement: Placement, supplies: Supplies, assigned: Mapping[str, str]) -> None:
        """Place some devices behind other supplies.

        Args:
            placement: the placement of all other devices, and the rules of all devices.
            supplies: the site's supplies; an assignment to a missing supply is ignored.
            assigned: device id -> supply.
        """
        self._placement = placement
        self._supplies = supplies
        self._assigned = dict(assigned)

    def supply_of(self, device_id: str) -> str:
        """The supply assigned to a device, or else that of the site file."""
        supply = self._assigned.get(device_id)
        return supply if supply in self._supplies.names else self._placement.supply_of(device_id)

    def rules_of(self, device_id: str) -> DeviceRules:
        """The site file's rules for a device."""
        return self._placement.rules_of(device_id)

    def assign(self, device_id: str, supply: str) -> None:
        """Place a device behind a supply; an empty name leaves the choice to the site file."""
        if supply:
            self._assigned[device_id] = supply
        else:
            self._assigned.pop(device_id, None)


# --- Claims -----------------------------------------------------------------------------------------------------------
# Checks of what devices claim: whether it is plausible, and whether their observed trainings agree with it.

_MAX_WORKLOADS = 32
"""The most workloads per device whose claims are kept; a device that does not name workloads may train any number."""

_Value = TypeVar("_Value", str, Trust)


class Claims:
    """Refused fronts, and the trust in each device. Both are derived from reports, so neither is stored."""

    def __init__(self, settings: ClaimSettings = ClaimSettings()) -> None:
        """Start without any claim.

        Args:
            settings: limits of what is plausible, and when trust is lost.
        """
        self._others = PowerRange(settings.other_board_w, settings.other_board_idle_w)
        self._max_contradictions = settings.max_contradictions
        # By device and workload. Inner mappings are replaced, never changed.
        self._refused: dict[str, Mapping[str, str]] = {}
        self._trust: dict[str, Mapping[str, Trust]] = {}

    def trust_of(self, device_id: str, workload: str | None = None) -> float | None:
        """A device's trust: 1 if no recent prediction was contradicted, down to 0; None before an observed training.

        Args:
            device_id: the device.
            workload: the workload in question; None for the one with the least trust.
        """
        of_device = self._trust.get(device_id, {})
        shares = [trust.share for name, trust in of_device.items() if workload in (None, name)]
        return min(shares, default=None)

    def errors_of(self, device_id: str, workload: str | None = None) -> Sequence[PredictionError]:
        """How far a device's latest trainings were from its predictions, oldest first.

        Args:
            device_id: the device.
            workload: the workload in question; None for the one that it trained last.
        """
        of_device = self._trust.get(device_id, {})
        name = next(reversed(list(of_device)), "") if workload is None else workload
        return of_device[name].errors if name in of_device else ()

    def exclusion_reason(self, device: DeviceRecord, workload: str | None = None) -> str | None:
        """Why a device is left out of rounds because of its claims; None if it may be selected.

        Args:
            device: the device.
            workload: what the rounds train; None for any.
        """
        refused = self._refused.get(device.device_id, {})
        trusts = self._trust.get(device.device_id, {})
        if not refused and not trusts:
            return None
        for name in dict.fromkeys((*refused, *trusts)) if workload is None else (workload,):
            front = device.front_for(name)
            if name in refused:
                return refused[name]
            if name in trusts and front is not None:
                reason = trusts[name].exclusion_reason(front.front, self._max_contradictions)
                if reason is not None:
                    return reason
        return None

    # --- reports ------------------------------------------------------------------------------------------------

    def require_plausible_front(
        self, device: DeviceRecord, front: Front | None, idle_w: float, is_idle_with_duty: bool = False
    ) -> None:
        """Check a front, if there is one, and the idle power against the kind of board.

        Args:
            device: the device.
            front: its front; None if it has none now.
            idle_w: watts while parked.
            is_idle_with_duty: while parked, the device answers requests.

        Raises:
            ImplausibleError: no board of this kind can draw this much power.
        """
        require_plausible_power(device.device_id, device.board, front, idle_w, self._others, is_idle_with_duty)

    def front_refused(self, device_id: str, workload: str, reason: str) -> None:
        """Leave a device out of a workload's rounds until it reports a plausible front."""
        _put(self._refused, device_id, workload, reason)

    def front_accepted(self, device_id: str, workload: str) -> None:
        """Include a device again that was left out because of its front for a workload."""
        _drop(self._refused, device_id, [workload])

    def forget(self, device_id: str, workloads: Collection[str]) -> None:
        """Forget the claims of a device about the given workloads."""
        _drop(self._refused, device_id, workloads)
        _drop(self._trust, device_id, workloads)

    def forget_devices(self, device_ids: Collection[str]) -> None:
        """Forget all claims of the given devices."""
        for device_id in device_ids:
            self._refused.pop(device_id, None)
            self._trust.pop(device_id, None)

    def require_plausible_observation(self, device: DeviceRecord, epoch_s: float, power_w: float) -> None:
        """Check an observation against the kind of board.

        Raises:
            ImplausibleError: no board of this kind can have observed these values.
        """
        require_plausible_observation(device.device_id, device.board, epoch_s, power_w, self._others)

    def observed(self, device: DeviceRecord, workload: str, record: RoundRecord, seen: ObservedTraining) -> None:
        """Compare an observation with the device's prediction for the round.

        A training whose mode was changed by a trim is not compared, because its observation covers several modes. Only
        the power of a training beside a duty is compared.

        Args:
            device: the device.
            workload: name of the workload that the round trained.
            record: the round.
            seen: the observation.
        """
        assignment = record.plan.assignment_of(device.device_id)
        first = record.plan.original.assignment_of(device.device_id)
        if assignment is None or first is None or assignment.mode != first.mode:
            return
        observed = (seen.epoch_s, seen.power_w, seen.beside_duty)
        trust = self._trust.get(device.device_id, {}).get(workload, Trust())
        after = trust.after(contradiction_of(assignment, *observed), prediction_error(assignment, *observed))
        _put(self._trust, device.device_id, workload, after)

    def trust_again(self, device_ids: Collection[str]) -> None:
        """Forget the contradictions of the given devices, because the operator includes them again."""
        for device_id in device_ids:
            self._trust.pop(device_id, None)


def _put(kept: dict[str, Mapping[str, _Value]], device_id: str, workload: str, value: _Value) -> None:
    """Keep a value for a device and a workload; beyond the limit, the oldest workloads are dropped."""
    others = {name: each for name, each in kept.get(device_id, {}).items() if name != workload}
    newest = list(others.items())[-(_MAX_WORKLOADS - 1) :]
    kept[device_id] = {**dict(newest), workload: value}


def _drop(kept: dict[str, Mapping[str, _Value]], device_id: str, workloads: Collection[str]) -> None:
    """Drop the values of a device for the given workloads."""
    known = kept.get(device_id, {})
    if not known.keys().isdisjoint(workloads):
        kept[device_id] = {name: value for name, value in known.items() if name not in workloads}


# --- Agents -----------------------------------------------------------------------------------------------------------

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
        for record in devices:  # a store may contain implausible fronts
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

    def connect(self, device_id: str, board: str, provenance: str, mode_count: int) -> DeviceRecord:
        """Begin a device's session, or replace the one that it has.

        Args:
            device_id: the device.
            board: its kind of board.
            provenance: where its measurements come from.
            mode_count: the number of its power modes.

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
        workload: Workload = UNNAMED,
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
            workload: as the device knows it.
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
        others = tuple(each for each in before.fronts if each.name != reported.name)
        known = next((each for each in before.fronts if each.name == reported.name), None)
        if known is not None and known.front.equals(front):
            reported = replace(reported, front=known.front)
            reported = known if reported == known else reported
        dropped = others[: max(0, len(others) + 1 - self._max_workloads)]
        self.claims.forget(device_id, [each.name for each in dropped])
        after = replace(before, fronts=(*others[len(dropped) :], reported), idle_w=idle_w)
        if after == before:
            return before
        return self._put(after)

    def report_no_front(
        self,
        device_id: str,
        reason: str,
        idle_w: float,
        workload: str = UNNAMED.name,
        is_idle_with_duty: bool = False,
    ) -> DeviceRecord:
        """Record why a device has no front for a workload now, and drop its earlier front.

        Rounds in flight continue as planned. New rounds leave the device out until it reports a front.

        Args:
            device_id: the device.
            reason: for people.
            idle_w: watts while parked.
            workload: name of the workload.
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

    def refuse_front(self, device_id: str, reason: str, workload: str = UNNAMED.name) -> DeviceRecord:
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
