"""The order of a list of devices, and texts about the state and progress of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from coordinator.display.wording import age
from wattfleet_proto.hot_boards import HOT_C

if TYPE_CHECKING:
    from coordinator.display.view_values import Values

STATES = ("offline", "degraded", "profiling", "enrolled", "training", "ready")
"""The states of devices, the worst first."""


TROUBLES = ("hot", "throttled", "over budget")
"""What can be wrong with a device that takes part in rounds."""

THROTTLED_WITHIN_S = 600.0
"""Seconds for which a board counts as throttled after throttling itself, as in the alert `WattfleetThrottling`."""


def troubles(device: Values, now_unix_s: float) -> list[str]:
    """Which of `TROUBLES` a device has.

    It is over budget if its last observed training drew more watts than the plan allowed, until that training's run
    ends.
    """
    sample, throttled_unix_s = device["sample"], device["throttled_unix_s"]
    celsius = None if sample is None else sample["temperature_c"]
    has = {
        "hot": celsius is not None and celsius >= HOT_C,
        "throttled": throttled_unix_s is not None and now_unix_s - throttled_unix_s < THROTTLED_WITHIN_S,
        "over budget": device["is_observed_run_live"] and exceeded_allowed_watts(device),
    }
    return [name for name in TROUBLES if has[name]]


def exceeded_allowed_watts(device: Values) -> bool:
    """Whether a device's last observed training drew more watts than the plan allowed, in any run."""
    limit_w = device["observed_limit_w"]
    return limit_w is not None and device["observed_w"] > limit_w


def last_training(device: Values) -> str:
    """The watts of a device's last observed training, what the plan allowed, and the round."""
    if device["observed_w"] is None:
        return "no training yet"
    allowed = "" if device["observed_limit_w"] is None else f" of {device['observed_limit_w']:,.1f} W allowed"
    run_id, goes_on = device["observed_run_id"], device["is_observed_run_live"]
    where = f", in round {device['observed_round']} of run {run_id}" if run_id else ""
    return f"{device['observed_w']:,.1f} W{allowed}{where}" + (", which has ended" if run_id and not goes_on else "")


def worst_first(devices: Iterable[Values], now_unix_s: float) -> list[Values]:
    """Sort devices by how urgently they need attention.

    First those that are offline, left out because of their reports, degraded, or have `troubles`; then by state in the
    order of `STATES`. Within each, drained devices come first, and then the slower ones.
    """

    def rank(each: Values) -> tuple[int, int]:
        state = STATES.index(each["state"])
        if state == 0:
            return 0, 0
        if each["left_out"] is not None:
            return 1, 0
        if state == 1:
            return 2, 0
        found = troubles(each, now_unix_s)
        return (3, -len(found)) if found else (2 + state, 0)

    return sorted(
        devices,
        key=lambda each: (
            rank(each),
            not each["drained"],
            -(each["fastest_epoch_s"] or 0.0),
            each["device_id"],
        ),
    )


def front_assumption() -> str:
    """What the seconds of a front mean while no app has reported the length of the device's epochs."""
    from wattfleet.modes import ASSUMED_MINIBATCHES_PER_EPOCH

    return (
        f"The seconds assume {ASSUMED_MINIBATCHES_PER_EPOCH} minibatches in an epoch, as no app has reported the"
        " device's own number."
    )


def in_state_for(content: Values, now_unix_s: float) -> str:
    """The time that a device has been in its state; since its last report if offline when the coordinator started."""
    since = content["state_since_unix_s"]
    if since is None and content["state"] == "offline":
        since = content["last_seen_unix_s"]
    return "-" if since is None else age(now_unix_s - since)


def live_line(sample: Values | None) -> str:
    """The latest readings of a board's sensors, in one line."""
    if sample is None:
        return "unknown: it is offline, or its agent is too old to report it"
    from wattfleet.modes import PowerMode

    parts: tuple[tuple[str, Callable[[Any], str]], ...] = (
        ("power_w", lambda value: f"{value:.1f} W"),
        ("temperature_c", lambda value: f"{value:.0f} °C"),
        ("mode", lambda value: PowerMode(**value).label()),
        ("fan_share", lambda value: f"fan {value:.0%}"),
        ("gpu_use_share", lambda value: f"GPU {value:.0%} used"),
    )
    return ", ".join(text(sample[name]) for name, text in parts if sample[name] is not None) or "no sensor answers"


def profiling_left(content: Values) -> str:
    """Return the longest time that profiling is expected to take still, or "overdue" once it has passed."""
    left_s = content["profiling_left_s"]
    return "-" if left_s is None else "overdue" if left_s == 0 else f"≤ {age(left_s)}"


def measured_modes(content: Values) -> str:
    """The number of measured modes; while the device is profiling, also the number to measure."""
    of = f" of {content['target_modes']:,}" if content["state"] == "profiling" and content["target_modes"] else ""
    return f"{content['profiled_modes']:,}{of}"
