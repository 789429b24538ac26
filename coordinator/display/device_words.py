"""How a list of devices is ordered, and words for how far each is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from coordinator.display.wording import age

if TYPE_CHECKING:
    from coordinator.display.view_values import Values

STATES = ("offline", "degraded", "profiling", "enrolled", "training", "ready")
"""The states of devices, the worst first."""


def worst_first(devices: Iterable[Values]) -> list[Values]:
    """Devices in the order in which somebody has to look at them.

    First those that are offline, then those left out because of their reports, then by state in the order of `STATES`.
    Within a state, drained devices come first, and then the slower ones.
    """

    def rank(each: Values) -> int:
        if each["state"] == STATES[0]:
            return 0
        return 1 if each["left_out"] is not None else 1 + STATES.index(each["state"])

    return sorted(
        devices,
        key=lambda each: (
            rank(each),
            not each["drained"],
            -(each["fastest_epoch_s"] or 0.0),
            each["device_id"],
        ),
    )


def in_state_for(content: Values, now_unix_s: float) -> str:
    """How long a device has been in its state; since its last report if it was offline when the coordinator began."""
    since = content["state_since_unix_s"]
    if since is None and content["state"] == "offline":
        since = content["last_seen_unix_s"]
    return "-" if since is None else age(now_unix_s - since)


def profiling_left(content: Values) -> str:
    """About how long profiling still takes at most."""
    return "-" if content["profiling_left_s"] is None else f"≤ {age(content['profiling_left_s'])}"


def measured_modes(content: Values) -> str:
    """The measured modes; while the device profiles, of how many."""
    of = f" of {content['target_modes']:,}" if content["state"] == "profiling" and content["target_modes"] else ""
    return f"{content['profiled_modes']:,}{of}"
