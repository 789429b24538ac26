"""The words in which the page and the commands tell the state of devices, runs, supplies and events."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from datetime import datetime, timezone
from typing import Any, NamedTuple

from wattfleet.common.console import duration_text, energy_text
from wattfleet_proto.device_state import READINGS, BoardSample
from wattfleet_proto.names import COOL_C, HOT_C, is_to_measure, plan_in_words

Values = dict[str, Any]
"""Fields of a message by name, as `coordinator.display.values` makes them."""


# --- Wording ----------------------------------------------------------------------------------------------------------
# Formats numbers, watts and times for people.


def number(value: float | None, digits: int = 1) -> str:
    """Format a number for a table; a dash if it is unknown."""
    return "-" if value is None else f"{value:,.{digits}f}"


ASSUMED_NOTE = "~: with an assumed number of minibatches in an epoch, as no app has reported the device's own"
"""Explains the mark of `expected_time` below a table."""


def expected_time(seconds: float | None, is_length_assumed: bool) -> str:
    """Format a predicted time, marked if it assumes the length of an epoch."""
    return f"{'~' if is_length_assumed and seconds is not None else ''}{duration_text(seconds)}"


def watts(value: float) -> str:
    """Format watts for a sentence, such as "40 W" or "5.5 W"."""
    return f"{value:,.1f}".removesuffix(".0") + " W"


def moment(when: datetime) -> str:
    """Format a local time, with the date unless it is today."""
    local, now = when.astimezone(), datetime.now().astimezone()
    if local.date() == now.date():
        return local.strftime("%H:%M:%S")
    return local.strftime("%b %d %H:%M" if abs((local - now).days) < 300 else "%Y-%m-%d")


def moment_of(unix_s: float | None) -> str:
    """Format seconds since 1970 as `moment` does; a dash if they are unknown."""
    return "-" if unix_s is None else moment(datetime.fromtimestamp(unix_s, timezone.utc))


def date_and_time(time: str) -> str:
    """Format a time, given in ISO 8601, with its date and its seconds in the local time zone."""
    return datetime.fromisoformat(time).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def age(seconds: float) -> str:
    """Format a rough duration: "45 s", "12 min", "3 h" or "2 days"."""
    if seconds < 100:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 48 * 3600 else f"{seconds / 86400:,.0f} days"


# --- Event words ------------------------------------------------------------------------------------------------------
# What events are about, in words.

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


# --- Run words --------------------------------------------------------------------------------------------------------
# What runs are called, and texts about their labels and their rounds.


class RunNames:
    """The names of known runs by id."""

    def __init__(self, runs: Iterable[Values]) -> None:
        """Collect the names.

        Args:
            runs: values of runs, as from `run_values`.
        """
        self._names = {each["run_id"]: each["name"] for each in runs}

    def of(self, run_id: str) -> str:
        """A run's name; its id if the run is unknown, for example because it was deleted."""
        name: str = self._names.get(run_id, run_id)
        return name

    def round_of(self, plan_id: str) -> str:
        """The round of a plan, such as "round 3 of run digits-0714-1532", or a run's measurements."""
        return plan_in_words(plan_id, self.of(plan_id.rpartition("/")[0]))


def run_title(run: Values) -> str:
    """A run's name, with its id if that differs."""
    return run["name"] if run["name"] == run["run_id"] else f"{run['name']} ({run['run_id']})"


def labels_text(labels: Mapping[str, str]) -> str:
    """A run's labels in one line, such as "lr=0.1 site=lab"; empty without any."""
    return " ".join(f"{key}={value}" for key, value in sorted(labels.items()))


def has_labels(run: Values, wanted: Mapping[str, str]) -> bool:
    """Whether a run has all of the given labels."""
    return all(run["labels"].get(key) == value for key, value in wanted.items())


# --- Supply words -----------------------------------------------------------------------------------------------------
# The order of supplies in a list, and texts about their budgets.

_ROUNDING = 1 + 1e-9


def as_tree(budgets: Iterable[Values]) -> list[Values]:
    """Sort supplies so that each follows the one that feeds it, and add their `depth`; by name within each."""
    found = list(budgets)
    parents = {each["supply"]: each["parent"] for each in found}

    def path(supply: str) -> tuple[str, ...]:
        parent = parents.get(supply)
        return (*(() if parent is None else path(parent)), supply)

    ordered = sorted(found, key=lambda each: path(each["supply"]))
    return [{**each, "depth": len(path(each["supply"])) - 1} for each in ordered]


def behind(supply: str, budgets: Iterable[Values]) -> set[str]:
    """A supply and all supplies that it feeds, directly or not."""
    tree = as_tree(budgets)
    found = {supply}
    for each in tree:  # each follows the one that feeds it
        if each["parent"] in found:
            found.add(each["supply"])
    return found


def source_word(budget: Values) -> str:
    """Where the watts in force come from, in one word."""
    return "fallback" if budget["fallback"] else str(budget["source"])


def source_detail(budget: Values) -> str:
    """More about where the watts in force come from; empty for a source that says everything."""
    says_all = not budget["fallback"] and budget["source"] in ("constant", "operator", "query")
    return "" if says_all else str(budget["reason"])


def energy_budget(budget: Values) -> str:
    """What is left of a supply's energy budget, such as "3.2 kJ left of 5.0 kJ per day (UTC)"."""
    left_j = budget["energy_budget_j"] - budget["energy_spent_j"] - budget["energy_set_aside_j"]
    return (
        f"{energy_text(max(0.0, left_j))} left of {energy_text(budget['energy_budget_j'])} per"
        f" {budget['energy_per']} ({budget['energy_timezone']}): {energy_text(budget['energy_spent_j'])} spent,"
        f" {energy_text(budget['energy_set_aside_j'])} set aside"
    )


def is_exceeded(budget: Values) -> bool:
    """Whether more watts are set aside than the budget allows."""
    return bool(budget["set_aside_w"] > budget["watts"] * _ROUNDING)


def why_in_force(budget: Values) -> str | None:
    """Why a fallback or an override is in force; None for the watts of the configured source."""
    if budget["fallback"]:
        return f"fallback of its {budget['source']} in force: {budget['reason']}"
    return str(budget["reason"]) if budget["source"] == "operator" else None


# --- Device words -----------------------------------------------------------------------------------------------------
# The order of a list of devices, and texts about the state and progress of each.

STATES = ("offline", "degraded", "profiling", "enrolled", "training", "ready")
"""The states of devices, the worst first."""


EXCLUSIONS = ("left out", "drained")
"""Why a device that could train is in no round."""

TROUBLES = (
    *("hot", "throttled", "over budget", "off prediction"),
    *(each.flag for each in READINGS.values() if each.flag and each.is_trouble),
)
"""What can be wrong with a device that takes part in rounds."""

NOTES = tuple(each.flag for each in READINGS.values() if each.flag and not each.is_trouble)
"""What is shown beside a device's state although nothing is wrong."""

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
        [] if sample is None else sample_flags(sample.get),
        device["throttled_unix_s"],
        device["is_observed_run_live"] and exceeded_allowed_watts(device),
        device["is_observed_run_live"]
        and errors is not None
        and is_off_prediction(errors["last_time_ratio"], errors["last_power_ratio"]),
        now_unix_s,
    )


class Flag(NamedTuple):
    """What is shown beside a device's state.

    Attributes:
        word: one of `EXCLUSIONS`, `TROUBLES` and `NOTES`.
        is_bad: somebody should look at the device.
    """

    word: str
    is_bad: bool


def flags(device: Values, now_unix_s: float) -> list[Flag]:
    """What is shown beside a device's state, such as "drained" or one of its troubles."""
    sample = device["sample"]
    return [
        *([Flag("drained", False)] if device["drained"] else []),
        *([Flag("left out", True)] if device["left_out"] is not None else []),
        *(Flag(name, True) for name in troubles(device, now_unix_s)),
        *(Flag(name, False) for name in ([] if sample is None else sample_flags(sample.get)) if name in NOTES),
    ]


def sample_flags(value_of: Callable[[str], Any]) -> list[str]:
    """The flags of a board's sample, given what returns the value of a reading by its name."""
    return [reading.flag for name, reading in READINGS.items() if reading.flag and value_of(name)]


def found_troubles(
    celsius: float | None,
    sensed: Collection[str],
    throttled_unix_s: float | None,
    is_over_budget: bool,
    is_off_prediction: bool,
    now_unix_s: float,
    was_hot: bool = False,
) -> list[str]:
    """Which of `TROUBLES` a device has.

    Args:
        celsius: temperature of the hottest part of its chip; None if it is unknown.
        sensed: the flags of its board's sample, as from `sample_flags`.
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
    return [name for name in TROUBLES if has.get(name, name in sensed)]


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
    from wattfleet.core.planning import POWER_FACTOR, TIME_FACTOR

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


def device_facts(device: Values, runs: RunNames) -> dict[str, str]:
    """What the command `device` and a device's page say in the same words, by what it is about."""
    limit_w, idle_w = device["limit_w"], device["idle_w"]
    left_out = "can be selected" if device["left_out"] is None else f"left out: {device['left_out']}"
    return {
        "rounds": "drained: excluded from new rounds" if device["drained"] else left_out,
        "trust": trust(device),
        "predictions": prediction_errors(device),
        "now": live_line(device["sample"]),
        "supply": device["supply"] or "none: the site file attaches the device to no supply, or to several",
        "own limit": "none" if limit_w is None else watts(limit_w),
        "granted": granted(device, runs),
        "observed": last_training(device, runs),
        "idle": "not measured yet" if idle_w is None else f"{idle_w:.1f} W",
    }


def front_assumption() -> str:
    """What the seconds of a front mean while no app has reported the length of the device's epochs."""
    from wattfleet.core.modes import ASSUMED_MINIBATCHES_PER_EPOCH

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
        return "unknown: it is offline, or has sent none yet"
    from wattfleet.core.modes import PowerMode

    parts = []
    for each in fields(BoardSample):
        value, reading = sample.get(each.name), READINGS.get(each.name)
        if value is None:
            continue
        if reading is None:  # the mode
            parts.append(PowerMode(**value).label())
        elif reading.flag:
            parts += [reading.flag] if value else []
        elif reading.words:
            parts.append(reading.words.format(value))
    return ", ".join(parts) or "no sensor answers"


def profiling_left(content: Values) -> str:
    """Return the longest time that profiling is expected to take still, or "overdue" once it has passed."""
    left_s = content["profiling_left_s"]
    return "-" if left_s is None else "overdue" if left_s == 0 else f"≤ {age(left_s)}"


def measured_modes(content: Values) -> str:
    """The number of measured modes; while the device is profiling, also the number to measure."""
    of = f" of {content['target_modes']:,}" if content["state"] == "profiling" and content["target_modes"] else ""
    return f"{content['profiled_modes']:,}{of}"
