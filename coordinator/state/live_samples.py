"""The latest sensor readings of the boards, as reported in their sessions."""

from __future__ import annotations

from collections.abc import Iterable

from wattfleet_proto.board_sample import BoardSample


class LiveSamples:
    """The latest sample of every connected device. Samples are not stored, because each lease brings a new one."""

    def __init__(self) -> None:
        """Start without any sample."""
        self._by_device: dict[str, BoardSample] = {}

    def report(self, device_id: str, sample: BoardSample) -> bool:
        """Replace a device's sample, and return whether the board has started to throttle itself since the last one."""
        before = self._by_device.get(device_id)
        self._by_device[device_id] = sample
        if before is None or before.throttle_events is None or sample.throttle_events is None:
            return False
        return sample.throttle_events > before.throttle_events

    def of(self, device_id: str) -> BoardSample | None:
        """A device's latest sample; None while it is disconnected, and from agents before protocol 2.7."""
        return self._by_device.get(device_id)

    def forget(self, device_ids: Iterable[str]) -> None:
        """Remove the samples of devices."""
        for device_id in device_ids:
            self._by_device.pop(device_id, None)
