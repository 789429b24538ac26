"""The order of a list of devices, and texts about the state and progress of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from coordinator.display.wording import age
from wattfleet_proto.hot_boards import COOL_C, HOT_C
from wattfleet_proto.plan_ids import is_to_measure

if TYPE_CHECKING:
    from coordinator.display.run_words import RunNames
    from coordinator.display.view_values import Values

STATES = ("offline", "degraded", "profiling", "enrolled", "training", "ready")
"""The states of devices, the worst first."""


TROUBLES = ("hot", "throttled", "over budget", "off prediction")
"""What can be wrong with a device that takes part in rounds."""

THROTTLED_WITHIN_S = 600.0
"""Seconds for which a board counts as throttled after throttling itself, as in the alert `WattfleetThrottling`."""

TIME_OFF, POWER_OFF = 0.25, 0.15
"""Relative errors of a prediction from which a device is off prediction, as in the alert `WattfleetPredictionDrift`."""


def troubles(device: Values, now_unix_s: float) -> list[str]:
    """Which of `TROUBLES` a device has.

    It is over budget if its last observed training drew more watts than the plan allowed, until that training's run
    ends. It is off prediction if the same training was far from what was predicted.
    """
    sample, errors = device["sample"], device["prediction_errors"]
    return found_troubles(
        None if sample is None else sample["temperature_c"],
        device["throttled_unix_s"],
        device["is_observed_run_live"] and exceeded_allowed_watts(device),
        device["is_observed_run_live"]
        and errors is not None
        and is_off_prediction(errors["last_time_ratio"], errors["last_power_ratio"]),
        now_unix_s,
    )


def found_troubles(
    celsius: float | None,
    throttled_unix_s: float | None,
    is_over_budget: bool,
    is_off_prediction: bool,
    now_unix_s: float,
    was_hot: bool = False,
) -> list[str]:
    """Which of `TROUBLES` a device has.

    Args:
        celsius: temperature of the hottest part of its chip; None if it is unknown.
        throttled_unix_s: when its board last throttled itself, seconds since 1970; None if it did not.
        is_over_budget: its last training drew too many watts, and its run goes on.
        is_off_prediction: its last training was far from its prediction, and its run goes on.
        now_unix_s: the time now, seconds since 1970.
        was_hot: it was hot before, so it still is until it has cooled down.
    """
    has = {
        "hot": celsius is not None and celsius >= (COOL_C if was_hot else HOT_C),
        "throttled": throttled_unix_s is not None and now_unix_s - throttled_unix_s < THROTTLED_WITHIN_S,
        "over budget": is_over_budget,
        "off prediction": is_off_prediction,
    }
    return [name for name in TROUBLES if has[name]]


def is_off_prediction(time_ratio: float | None, power_ratio: float) -> bool:
    """Whether a training was far from its prediction, given observed by predicted values."""
    return (time_ratio is not None and abs(time_ratio - 1) > TIME_OFF) or abs(power_ratio - 1) > POWER_OFF


def error_text(time_ratio: float | None, power_ratio: float) -> str:
    """How far a training was from its prediction: "took 58% more time, and drew 3% fewer watts than predicted"."""
    seconds = "" if time_ratio is None else f"took {_more_or_less(time_ratio, 'less')} time, and "
    return f"{seconds}drew {_more_or_less(power_ratio, 'fewer')} watts than predicted"


def _more_or_less(ratio: float, less: str) -> str:
    return f"{abs(ratio - 1):.0%} {'more' if ratio >= 1 else less}"


def prediction_errors(device: Values) -> str:
    """How far a device's latest trainings were from its predictions."""
    errors = device["prediction_errors"]
    if errors is None:
        return "unknown: no training could be compared with its prediction yet"
    last = error_text(errors["last_time_ratio"], errors["last_power_ratio"])
    if errors["trainings"] == 1:
        return f"its last training {last}"
    seconds = "" if errors["least_time_ratio"] is None else f" in time {_span(errors, 'time')},"
    return f"its last training {last}; its last {errors['trainings']}:{seconds} in watts {_span(errors, 'power')}"


def _span(errors: Values, what: str) -> str:
    least, most = (f"{errors[f'{end}_{what}_ratio'] - 1:+.0%}" for end in ("least", "most"))
    return least if least == most else f"{least} to {most}"


def trust(device: Values) -> str:
    """How many of a device's recent predictions were not contradicted, and what would contradict one."""
    if device["trust"] is None:
        return "unknown: no observed round yet"
    from wattfleet.planning import POWER_FACTOR, TIME_FACTOR

    return (
        f"{device['trust']:.0%} of recent predictions not contradicted (a contradiction is a factor of {TIME_FACTOR:g}"
        f" in time, or {POWER_FACTOR:g} times the watts set aside)"
    )


def granted(device: Values, runs: RunNames) -> str:
    """What a device may draw beyond its idle power, and for which round."""
    if device["granted_w"] is None:
        is_learning = device["state"] == "training"
        return "nothing any more: its training is over, and it learns from it" if is_learning else _NOTHING_GRANTED
    round_ = runs.round_of(device["granted_plan_id"]) if device["granted_plan_id"] else "no round"
    is_confirmed = device["confirmed_w"] is not None
    if not device["granted_w"]:
        stopped = round_ if is_to_measure(device["granted_plan_id"] or "") else f"training of {round_}"
        return f"nothing any more: {'it stops' if is_confirmed else 'it was told to stop'} its {stopped}"
    return f"{device['granted_w']:,.1f} W for {round_}, {'confirmed' if is_confirmed else 'not confirmed yet'}"


_NOTHING_GRANTED = "nothing beyond idle power"


def exceeded_allowed_watts(device: Values) -> bool:
    """Whether a device's last observed training drew more watts than the plan allowed, in any run."""
    limit_w = device["observed_limit_w"]
    return limit_w is not None and device["observed_w"] > limit_w


def last_training(device: Values, runs: RunNames) -> str:
    """The watts of a device's last observed training, what the plan allowed, and the round."""
    if device["observed_w"] is None:
        return "no training yet"
    allowed = "" if device["observed_limit_w"] is None else f" of {device['observed_limit_w']:,.1f} W allowed"
    run_id, goes_on = device["observed_run_id"], device["is_observed_run_live"]
    where = f", in round {device['observed_round']} of run {runs.of(run_id)}" if run_id else ""
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
