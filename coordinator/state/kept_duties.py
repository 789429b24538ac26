"""How devices keep their duties, as their sessions last reported it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from wattfleet.duties import KeptDuty


class KeptDuties:
    """The latest figures of every device with a duty. They are not stored: a device repeats them with every lease."""

    def __init__(self) -> None:
        self._by_device: dict[str, KeptDuty] = {}

    def report(self, device_id: str, kept: KeptDuty | None) -> bool:
        """Record a device's figures, None if it has no duty, and return whether it had none before."""
        if kept is None:
            self._by_device.pop(device_id, None)
            return False
        is_new = device_id not in self._by_device
        self._by_device[device_id] = kept
        return is_new

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
