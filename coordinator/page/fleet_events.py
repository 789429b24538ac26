"""Events in the fleet since the coordinator started, found by comparing snapshots."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from coordinator.display.device_words import troubles
from coordinator.display.view_values import Values
from coordinator.page.links import device_link, run_link

_KEPT_EVENTS = 1_000
_FINE = ("profiling", "enrolled", "training", "ready")


@dataclass(frozen=True)
class FleetEvent:
    """One event.

    Attributes:
        at_unix_s: when it was seen, up to a few seconds after it happened; seconds since 1970.
        subject: a device's or run's id.
        path: the subject's page.
        text: what happened.
        is_bad: whether it needs attention.
    """

    at_unix_s: float
    subject: str
    path: str
    text: str
    is_bad: bool


@dataclass
class EventLog:
    """The newest events.

    Attributes:
        events: the events, newest first.
    """

    events: deque[FleetEvent] = field(default_factory=lambda: deque(maxlen=_KEPT_EVENTS))
    _states: dict[str, str] | None = None
    _runs: dict[str, bool] = field(default_factory=dict)

    def compare(self, at_unix_s: float, devices: Sequence[Values], runs: Sequence[Values]) -> None:
        """Record what differs from the previous call; the first call records nothing.

        Args:
            at_unix_s: the time.
            devices: the values of all devices.
            runs: the values of all runs.
        """
        states = {each["device_id"]: _state_of(each, at_unix_s) for each in devices}
        ended = {each["run_id"]: bool(each["finished"]) for each in runs}
        if self._states is not None:
            for device in devices:
                device_id = device["device_id"]
                before, now = self._states.get(device_id), states[device_id]
                if before != now:
                    text = f"{now}, before: {before}" if before else f"enrolled: {now}"
                    is_bad = now not in _FINE
                    self._note(at_unix_s, device_id, device_link(device_id), text, is_bad)
            for run in runs:
                run_id = run["run_id"]
                if run_id not in self._runs:
                    self._note(at_unix_s, run_id, run_link(run_id), f"began with {run['strategy']}", False)
                if ended[run_id] and not self._runs.get(run_id):
                    why = f"failed: {run['error']}" if run["state"] == "failed" else run["error"] or "finished"
                    self._note(at_unix_s, run_id, run_link(run_id), why, run["state"] == "failed")
        self._states, self._runs = states, ended

    def _note(self, at_unix_s: float, subject: str, path: str, text: str, is_bad: bool) -> None:
        self.events.appendleft(FleetEvent(at_unix_s, subject, path, text, is_bad))


def _state_of(device: Values, now_unix_s: float) -> str:
    words = [str(device["state"]), *troubles(device, now_unix_s)]
    return ", ".join([*words, f"left out: {device['left_out']}"] if device["left_out"] else words)
