"""Checks of what devices claim: whether it is plausible, and whether their observed trainings agree with it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from coordinator.settings import ClaimSettings
from coordinator.state.records import DeviceRecord, ObservedTraining, RoundRecord
from coordinator.state.workload_fronts import EVERY_WORKLOAD
from wattfleet.choosing import Front
from wattfleet.planning import (
    PowerRange,
    PredictionError,
    Trust,
    contradiction_of,
    prediction_error,
    require_plausible_observation,
    require_plausible_power,
)

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
            if EVERY_WORKLOAD in refused and (front is None or front.name == EVERY_WORKLOAD):
                return refused[EVERY_WORKLOAD]
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
