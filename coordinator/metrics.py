"""The Prometheus metrics of the fleet and of the coordinator's services."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from datetime import datetime
from itertools import accumulate
from typing import Literal

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from coordinator.histograms import Histogram
from coordinator.service_figures import ServiceFigures
from coordinator.state.device_view import DeviceView
from coordinator.state.fleet import Fleet
from coordinator.state.power_draw import KeptDuties
from coordinator.state.records import DeviceRecord, ObservedTraining, RoundRecord, RunRecord
from coordinator.state.rounds.ledger import LatestResults, RoundStatistics
from coordinator.state.stores import OF_DEVICE
from wattfleet.common.build_metric import build_family
from wattfleet.core.duties import LATENCY_LIMITS_MS
from wattfleet.core.planning import Assignment, Selection
from wattfleet_proto.device_state import FIGURES, DeviceState

# --- Exposition -------------------------------------------------------------------------------------------------------
# The text of a scrape. Of a large fleet's, nearly all lines are those of single devices.


class DeviceFamily(Metric):
    """A metric family with a sample for each of many devices, whose lines are written together.

    prometheus_client takes ten times as long for them, since it makes an object of each sample and of its labels.
    """

    def __init__(
        self,
        name: str,
        text: str,
        kind: Literal["gauge", "counter"],
        labels: Sequence[str],
        rows: Sequence[tuple[Sequence[str], float]],
    ) -> None:
        """Collect the samples.

        Args:
            name: the family's name.
            text: its help text.
            kind: its type.
            labels: names of its labels.
            rows: each sample's labels, and its value.
        """
        super().__init__(name, text, kind)
        self._labels, self._rows = labels, rows

    @property
    def samples(self) -> list[Sample]:
        """The samples, for readers that know no `DeviceFamily`."""
        return self._samples(self._rows)

    @samples.setter
    def samples(self, samples: list[Sample]) -> None:
        """Ignore the empty list that `Metric` begins with."""

    def _samples(self, rows: Sequence[tuple[Sequence[str], float]]) -> list[Sample]:
        name = f"{self.name}_total" if self.type == "counter" else self.name
        return [Sample(name, dict(zip(self._labels, values, strict=True)), value) for values, value in rows]

    def lines(self, encode: Callable[[Collector], bytes]) -> str:
        """Return the family as `encode` would."""
        first = Metric(self.name, self.documentation, self.type)
        first.samples = self._samples(self._rows[:1])
        head = encode(_Collected([first])).decode().removesuffix("# EOF\n")
        if not self._rows:
            return head
        head, _, line = head[:-1].rpartition("\n")
        places = sorted(range(len(self._labels)), key=lambda k: self._labels[k])
        columns: list[Sequence[str]] = [[values[k] for values, _ in self._rows] for k in places]
        columns = [column if _NEEDS_ESCAPE.isdisjoint("".join(column)) else _escaped(column) for column in columns]
        # Such as 'wattfleet_device_state{{board="{}",device="{}",state="{}"}} {}\n'.
        labels = ",".join(f'{self._labels[k]}="{{}}"' for k in places)
        form = f"{line[: line.index('{')]}{{{{{labels}}}}} {{}}\n".format
        numbers = [float(value) for _, value in self._rows]
        texts = map(repr, numbers) if math.isfinite(sum(numbers)) else map(_text_of, numbers)
        return head + "\n" + "".join(map(form, *columns, texts))


_NEEDS_ESCAPE = frozenset('\\\n"')


def _escaped(values: Sequence[str]) -> list[str]:
    return [value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"") for value in values]


def _text_of(number: float) -> str:
    return repr(number) if math.isfinite(number) else str(floatToGoString(number))  # type: ignore[no-untyped-call]


class _Collected(Collector):
    """Families that were collected before."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def exposition(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Return all metrics in the format that a caller accepts, and the content type of this format.

    Args:
        registry: the metrics.
        accept: the caller's `Accept` header.
    """
    encode, content_type = choose_encoder(accept)
    families = list(registry.collect())
    of_devices = [family.lines(encode) for family in families if isinstance(family, DeviceFamily)]
    others = encode(_Collected([family for family in families if not isinstance(family, DeviceFamily)]))
    # The others come last, because some formats end with a mark.
    return "".join(of_devices).encode() + others, content_type


# --- Device families --------------------------------------------------------------------------------------------------
# Metric families of individual devices: properties, grants, predictions and observations.


_Number = Callable[[DeviceView], float | None]

_DEVICE_GAUGES: tuple[tuple[str, str, _Number], ...] = (
    ("profiled_modes", "Number of power modes measured on the device", lambda of: of.record.profiled_modes),
    ("idle_watts", "Power of the idle device in watts", lambda of: of.record.idle_w),
    ("trust", "1 if no recent observation contradicts the device's predictions, 0 if all do", lambda of: of.trust),
    (
        "left_out",
        "1 for each device that its own reports keep out of rounds",
        lambda of: None if of.left_out is None else 1.0,
    ),
    (
        "granted_watts",
        "Watts that the device's newest grant allows",
        lambda of: None if of.grant is None else of.grant.granted_w,
    ),
    (
        "confirmed_watts",
        "Watts that the device has confirmed to keep to",
        lambda of: None if of.grant is None else of.grant.confirmed_w,
    ),
    (
        "counted_watts",
        "Watts that count against the budget: the highest limit that the device may still act on",
        lambda of: None if of.grant is None else of.grant.counted_w,
    ),
    ("budget_watts", "Watts planned for the device in its newest round", lambda of: of.budget_w),
)
"""The gauges of each device: the end of the name, the help text, and the value; None is not exported."""

_TRAINING_GAUGES: tuple[tuple[str, str, Callable[[Assignment, ObservedTraining], float]], ...] = (
    (
        "predicted_epoch_seconds",
        "Predicted seconds per epoch of the last reported training",
        lambda planned, seen: planned.epoch_s,
    ),
    ("observed_epoch_seconds", "Last reported seconds per epoch", lambda planned, seen: seen.epoch_s),
    (
        "predicted_power_watts",
        "Predicted watts of the last reported training",
        lambda planned, seen: planned.power_w,
    ),
    ("observed_power_watts", "Last reported watts while training", lambda planned, seen: seen.power_w),
)
"""As above, of each device's last observed training; they disappear when its run ends."""


def device_families(views: Sequence[DeviceView]) -> Iterator[Metric]:
    """All families with one device per sample, of the devices that are exported individually."""
    yield from _named_families(views)
    for name, text, value in _DEVICE_GAUGES:
        yield _device_family("gauge", name, text, ((of, value(of)) for of in views))
    compared = [
        (of, of.predicted, of.observed)
        for of in views
        if of.predicted is not None and of.observed is not None and of.is_observed_run_live
    ]
    for name, text, of_training in _TRAINING_GAUGES:
        trained = ((of, of_training(planned, seen)) for of, planned, seen in compared)
        yield _device_family("gauge", name, text, trained)
    sampled = [(of, sample) for of in views if (sample := of.sample) is not None]
    for reading, of_sample in FIGURES:
        kind: Literal["gauge", "counter"] = "counter" if reading.is_count else "gauge"
        yield _device_family(kind, reading.metric, reading.text, ((of, of_sample(sample)) for of, sample in sampled))
    yield _device_family(
        "counter",
        "training_energy_joules",
        "Observed joules of the device's trainings in rounds since the coordinator started",
        ((of, of.training_j) for of in views),
    )


def _device_family(
    kind: Literal["gauge", "counter"], name: str, text: str, values: Iterable[tuple[DeviceView, float | None]]
) -> DeviceFamily:
    rows = [((of.record.device_id,), value) for of, value in values if value is not None]
    return DeviceFamily(f"wattfleet_device_{name}", text, kind, ("device",), rows)


def _named_families(views: Sequence[DeviceView]) -> Iterator[DeviceFamily]:
    """What each device is, and its state, in labels."""
    info, state = [], []
    for of in views:
        device, tags = of.record, ",".join(sorted({*of.site_tags, *of.operator_tags}))
        place = (of.site or "", of.supply or "", f",{tags}," if tags else "")
        info.append(((device.device_id, device.board, device.provenance, *place), 1.0))
        # One sample per device, for its current state: zeros for the others would be 50,000 samples for 10,000.
        state.append(((device.device_id, device.board, device.state.value), 1.0))
    yield DeviceFamily(
        "wattfleet_device_info",
        "Always 1; the labels say what the device is. Each tag has a comma before and after it",
        "gauge",
        ("device", "board", "provenance", "site", "supply", "tags"),
        info,
    )
    yield DeviceFamily(
        "wattfleet_device_state",
        "Always 1; the label is the device's current state",
        "gauge",
        ("device", "board", "state"),
        state,
    )


# --- Duty families ----------------------------------------------------------------------------------------------------
# Metric families of how devices answer the requests of their duties.


def duty_families(duties: KeptDuties, device_ids: Sequence[str]) -> Iterator[Metric]:
    """The families; counters restart with a device's agent."""
    latency = HistogramMetricFamily(
        "wattfleet_duty_latency_seconds", "Seconds from a request's arrival to its answer", labels=["device"]
    )
    requests = CounterMetricFamily("wattfleet_duty_requests", "Requests with an answer or an error", labels=["device"])
    missed = CounterMetricFamily(
        "wattfleet_duty_missed", "Requests that were answered too late, or with an error", labels=["device"]
    )
    allowed = GaugeMetricFamily(
        "wattfleet_duty_allowed_missed_share", "Share of requests that the duty lets miss its limit", labels=["device"]
    )
    arrivals = GaugeMetricFamily(
        "wattfleet_duty_arrivals_per_second", "Requests per second in the last half minute", labels=["device"]
    )
    training = GaugeMetricFamily(
        "wattfleet_duty_training_share",
        "Share of the last half minute in which minibatches had the device",
        labels=["device"],
    )
    for device_id in device_ids:
        kept = duties.of(device_id)
        if kept is None:
            continue
        limits = [*(str(limit_ms / 1e3) for limit_ms in LATENCY_LIMITS_MS), "+Inf"]
        buckets = list(zip(limits, accumulate(map(float, kept.latency_counts)), strict=True))
        latency.add_metric([device_id], buckets, kept.latency_sum_ms / 1e3)
        requests.add_metric([device_id], kept.requests)
        missed.add_metric([device_id], kept.missed)
        allowed.add_metric([device_id], 1 - kept.quantile)
        arrivals.add_metric([device_id], kept.arrivals_per_s)
        training.add_metric([device_id], kept.training_share)
    yield from (latency, requests, missed, allowed, arrivals, training)


# --- Workload families ------------------------------------------------------------------------------------------------
# Metric families of the workloads of live runs.

_NAMED_WORKLOADS = 20
"""The most workloads with their own label, because each label is a time series in Prometheus."""

_OTHER_WORKLOADS = "other"


def workload_families(fleet: Fleet) -> Iterator[GaugeMetricFamily]:
    """The families of live runs' workloads; beyond the limit, those of the oldest runs share one label."""
    runs = GaugeMetricFamily("wattfleet_workload_runs", "Number of runs that have not ended", labels=["workload"])
    predicted = GaugeMetricFamily(
        "wattfleet_workload_devices", "Number of devices with a prediction for the workload", labels=["workload"]
    )
    measured = GaugeMetricFamily(
        "wattfleet_workload_measured_devices",
        "Number of devices that have measured modes of the workload",
        labels=["workload"],
    )
    live = Counter(run.workload.name for run in reversed(list(fleet.flower.runs.values())) if not run.finished)
    named = list(live)[:_NAMED_WORKLOADS]
    for name in named:
        runs.add_metric([name], live[name])
    if others := len(live) - len(named):
        runs.add_metric([_OTHER_WORKLOADS], sum(live.values()) - sum(live[name] for name in named))
    with_front, with_modes = Counter(dict.fromkeys(named, 0)), Counter(dict.fromkeys(named, 0))
    known = dict.fromkeys(list(live)[_NAMED_WORKLOADS:], _OTHER_WORKLOADS) | {name: name for name in named}
    for device in list(fleet.agents.devices.values()):
        labels: dict[str, int] = {}
        for each in device.fronts:
            if (label := known.get(each.name)) is not None:
                labels[label] = max(labels.get(label, 0), each.profiled_modes)
        with_front.update(labels.keys())
        with_modes.update(label for label, modes in labels.items() if modes)
    for label in [*named, *([_OTHER_WORKLOADS] if others else [])]:
        predicted.add_metric([label], with_front[label])
        measured.add_metric([label], with_modes[label])
    yield from (runs, predicted, measured)


# --- Round families ---------------------------------------------------------------------------------------------------
# Metric families of rounds: gauges of the newest rounds, and counters and histograms of all rounds of this process.

_NAMED_RUNS = 20
"""The most live runs with their own label, because each label is a time series in Prometheus."""

_OTHER_RUNS = "other"


def round_families(
    rounds: Sequence[RoundRecord], newest: LatestResults, site_budget_w: float, live_runs: Set[str]
) -> Iterator[GaugeMetricFamily]:
    """The newest planned, observed and evaluated rounds; they disappear when their run ends."""
    number = GaugeMetricFamily("wattfleet_round_number", "Number of the newest planned round")
    duration = GaugeMetricFamily(
        "wattfleet_round_duration_seconds",
        "Makespan of the round: seconds until its slowest device has finished",
        labels=["kind"],
    )
    site = GaugeMetricFamily(
        "wattfleet_site_power_watts", "Power of the site in watts, including idle devices", labels=["kind"]
    )
    accuracy = GaugeMetricFamily("wattfleet_round_accuracy", "Accuracy after the newest evaluated round")
    site.add_metric(["allowed"], site_budget_w)
    if rounds:
        number.add_metric([], rounds[-1].number)
        duration.add_metric(["predicted"], rounds[-1].plan.duration_s)
        site.add_metric(["planned"], rounds[-1].plan.planned_w)
    if (seen := newest.observed_round) is not None and seen.run_id in live_runs:
        site.add_metric(["observed"], seen.site_w)
        # The plan and the budget may have changed since, so those of the observed round are exported as well.
        site.add_metric(["planned_then"], seen.planned_w)
        site.add_metric(["allowed_then"], seen.allowed_w)
        duration.add_metric(["observed"], seen.duration_s)
        duration.add_metric(["predicted_then"], seen.predicted_s)
    if (evaluated := newest.evaluated_round) is not None and evaluated.run_id in live_runs:
        accuracy.add_metric([], evaluated.accuracy)
    yield from (number, duration, site, accuracy)


def run_info_family(live_runs: Sequence[RunRecord]) -> GaugeMetricFamily:
    """The names and labels of live runs, to be joined with other metrics by the label `run`.

    Args:
        live_runs: the runs that have not ended, the newest first.
    """
    family = GaugeMetricFamily(
        "wattfleet_run_info",
        "Always 1; the labels say what a run that has not ended is. Each of its labels has a comma before and after it",
        labels=["run", "name", "labels"],
    )
    for run in live_runs[:_NAMED_RUNS]:
        labels = ",".join(f"{key}={value}" for key, value in sorted(run.labels.items()))
        family.add_metric([run.run_id, run.name, f",{labels}," if labels else ""], 1.0)
    return family


def in_flight_family(rounds: Sequence[RoundRecord], since_s: Mapping[str, float], now_s: float) -> GaugeMetricFamily:
    """The duration so far of each run's oldest round in flight, with the prediction for the same round.

    Args:
        rounds: the rounds of live runs, oldest first.
        since_s: when each round in flight was planned, by plan id.
        now_s: the time now, of the same clock.
    """
    family = GaugeMetricFamily(
        "wattfleet_round_in_flight_seconds",
        "Seconds since the run's oldest round that has not ended was planned, and its predicted makespan",
        labels=["run", "kind"],
    )
    oldest: dict[str, RoundRecord] = {}
    for record in rounds:
        if record.plan_id in since_s and record.wall_s is None and record.plan.assignments:
            oldest.setdefault(record.run_id, record)
    for run_id, record in list(oldest.items())[-_NAMED_RUNS:]:
        family.add_metric([run_id, "elapsed"], now_s - since_s[record.plan_id])
        family.add_metric([run_id, "predicted"], record.plan.duration_s)
    return family


def statistics_families(statistics: RoundStatistics, live_runs: Sequence[str]) -> Iterator[Metric]:
    """Counters and histograms of the rounds since the start.

    Args:
        statistics: the counts.
        live_runs: ids of the runs that have not ended, the newest first.
    """
    yield CounterMetricFamily("wattfleet_rounds_planned", "Rounds that were planned", statistics.planned)
    ended = CounterMetricFamily("wattfleet_rounds_ended", "Rounds that have ended, by how", labels=["reason"])
    for reason, count in statistics.ended.items():
        ended.add_metric([reason], count)
    yield ended
    yield CounterMetricFamily(
        "wattfleet_rounds_over_budget",
        "Rounds whose devices drew more watts than the site's budget at their time",
        statistics.over_budget,
    )
    parts = CounterMetricFamily(
        "wattfleet_participations", "Devices in rounds, by what came of their part", labels=["reason"]
    )
    for reason, count in statistics.participations.items():
        parts.add_metric([reason], count)
    yield parts
    yield _histograms(
        "wattfleet_observed_to_predicted_ratio",
        "Observed by predicted seconds and watts of trainings",
        "quantity",
        statistics.ratios,
    )
    yield _histograms(
        "wattfleet_prediction_deviations",
        "Distance of observed from predicted values in predicted standard deviations; 90 % should be below 1.645",
        "quantity",
        statistics.deviations,
    )
    yield _histograms(
        "wattfleet_round_seconds", "Seconds of completely observed rounds, by kind", "kind", statistics.round_s
    )
    yield _histograms(
        "wattfleet_round_watts", "Watts of the site in completely observed rounds, by kind", "kind", statistics.round_w
    )
    energy = HistogramMetricFamily(
        "wattfleet_round_energy_joules", "Joules of the trainings of completely observed rounds"
    )
    energy.add_metric([], statistics.round_j.buckets, statistics.round_j.sum)
    yield energy
    yield _run_family(statistics.run_j.copy(), live_runs)


def _run_family(run_j: Mapping[str, float], live_runs: Sequence[str]) -> GaugeMetricFamily | CounterMetricFamily:
    """The joules of each live run; the oldest runs share one label."""
    family = CounterMetricFamily(
        "wattfleet_run_energy_joules",
        "Joules of the observed trainings of a run that has not ended, since the coordinator started",
        labels=["run"],
    )
    known = [run_id for run_id in live_runs if run_id in run_j]
    for run_id in known[:_NAMED_RUNS]:
        family.add_metric([run_id], run_j[run_id])
    if others := known[_NAMED_RUNS:]:
        family.add_metric([_OTHER_RUNS], sum(run_j[run_id] for run_id in others))
    return family


def _histograms(name: str, text: str, label: str, histograms: Mapping[str, Histogram]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=[label])
    for value, histogram in histograms.items():
        family.add_metric([value], histogram.buckets, histogram.sum)
    return family


# --- Fleet collector --------------------------------------------------------------------------------------------------
# The fleet's metrics, read from its state by one collector.
#
# An unknown value has no sample; it is never exported as zero.


class FleetCollector(Collector):
    """Exports the fleet as metric families."""

    def __init__(
        self, fleet: Fleet, single_devices: Sequence[str] = (), now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Read from one fleet.

        Args:
            fleet: the fleet.
            single_devices: patterns such as `tag:lab` of the devices that are exported individually; empty for all.
            now_s: the clock by which rounds are planned.

        Raises:
            InvalidInputError: a pattern has another form.
        """
        self._fleet = fleet
        self._single = Selection(tuple(single_devices))
        self._now_s = now_s

    def collect(self) -> Iterator[Metric]:
        """All families, from the current state."""
        # Copies, because the scrape runs in the HTTP server's thread beside the event loop.
        devices = list(self._fleet.agents.devices.values())
        live_records = [run for run in reversed(list(self._fleet.flower.runs.values())) if not run.finished]
        live = [run.run_id for run in live_records]
        live_runs = set(live)
        rounds = [record for record in list(self._fleet.rounds.records.values()) if record.run_id in live_runs]

        count = GaugeMetricFamily("wattfleet_devices", "Number of devices in each state", labels=["state"])
        in_state = Counter(device.state for device in devices)
        for possible in DeviceState:
            count.add_metric([possible.value], in_state[possible])
        yield count
        yield from _live_totals(self._fleet, devices)
        single = self._exported(devices)
        yield from device_families([DeviceView(self._fleet, device) for device in single])
        newest = self._fleet.rounds.latest_results
        yield from round_families(rounds, newest, self._fleet.operator.site_budget_w, live_runs)
        yield run_info_family(live_records)
        yield in_flight_family(rounds, self._fleet.rounds.since_s.copy(), self._now_s())
        yield from statistics_families(self._fleet.rounds.statistics, live)
        yield from _supply_families(self._fleet, rounds)
        yield from _battery_families(self._fleet, [device.device_id for device in single])
        yield from workload_families(self._fleet)
        yield from duty_families(self._fleet.duties, [device.device_id for device in single])
        unplanned = GaugeMetricFamily(
            "wattfleet_unplanned_rounds",
            "Number of stored rounds that trained without a plan, so that no budget was kept",
        )
        unplanned.add_metric([], len(self._fleet.unplanned))
        yield unplanned

    def _exported(self, devices: Sequence[DeviceRecord]) -> list[DeviceRecord]:
        """The devices that are exported individually."""
        if not self._single.include:
            return list(devices)
        selected = set(self._fleet.operator.matching(self._single))
        return [device for device in devices if device.device_id in selected]


def _live_totals(fleet: Fleet, devices: Sequence[DeviceRecord]) -> Iterator[GaugeMetricFamily]:
    """The watts that all boards draw now, as far as they report them."""
    reported = [
        sample.power_w
        for device in devices
        if (sample := fleet.samples.of(device.device_id)) is not None and sample.power_w is not None
    ]
    yield GaugeMetricFamily("wattfleet_reporting_devices", "Number of devices that report their power", len(reported))
    power = GaugeMetricFamily("wattfleet_live_power_watts", "Power now of all devices that report it, in watts")
    if reported:
        power.add_metric([], sum(reported))
    yield power


def _battery_families(fleet: Fleet, device_ids: Sequence[str]) -> Iterator[GaugeMetricFamily]:
    """What batteries of supplies and of some devices hold, and what is left of the energy budgets of supplies."""
    exported = {OF_DEVICE + device_id for device_id in device_ids}
    battery = GaugeMetricFamily(
        "wattfleet_battery_energy_joules",
        "Energy of each battery in joules: estimated now, its reserve, and what trainings of an hour may draw",
        labels=["holder", "kind"],
    )
    unknown = GaugeMetricFamily(
        "wattfleet_battery_unknown",
        "1 while a battery's charge is not known or old, so that it counts as emptier, else 0",
        labels=["holder"],
    )
    budget = GaugeMetricFamily(
        "wattfleet_supply_energy_joules",
        "Energy budget of each supply in its day, week or month, in joules: allowed, spent and set aside",
        labels=["supply", "kind"],
    )
    for state in fleet.battery_states():
        if state.holder.startswith(OF_DEVICE) and state.holder not in exported:
            continue
        battery.add_metric([state.holder, "estimated"], state.level.energy_j)
        battery.add_metric([state.holder, "reserve"], state.placed.battery.reserve_j)
        battery.add_metric([state.holder, "spare"], state.left_j)
        unknown.add_metric([state.holder], float(bool(state.level.problem)))
    for supply in list(fleet.stores.budgets):
        if (account := fleet.stores.account(supply)) is not None:
            budget.add_metric([supply, "allowed"], account.budget_j)
            budget.add_metric([supply, "spent"], account.spent_j)
            budget.add_metric([supply, "set_aside"], account.set_aside_j)
    yield from (battery, unknown, budget)


def _supply_families(fleet: Fleet, rounds: Sequence[RoundRecord]) -> Iterator[GaugeMetricFamily]:
    """Each supply's budget in force, and its watts: planned, reserved, drawn, and not trimmed although possible."""
    power = GaugeMetricFamily(
        "wattfleet_supply_power_watts",
        "Power behind each supply in watts, including idle devices",
        labels=["supply", "kind"],
    )
    fallback = GaugeMetricFamily(
        "wattfleet_supply_fallback", "1 while the supply's fallback budget is in force, else 0", labels=["supply"]
    )
    untrimmed = GaugeMetricFamily(
        "wattfleet_supply_untrimmed_watts",
        "Watts above the supply's budget that a trim would save; above 0 only until the next check",
        labels=["supply"],
    )
    for supply, in_force in list(fleet.operator.budgets_in_force.items()):
        power.add_metric([supply, "allowed"], in_force.watts)
        fallback.add_metric([supply], float(in_force.fallback))
    if rounds:
        for use in rounds[-1].plan.supplies:
            power.add_metric([use.supply, "planned"], use.planned_w)
    if any(device.idle_w is not None for device in list(fleet.agents.devices.values())):
        for supply, reserved_w in fleet.draw.reserved_w().items():
            power.add_metric([supply, "reserved"], reserved_w)
        for supply, untrimmed_w in fleet.untrimmed_w().items():
            untrimmed.add_metric([supply], untrimmed_w)
        for supply, measured in fleet.measured_draw().items():
            power.add_metric([supply, "drawn"], measured.drawn_w)
    yield from (power, fallback, untrimmed)


# --- Service collector ------------------------------------------------------------------------------------------------
# Metric families of the coordinator itself: version, latencies, store and certificates.


class ServiceCollector(Collector):
    """Exports measurements of the coordinator itself."""

    def __init__(self, figures: ServiceFigures, expiries: Callable[[], Mapping[str, datetime]] = dict) -> None:
        """Read from one coordinator.

        Args:
            figures: its measurements.
            expiries: when the certificate of each role expires first.
        """
        self._figures = figures
        self._expiries = expiries

    def collect(self) -> Iterator[Metric]:
        """All families, from the current figures."""
        figures = self._figures
        yield build_family()
        rpcs = HistogramMetricFamily(
            "wattfleet_rpc_seconds", "Seconds until an RPC was answered; streams are left out", labels=["method"]
        )
        for method, seconds in sorted(figures.rpc_s.copy().items()):
            rpcs.add_metric([method], seconds.buckets, seconds.sum)
        yield rpcs
        for name, text, seconds in (
            ("store_write", "Seconds of the transactions that write to the store", figures.store_s),
            ("plan", "Seconds of the computation of plans", figures.plan_s),
        ):
            family = HistogramMetricFamily(f"wattfleet_{name}_seconds", text)
            family.add_metric([], seconds.buckets, seconds.sum)
            yield family
        yield CounterMetricFamily(
            "wattfleet_store_failures",
            "Transactions that failed and were to be tried again",
            figures.store_failures,
        )
        yield GaugeMetricFamily(
            "wattfleet_store_failing", "1 while nothing can be stored, else 0", float(figures.is_store_failing)
        )
        expiry = GaugeMetricFamily(
            "wattfleet_certificate_expiry_timestamp_seconds",
            "When the first certificate of the role expires, in seconds since 1970",
            labels=["role"],
        )
        for role, expires_at in self._expiries().items():
            expiry.add_metric([role], expires_at.timestamp())
        yield expiry


# --- Exposure collector -----------------------------------------------------------------------------------------------
# The metric family with the number of a coordinator's exposed addresses.


class ExposureCollector(Collector):
    """Exports how many of a coordinator's addresses other machines can reach in plaintext."""

    def __init__(self, exposed: int) -> None:
        """Export the given number of addresses."""
        self._exposed = exposed

    def collect(self) -> Iterator[Metric]:
        """The family."""
        yield GaugeMetricFamily(
            "wattfleet_exposed_plaintext_addresses",
            "Addresses of the coordinator that other machines reach without TLS",
            self._exposed,
        )


# --- Registry ---------------------------------------------------------------------------------------------------------
# All that a coordinator exports.


def coordinator_registry(
    fleet: Fleet,
    devices: Sequence[str] = (),
    exposed: int = 0,
    figures: ServiceFigures | None = None,
    expiries: Callable[[], Mapping[str, datetime]] = dict,
) -> CollectorRegistry:
    """The registry with all metrics of a coordinator.

    Args:
        fleet: the fleet to export.
        devices: the devices that are exported individually, as id:NAME, tag:NAME or site:NAME; none names all.
        exposed: addresses of the coordinator that other machines reach in plaintext.
        figures: measurements of the coordinator itself; None exports zeros.
        expiries: when the certificate of each role expires first.
    """
    registry = CollectorRegistry()
    registry.register(FleetCollector(fleet, devices))
    registry.register(ExposureCollector(exposed))
    registry.register(ServiceCollector(figures or ServiceFigures(), expiries))
    ProcessCollector(registry=registry)
    return registry
