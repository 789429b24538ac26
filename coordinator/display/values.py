"""Messages of the view service as plain values by name, for tables and JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import numpy as np

from coordinator.display.words import RunNames, Values
from wattfleet.common.console import count_of, energy_text
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.planning import (
    Assignment,
    Decision,
    Interval,
    RoundPlan,
    Target,
    Tariff,
    rounds_to,
    still_needed,
)
from wattfleet_proto.convert import (
    front_from_message,
    plan_from_message,
    presets_from_messages,
    state_from_message,
    values_of,
    workload_from_message,
)
from wattfleet_proto.names import is_stopped
from wattfleet_proto.v1 import operator_pb2, planning_pb2, power_pb2, session_pb2, view_pb2

HEAVY_FIELDS = ("front", "workloads", "presets")
"""Fields of a device's message with values of their own: `front_values`, `device_workload_values`, `preset_values`."""


def known(message: Any, name: str) -> Any:
    """Get a field of a message; None if it is not set."""
    return getattr(message, name) if message.HasField(name) else None


def state_word(state: session_pb2.DeviceState.ValueType) -> str:
    """A device's state in one word."""
    return state_from_message(state).value


def device_values(view: view_pb2.DeviceView) -> Values:
    """A device's values, without its front."""
    return values_of(view, leave_out=HEAVY_FIELDS)


def node_values(view: view_pb2.NodeView) -> Values:
    """A Flower node's values."""
    return values_of(view)


def tagged_device_values(view: view_pb2.DeviceView) -> Values:
    """A device's values with all its tags, those of the site file and those of commands, in order."""
    values = device_values(view)
    return {**values, "tags": sorted({*values["site_tags"], *values["operator_tags"]})}


def front_values(view: view_pb2.DeviceView) -> list[Values] | None:
    """The modes of a device's front; None without a front."""
    if not view.HasField("front"):
        return None
    front = front_from_message(view.front)
    return [
        {
            "mode": front.mode(k)._asdict(),
            "batch": None if front.batch is None else int(front.batch[k]),
            "warmup_s": float(front.warmup_s[k]),
            "epoch_s": float(front.epoch_s[k]),
            "power_w": float(front.power_w[k]),
            "planned_w": float(front.planned_w[k]),
        }
        for k in range(len(front))
    ]


def preset_values(view: view_pb2.DeviceView) -> list[Values]:
    """The presets of a device's board with their predictions, as in `front_values`, and whether they were measured."""
    return [
        {
            "preset": each.name,
            "mode": each.front.mode(0)._asdict(),
            "warmup_s": float(each.front.warmup_s[0]),
            "epoch_s": float(each.front.epoch_s[0]),
            "power_w": float(each.front.power_w[0]),
            "planned_w": float(each.front.planned_w[0]),
            "is_measured": each.is_measured,
        }
        for each in presets_from_messages(view.presets)
    ]


def workload_values(message: power_pb2.Workload) -> Values:
    """A workload's name and its known facts."""
    workload = workload_from_message(message)
    facts = workload.facts
    return {
        "workload": workload.name,
        "task": facts.task.value,
        "batch": facts.batch,
        "loader_workers": facts.loader_workers,
        "processor": facts.processor.value,
        "parameters": facts.parameters,
        "step_flops": facts.step_flops,
        "precision": facts.precision,
    }


def device_workload_values(message: view_pb2.DeviceWorkload) -> Values:
    """The values of a workload on a device."""
    return {
        **values_of(message, leave_out=("workload", "front")),
        "workload": message.workload.name,
        "batch": known(message.workload, "batch"),
        "epoch_length_assumed": not message.HasField("minibatches_per_epoch"),
    }


def known_workload_values(view: view_pb2.WorkloadView) -> Values:
    """A workload's values, with its devices and runs."""
    return {**workload_values(view.workload), **values_of(view, leave_out=("workload",))}


def budget_values(budget: operator_pb2.SupplyBudget) -> Values:
    """The budget in force at a supply, what is set aside and drawn there, and since when."""
    until, energy_until = known(budget, "until_unix_s"), known(budget, "energy_until_unix_s")
    return {
        **values_of(budget, leave_out=("since_unix_s", "until_unix_s", "energy_until_unix_s")),
        "since": time_text(budget.since_unix_s),
        "until": None if until is None else time_text(until),
        "energy_until": None if energy_until is None else time_text(energy_until),
    }


def battery_values(battery: operator_pb2.Battery) -> Values:
    """A battery's estimated energy, what it leaves for trainings, and its newest reading."""
    measured = known(battery, "measured_unix_s")
    return {
        **values_of(battery, leave_out=("measured_unix_s",)),
        "measured": None if measured is None else time_text(measured),
        "share": battery.energy_j / battery.capacity_j,
    }


def event_values(event: view_pb2.FleetEvent) -> Values:
    """An event's values."""
    return {"at": time_text(event.at_unix_s), **values_of(event, leave_out=("event_id", "at_unix_s"))}


def time_text(unix_s: float) -> str:
    """Seconds since 1970 as a date and time in UTC, ISO 8601."""
    return datetime.fromtimestamp(unix_s, timezone.utc).isoformat(timespec="seconds")


def run_values(view: view_pb2.RunView) -> Values:
    """A run's values, without its rounds."""
    return {
        **values_of(view),
        "name": view.name or view.run_id,
        "workload": view.workload.name or None,
        "state": _run_state(view),
    }


def _run_state(view: view_pb2.RunView) -> str:
    if view.error:
        return "stopped" if is_stopped(view.error) else "failed"
    return "finished" if view.finished else "running"


_WITH_DEVICES = ("run_id", "plan", "observations", "results")


def round_values(view: view_pb2.RoundView) -> Values:
    """A round's totals, as first planned and as trimmed; a round without a plan has no planned totals."""
    return values_of(view, leave_out=_WITH_DEVICES)


# --- Plan values ------------------------------------------------------------------------------------------------------
# A previewed plan as plain values by name: the totals, and each device's part with the reason of its decision.


def assumption(plan: Values, runs: RunNames) -> str | None:
    """Which rounds in flight a previewed plan assumes to have ended; None for none."""
    rounds = [runs.round_of(each) for each in plan["assumed_ended"]]
    if not rounds:
        return None
    are = "which are in flight, have" if len(rounds) > 1 else "which is in flight, has"
    return f"assuming that {' and '.join(rounds)}, {are} ended"


def preview_values(answer: operator_pb2.PreviewPlanResponse) -> Values:
    """A previewed round's values: its totals, and each device with its mode and the reason of its decision."""
    found = plan_from_message(answer.plan)
    parts = {assignment.device_id: assignment for assignment in found.assignments}
    return {
        "run_id": answer.run_id or None,
        "round": answer.round,
        "epochs": answer.epochs,
        "only_devices_with_a_node": not answer.all_devices,
        "duration_s": found.duration_s,
        "deadline_s": found.deadline_s,
        "planned_w": found.planned_w,
        "site_budget_w": found.site_budget_w,
        "supplies": [
            {"supply": use.supply, "budget_w": use.budget_w, "planned_w": use.planned_w} for use in found.supplies
        ],
        "devices": [_decision_values(decision, parts.get(decision.device_id)) for decision in found.decisions],
        "not_looked_at": [{"device_id": each.device_id, "reason": each.reason} for each in answer.not_looked_at],
        "assumed_ended": list(answer.assumed_ended),
    }


def _decision_values(decision: Decision, part: Assignment | None) -> Values:
    return {
        "device_id": decision.device_id,
        "selected": decision.selected,
        "reason": decision.reason,
        "mode": part.mode._asdict() if part else None,
        "batch": part.batch if part else None,
        "epochs": part.epochs if part else None,
        "warmup_s": part.warmup_s if part else None,
        "epoch_s": part.epoch_s if part else None,
        "length_assumed": part.is_length_assumed if part else None,
        "power_w": part.power_w if part else None,
        "power_limit_w": part.power_limit_w if part else None,
    }


# --- Forecast ---------------------------------------------------------------------------------------------------------
# What a run still needs, from its own rounds: to the rounds that it was asked for, or to the value of a metric.


def forecast_values(
    view: view_pb2.RunView,
    rounds: Iterable[view_pb2.RoundView],
    now_unix_s: float,
    target: Target | None = None,
    tariffs: Sequence[Tariff] = (),
) -> Values:
    """What a run still needs.

    Args:
        view: the run, with its times.
        rounds: its rounds with their times, without their devices.
        now_unix_s: the time, seconds since 1970.
        target: the value of a metric at which the run is done; None for the rounds that it was asked for.
        tariffs: what the energy of its trainings costs.

    Returns:
        Each quantity as its 5 % quantile, median and 95 % quantile; a quantile is None if the target may never be
        reached, and a quantity is None if it is unknown.

    Raises:
        InvalidInputError: the run has ended, too few of its rounds have, or it does not report the metric.
    """
    if view.finished or view.error:
        raise InvalidInputError(f"run {view.name} has ended: `wattfleet coordinator runs` shows what it needed")
    ended = [each for each in rounds if each.HasField("finished_unix_s")]
    if not ended:
        raise InvalidInputError(f"no round of run {view.name} has ended yet: ask again after the first one")
    ends_s = [each.finished_unix_s for each in ended]
    begins_s = [view.started_unix_s if view.HasField("started_unix_s") else ended[0].planned_unix_s, *ends_s]
    seconds = [end_s - begin_s for begin_s, end_s in zip(begins_s, ends_s, strict=False)]
    joules = [
        each.training_j * each.devices / each.observed_trainings
        for each in ended
        if each.HasField("training_j") and each.observed_trainings
    ]
    if target is None:
        further = np.full(1000, float(max(0, view.rounds_asked_for - ended[-1].round)))
    else:
        further = rounds_to(target, _metric_values(view, ended, target.name))
    from_s = datetime.fromtimestamp(ends_s[-1]).astimezone()
    from_hour = from_s.hour + from_s.minute / 60
    found = still_needed(further, seconds, joules, tariffs, from_hour)
    passed_s = now_unix_s - ends_s[-1]

    def quantiles(interval: Interval | None, change: Callable[[float], float] = float) -> list[float | None] | None:
        if interval is None:
            return None
        values = (interval.low, interval.median, interval.high)
        return [change(each) if math.isfinite(each) else None for each in values]

    return {
        "run_id": view.run_id,
        "name": view.name,
        "target": None if target is None else {"metric": target.name, "value": target.value, "falls": target.falls},
        "rounds_asked_for": view.rounds_asked_for,
        "rounds_done": ended[-1].round,
        "metric_now": None if target is None else _metric_values(view, ended, target.name)[-1],
        "reached_share": found.reached,
        "further_rounds": quantiles(found.rounds),
        "further_s": quantiles(found.seconds, lambda needed_s: max(0.0, needed_s - passed_s)),
        "done_unix_s": quantiles(found.seconds, lambda needed_s: max(now_unix_s, ends_s[-1] + needed_s)),
        "training_j": quantiles(found.energy_j),
        "costs": [
            {"unit": tariff.unit, "cost": quantiles(cost)}
            for tariff, cost in zip(tariffs, found.costs, strict=bool(found.costs))
        ],
    }


def _metric_values(view: view_pb2.RunView, ended: Sequence[view_pb2.RoundView], name: str) -> list[float]:
    """The values of a metric before the first round, if it is known, and after each round that reported it."""
    values = [each.metrics[name] for each in ended if name in each.metrics]
    if not values:
        known = sorted({name for each in ended for name in each.metrics})
        instead = f"name one of {', '.join(known)}" if known else "its strategy reports none (docs/flower.md)"
        raise InvalidInputError(f"run {view.name} has not reported {name!r}: {instead}")
    # Where nothing was evaluated before the first round, the first one is where the curve begins.
    return [view.initial_metrics[name], *values] if name in view.initial_metrics else values


# --- Run totals -------------------------------------------------------------------------------------------------------
# The totals of a run: its rounds, their time, failures and joules, and the rounds over their budget.


def run_totals(view: view_pb2.RunView, rounds: Iterable[view_pb2.RoundView]) -> Values:
    """A run's values with the totals of its rounds.

    Args:
        view: the run.
        rounds: its rounds, without their devices.
    """
    values = [round_values(each) for each in rounds]
    joules = [each["training_j"] for each in values if each["training_j"] is not None]
    return {
        **run_values(view),
        "rounds_done": sum(each["wall_s"] is not None for each in values),
        "wall_s": sum(each["wall_s"] or 0.0 for each in values),
        "failed_trainings": sum(len(each["failed"]) for each in values),
        "training_j": sum(joules) if joules else None,
        "observed_trainings": sum(each["observed_trainings"] for each in values),
        "trainings": sum(each["devices"] for each in values if not each["unplanned"]),
        "rounds_over_budget": sum(is_over_budget(each) for each in values),
    }


ENERGY_NOTE = "*: not all trainings were observed"
"""Explains the mark of `energy_words` below a table."""


def is_in_part(values: Values) -> bool:
    """Whether the energy of a run or a round, given as its values, covers only some of its trainings."""
    trainings: int = values["trainings"] if "trainings" in values else values["devices"]
    return values["training_j"] is not None and values["observed_trainings"] < trainings


def energy_words(values: Values) -> str:
    """The energy of a run or a round for a table, such as "12.5 kJ", or "9.8 kJ*" if it covers only some trainings."""
    return energy_text(values["training_j"]) + ("*" if is_in_part(values) else "")


def trainings_words(observed: int, trainings: int) -> str:
    """The trainings that an energy covers, such as "9 trainings", or "7 of 9 trainings" if not all were observed."""
    all_of_them = count_of(trainings, "training")
    return all_of_them if observed >= trainings else f"{observed:,} of {all_of_them}"


def is_over_budget(round_: Values) -> bool:
    """Whether a round, given as `round_values`, drew more watts than the budget in force at its end."""
    observed_w, trimmed_w = round_["observed_site_w"], round_["trimmed_site_budget_w"]
    budget_w = round_["site_budget_w"] if trimmed_w is None else trimmed_w
    return observed_w is not None and budget_w is not None and observed_w > budget_w


# --- Round details ----------------------------------------------------------------------------------------------------
# One round in full: each device with its mode, the reason for its selection, and its outcome.


@dataclass(frozen=True)
class RoundPart:
    """One device's part in a round.

    Attributes:
        first: its assignment as first planned.
        now: the assignment in force; None if a trim has stopped the device.
        node_id: its Flower node.
        reason: why it was selected.
        seen: the observation of its training; None if there is none.
        result: the app's report about it; None until the round is over, and for a device that was sent nothing.
    """

    first: Assignment
    now: Assignment | None
    node_id: int
    reason: str
    seen: view_pb2.DeviceObservation | None
    result: planning_pb2.DeviceResult | None

    @property
    def last(self) -> Assignment:
        """The assignment in force, or the one before the device was stopped."""
        return self.now or self.first

    @property
    def became(self) -> str | None:
        """How a trim changed the assignment: "stopped" or "other mode"; None if it did not."""
        if self.now is None:
            return "stopped"
        return "other mode" if self.now.mode != self.first.mode else None


def round_parts(view: view_pb2.RoundView, plan: RoundPlan) -> list[RoundPart]:
    """The selected devices of a round, as first planned.

    Args:
        view: the round.
        plan: its plan.
    """
    message = view.plan.first_planned if view.plan.HasField("first_planned") else view.plan
    nodes = {each.device_id: each.node_id for each in message.assignments}
    now = {each.device_id: each for each in plan.assignments}
    reasons = {each.device_id: each.reason for each in plan.decisions}
    seen = {each.device_id: each for each in view.observations}
    results = {each.device_id: each for each in view.results}
    return [
        RoundPart(
            first,
            now.get(first.device_id),
            nodes[first.device_id],
            reasons.get(first.device_id, ""),
            seen.get(first.device_id),
            results.get(first.device_id),
        )
        for first in plan.original.assignments
    ]


def round_details(view: view_pb2.RoundView) -> Values:
    """A round's totals with its devices.

    Returns:
        As `round_values`, and `selected`: a dictionary for each device that was to train, with the plan in force, and
        in `first` what was planned before, if it differs; `not_selected`: the id and the reason of each other device;
        `supplies`: watts of each supply.
    """
    plan = plan_from_message(view.plan)
    is_over = view.HasField("wall_s")
    without_plan = view.results if view.unplanned else ()
    return {
        "run_id": view.run_id,
        **round_values(view),
        "selected": [
            *(_selected(part, is_over) for part in round_parts(view, plan)),
            *(
                {"device_id": each.device_id, "reason": "trained without a plan", **_outcome(each, is_over)}
                for each in without_plan
            ),
        ],
        "not_selected": [
            {"device_id": each.device_id, "reason": each.reason} for each in plan.decisions if not each.selected
        ],
        "supplies": [
            {"supply": each.supply, "budget_w": each.budget_w, "planned_w": each.planned_w} for each in plan.supplies
        ],
    }


def slowest_first(selected: Iterable[Values]) -> list[Values]:
    """The selected devices of `round_details`, those that delay the round most first."""
    return sorted(selected, key=lambda each: -max(each["predicted_s"], each["observed_s"] or 0.0))


def _selected(part: RoundPart, is_over: bool) -> Values:
    planned, first = _planned(part.last), _planned(part.first)
    outcome = _outcome(part.result, is_over)
    if part.result is None and part.now is None:
        outcome["outcome"] = "stopped"
    return {
        "device_id": part.first.device_id,
        "node_id": part.node_id,
        "reason": part.reason,
        **planned,
        "became": part.became,
        "first": first if first != planned else None,
        **_observed(part),
        **outcome,
    }


def _planned(part: Assignment) -> Values:
    return {
        "mode": part.mode._asdict(),
        "batch": part.batch,
        "epochs": part.epochs,
        "planned_w": part.power_limit_w,
        "predicted_w": part.power_w,
        "predicted_s": part.training_s(part.epoch_s),
        "length_assumed": part.is_length_assumed,
    }


def _observed(part: RoundPart) -> Values:
    """The observed values of a training; as everywhere, its warm-up counts as predicted."""
    if part.seen is None:
        return {"observed_w": None, "observed_s": None, "training_j": None}
    seconds, watts = part.last.training_s(part.seen.epoch_s), part.seen.power_w
    return {"observed_w": watts, "observed_s": seconds, "training_j": watts * seconds}


def _outcome(result: planning_pb2.DeviceResult | None, is_over: bool) -> Values:
    """How a training ended: `outcome` as one word, and the reason of a failure."""
    if result is None:
        return {"outcome": "not sent" if is_over else "running", "failure": None, "share": None, "loss": None}
    word = "failed" if result.failure else "late" if result.late else "trained" if result.share >= 1 else "in part"
    return {
        "outcome": word,
        "failure": result.failure or None,
        "share": result.share,
        "loss": known(result, "loss"),
    }


# --- Energy by month --------------------------------------------------------------------------------------------------
# The joules of observed trainings by month, and by the supply, run or device that they belong to.

ENERGY_GROUPS = ("site", "run", "device")
"""What joules can be added up by, besides the month. A site is the supply that a device is directly behind."""

UNKNOWN = "unknown"
"""Stands for the site of a device that was forgotten, and for the month of a round whose time is not known."""

RunEnergy = Mapping[tuple[str, str], tuple[float, int, int]]
"""Of a run: joules, observed trainings and all trainings, by month (such as 2026-11, in UTC) and device."""


def month_of(text: str) -> str:
    """Check a month that a person wrote, such as 2026-11.

    Raises:
        InvalidInputError: it is written in another way, or there is no such month.
    """
    try:
        found = datetime.strptime(text, "%Y-%m")
    except ValueError:
        raise InvalidInputError(f"{text[:20]!r} is not a month: write it as 2026-11") from None
    return f"{found:%Y-%m}"


def groups_of(text: str) -> tuple[str, ...]:
    """Split what joules are added up by, such as site,run.

    Raises:
        InvalidInputError: one is unknown, or is named twice.
    """
    found = tuple(each.strip() for each in text.split(","))
    if len(set(found)) < len(found) or not set(found) <= set(ENERGY_GROUPS):
        raise InvalidInputError(f"{text[:40]!r}: name one or more of {', '.join(ENERGY_GROUPS)}, each once")
    return found


def is_in_month(view: view_pb2.RunView, month: str | None) -> bool:
    """Whether a run may have trained in a month; None for any month."""
    if month is None or not view.HasField("started_unix_s"):
        return True
    ended = _month(view.finished_unix_s) if view.HasField("finished_unix_s") else month
    return _month(view.started_unix_s) <= month <= ended


def _month(unix_s: float) -> str:
    return f"{datetime.fromtimestamp(unix_s, timezone.utc):%Y-%m}"


def run_energy(rounds: Iterable[view_pb2.RoundView]) -> RunEnergy:
    """The energy of a run by month and device, as in its tables: the watts of the whole board times the seconds.

    A training belongs to the month in which its round was planned.

    Args:
        rounds: its rounds with their devices and times. Rounds without a plan are left out: nothing was observed.
    """
    found: dict[tuple[str, str], tuple[float, int, int]] = {}
    for view in rounds:
        month = _month(view.planned_unix_s) if view.HasField("planned_unix_s") else UNKNOWN
        for part in [] if view.unplanned else round_parts(view, plan_from_message(view.plan)):
            joules = _observed(part)["training_j"]
            if joules is not None and part.result is not None and 0 < part.result.share < 1:
                # What was observed is per epoch: a training that was ended in between drew for its share of them.
                joules *= part.result.share
            key = month, part.first.device_id
            before_j, observed, trainings = found.get(key, (0.0, 0, 0))
            found[key] = before_j + (joules or 0.0), observed + (joules is not None), trainings + 1
    return found


def energy_rows(
    runs: Mapping[str, RunEnergy],
    names: Mapping[str, str],
    supplies: Mapping[str, str],
    by: Sequence[str],
    month: str | None,
) -> list[Values]:
    """Add up the energy of runs: one dictionary for each month and group, the newest month and the most joules first.

    Args:
        runs: the energy of each run by its id.
        names: the names of runs by id.
        supplies: the supply of each device.
        by: some of `ENERGY_GROUPS`.
        month: only this month; None for all.
    """
    sums: dict[tuple[str, ...], tuple[float, int, int]] = {}
    for run_id, energy in runs.items():
        for (of_month, device_id), (joules, observed, trainings) in energy.items():
            if month in (None, of_month):
                place = {"site": supplies.get(device_id, UNKNOWN), "run": names[run_id], "device": device_id}
                key = (of_month, *(place[each] for each in by))
                before_j, before_observed, before = sums.get(key, (0.0, 0, 0))
                sums[key] = before_j + joules, before_observed + observed, before + trainings
    rows: list[Values] = [
        {
            **dict(zip(("month", *by), key, strict=True)),
            "training_j": joules if observed else None,
            "observed_trainings": observed,
            "trainings": trainings,
        }
        for key, (joules, observed, trainings) in sums.items()
    ]
    rows.sort(key=lambda row: (-(row["training_j"] or 0.0), *(row[each] for each in by)))
    return sorted(rows, key=lambda row: row["month"], reverse=True)
