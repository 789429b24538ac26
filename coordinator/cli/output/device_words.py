"""How a list of devices is ordered, and words for how far each is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from coordinator.display.wording import age


def worst_first(devices: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Devices in the order in which somebody has to look at them: offline, degraded or left out, then all others."""

    def rank(each: dict[str, Any]) -> int:
        if each["state"] == "offline":
            return 0
        return 1 if each["state"] == "degraded" or each["left_out"] else 2

    return sorted(devices, key=lambda each: (rank(each), each["device_id"]))


def in_state_for(content: dict[str, Any], now_unix_s: float) -> str:
    """How long a device has been in its state; since its last report if it was offline when the coordinator began."""
    since = content["state_since_unix_s"]
    if since is None and content["state"] == "offline":
        since = content["last_seen_unix_s"]
    return "-" if since is None else age(now_unix_s - since)


def profiling_left(content: dict[str, Any]) -> str:
    """About how long profiling still takes at most."""
    return "-" if content["profiling_left_s"] is None else f"≤ {age(content['profiling_left_s'])}"


def measured_modes(content: dict[str, Any]) -> str:
    """The measured modes; while the device profiles, of how many."""
    of = f" of {content['target_modes']:,}" if content["state"] == "profiling" and content["target_modes"] else ""
    return f"{content['profiled_modes']:,}{of}"
