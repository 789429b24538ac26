"""How devices keep their duties, as their sessions last reported it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from wattfleet.duties import KeptDuty


class KeptDuties:
    """The latest figures of every device with a duty. They are not stored: a device repeats them with every lease."""

    def __init__(self) -> None:
        self._by_device: dict[str, KeptDuty] = {}
        self._reviewed: dict[str, tuple[str, Sequence[object]]] = {}

    def report(self, device_id: str, kept: KeptDuty | None) -> None:
        """Record a device's figures; None if it has no duty."""
        if kept is None:
            self.forget([device_id])
        else:
            self._by_device[device_id] = kept

    def is_reviewed(self, device_id: str, plan_id: str, fronts: Sequence[object]) -> bool:
        """Whether a device's part in a round was reviewed with the fronts that it has beside its duty now."""
        reviewed = self._reviewed.get(device_id)
        return reviewed is not None and reviewed[0] == plan_id and reviewed[1] is fronts

    def reviewed(self, device_id: str, plan_id: str, fronts: Sequence[object]) -> None:
        """Record that a device's part in a round was reviewed with the given fronts."""
        self._reviewed[device_id] = plan_id, fronts

    @property
    def devices(self) -> Collection[str]:
        """The ids of the devices with a duty."""
        return self._by_device.keys()

    def of(self, device_id: str) -> KeptDuty | None:
        """A device's latest figures; None if it has reported no duty."""
        return self._by_device.get(device_id)

    def forget(self, device_ids: Iterable[str]) -> None:
        """Remove the figures of devices."""
        for device_id in device_ids:
            self._by_device.pop(device_id, None)
            self._reviewed.pop(device_id, None)
