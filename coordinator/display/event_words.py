"""What events are about, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coordinator.display.run_words import RunNames
    from coordinator.display.view_values import Values

EVENT_KINDS = ("device", "run", "round", "budget", "coordinator")
"""What an event may be about."""


def subject(event: Values, runs: RunNames) -> str:
    """What an event is about, such as a device, a round or a supply."""
    if event["kind"] == "device":
        return str(event["device_id"])
    if event["kind"] == "run":
        return runs.of(event["run_id"])
    if event["kind"] == "round":
        return f"round {event['round']} of {runs.of(event['run_id'])}"
    return str(event["supply"]) if event["kind"] == "budget" else str(event["kind"])
