"""What devices claim: whether it is plausible, and how far their observed trainings agree with it."""

from __future__ import annotations

import copy
from collections.abc import Collection

from coordinator.settings import ClaimSettings
from coordinator.state.records import DeviceRecord, ObservedTraining, RoundRecord
from wattfleet.choosing import Front
from wattfleet.planning import (
    PowerRange,
    Trust,
    contradiction_of,
    require_plausible_observation,
    require_plausible_power,
)


class Claims:
    """Refused fronts, and the trust in each device. Both are derived from reports, so none of it is stored."""

    def __init__(self, settings: ClaimSettings = ClaimSettings()) -> None:
        """Start without any claim.

        Args:
            settings: limits of what is plausible, and when trust is lost.
        """
        self._others = PowerRange(settings.other_board_w, settings.other_board_idle_w)
        self._max_contradictions = settings.max_contradictions
        self._refused: dict[str, str] = {}
        self._trust: dict[str, Trust] = {}

    def copy(self) -> Claims:
        """An independent copy."""
        copied = copy.copy(self)
        copied._refused, copied._trust = self._refused.copy(), self._trust.copy()  # noqa: SLF001 - of this class
        return copied

    def trust_of(self, device_id: str) -> float | None:
        """From 1, if no recent prediction was contradicted, to 0; None before the device's first observed training."""
        trust = self._trust.get(device_id)
        return None if trust is None else trust.share

    def exclusion_reason(self, device: DeviceRecord) -> str | None:
        """Why a device is left out of rounds because of its claims; None if it may be selected."""
        if device.device_id in self._refused:
            return self._refused[device.device_id]
        trust = self._trust.get(device.device_id)
        if trust is None or device.front is None:
            return None
        return trust.exclusion_reason(device.front, self._max_contradictions)

    # --- reports ------------------------------------------------------------------------------------------------

    def require_plausible_front(self, device: DeviceRecord, front: Front, idle_w: float) -> None:
        """Check a front and the idle power against the kind of board.

        Raises:
            ImplausibleError: no board of its kind draws as much.
        """
        require_plausible_power(device.device_id, device.board, front, idle_w, self._others)

    def front_refused(self, device_id: str, reason: str) -> bool:
        """Leave a device out until it reports a plausible front; returns whether this is new."""
        is_new = self._refused.get(device_id) != reason
        self._refused[device_id] = reason
        return is_new

    def front_accepted(self, device_id: str) -> None:
        """End the exclusion of a device for its front."""
        self._refused.pop(device_id, None)

    def require_plausible_observation(self, device: DeviceRecord, epoch_s: float, power_w: float) -> None:
        """Check an observation against the kind of board.

        Raises:
            ImplausibleError: no device can observe this.
        """
        require_plausible_observation(device.device_id, device.board, epoch_s, power_w, self._others)

    def observed(self, device: DeviceRecord, record: RoundRecord, seen: ObservedTraining) -> None:
        """Compare an observation with the device's prediction for the round.

        A training whose mode was changed by a trim is not compared: its observation is of several modes.
        """
        assignment = record.plan.assignment_of(device.device_id)
        first = record.plan.original.assignment_of(device.device_id)
        if device.front is None or assignment is None or first is None or assignment.mode != first.mode:
            return
        contradiction = contradiction_of(assignment, device.front, seen.epoch_s, seen.power_w)
        self._trust[device.device_id] = self._trust.get(device.device_id, Trust()).after(contradiction)

    def trust_again(self, device_ids: Collection[str]) -> None:
        """Forget the contradictions of some devices, since the operator includes them again."""
        for device_id in device_ids:
            self._trust.pop(device_id, None)
