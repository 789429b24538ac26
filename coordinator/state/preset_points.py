"""The devices' predictions for the presets of their boards, as reported in their sessions."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from wattfleet_proto.preset_point import PresetPoint


class PresetPoints:
    """The presets of every connected device, by workload. They are not stored: each session reports them again."""

    def __init__(self) -> None:
        """Start without any preset."""
        self._by_device: dict[str, dict[str, tuple[PresetPoint, ...]]] = {}

    def report(
        self, device_id: str, workload: str, presets: tuple[PresetPoint, ...], workloads: Collection[str]
    ) -> None:
        """Record a device's presets for a workload, and drop those of workloads for which it no longer has a front.

        Args:
            device_id: the device.
            workload: name of the workload.
            presets: for this workload.
            workloads: names of the workloads for which the device has fronts.
        """
        before = self._by_device.get(device_id, {})
        kept = {name: each for name, each in before.items() if name in workloads}
        self._by_device[device_id] = {**kept, workload: presets}

    def of(self, device_id: str, workload: str) -> tuple[PresetPoint, ...]:
        """A device's presets for a workload; none while it is disconnected, and from agents before protocol 2.7."""
        return self._by_device.get(device_id, {}).get(workload, ())

    def forget(self, device_ids: Iterable[str]) -> None:
        """Remove the presets of devices."""
        for device_id in device_ids:
            self._by_device.pop(device_id, None)
