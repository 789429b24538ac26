"""Prometheus metrics, read from the fleet's state by one collector.

An unknown value has no sample; it is never exported as zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from coordinator.state.fleet import Fleet
from coordinator.state.kept_duties import KeptDuties
from coordinator.state.records import RoundRecord
from coordinator.state.rounds.grants import Grants
from coordinator.state.rounds.latest_results import LatestResults
from coordinator.state.workload_fronts import EVERY_WORKLOAD
from wattfleet.duties import LATENCY_LIMITS_MS
from wattfleet_proto.device_state import DeviceState

_NAMED_WORKLOADS = 20
"""Workloads of live runs that have a label of their own: each label is a time series in Prometheus."""

_OTHER_WORKLOADS = "other"


class ExposureCollector(Collector):
    """Exports how many of a coordinator's own addresses other machines reach in plaintext."""

    def __init__(self, exposed: int) -> None:
        """Note their number."""
        self._exposed = exposed

    def collect(self) -> Iterator[Metric]:
        """One family."""
        yield GaugeMetricFamily(
            "wattfleet_exposed_plaintext_addresses",
            "Addresses of the coordinator that other machines reach without TLS",
            self._exposed,
        )


class FleetCollector(Collector):
    """Exports the fleet as metric families."""

    def __init__(self, fleet: Fleet) -> None:
        """Read from one fleet."""
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        """All families, from the current state."""
        # Copies, because the scrape runs in the HTTP server's thread beside the event loop.
        devices = list(self._fleet.agents.devices.values())
        rounds = list(self._fleet.rounds.records.values())

        # One sample per device, for its current state: zeros for the other states would be 50,000 samples for 10,000.
        state = GaugeMetricFamily(
            "wattfleet_device_state",
            "Always 1; the label is the device's current state",
            labels=["device", "board", "state"],
        )
        count = GaugeMetricFamily("wattfleet_devices", "Number of devices in each state", labels=["state"])
        modes = GaugeMetricFamily(
            "wattfleet_device_profiled_modes", "Number of power modes measured on the device", labels=["device"]
        )
        idle = GaugeMetricFamily("wattfleet_device_idle_watts", "Power of the idle device in watts", labels=["device"])
        trust = GaugeMetricFamily(
            "wattfleet_device_trust",
            "1 if no recent observation contradicts the device's predictions, 0 if all do",
            labels=["device"],
        )
        left_out = GaugeMetricFamily(
            "wattfleet_device_left_out", "1 for each device that its own reports keep out of rounds", labels=["device"]
        )
        claims = self._fleet.agents.claims
        in_state = Counter(device.state for device in devices)
        for possible in DeviceState:
            count.add_metric([possible.value], in_state[possible])
        for device in devices:
            state.add_metric([device.device_id, device.board, device.state.value], 1.0)
            modes.add_metric([device.device_id], device.profiled_modes)
            if device.idle_w is not None:
                idle.add_metric([device.device_id], device.idle_w)
            if (share := claims.trust_of(device.device_id)) is not None:
                trust.add_metric([device.device_id], share)
            if claims.exclusion_reason(device) is not None:
                left_out.add_metric([device.device_id], 1.0)
        yield from (state, count, modes, idle, trust, left_out)
        yield from _grant_families(self._fleet.rounds.grants, [device.device_id for device in devices])
        yield from _device_families(self._fleet.rounds.latest_results)
        yield from _round_families(rounds, self._fleet.rounds.latest_results, self._fleet.operator.site_budget_w)
        yield from _supply_families(self._fleet, rounds)
        yield from _workload_families(self._fleet)
        yield from _duty_families(self._fleet.duties, [device.device_id for device in devices])
        unplanned = GaugeMetricFamily(
            "wattfleet_unplanned_rounds",
            "Number of stored rounds that trained without a plan, so that no budget was kept",
        )
        unplanned.add_metric([], len(self._fleet.unplanned))
        yield unplanned


def _grant_families(grants: Grants, device_ids: Sequence[str]) -> Iterator[GaugeMetricFamily]:
    """What devices may draw beyond idling, and what they have confirmed."""
    granted = GaugeMetricFamily(
        "wattfleet_device_granted_watts", "Watts that the device's newest grant allows", labels=["device"]
    )
    confirmed = GaugeMetricFamily(
        "wattfleet_device_confirmed_watts", "Watts that the device has confirmed to keep to", labels=["device"]
    )
    counted = GaugeMetricFamily(
        "wattfleet_device_counted_watts",
        "Watts that count against the budget: the highest limit that the device may still act on",
        labels=["device"],
    )
    for device_id in device_ids:
        grant = grants.of(device_id)
        if grant is None or grant.is_over:
            continue
        granted.add_metric([device_id], grant.granted_w)
        counted.add_metric([device_id], grant.counted_w)
        if grant.confirmed_w is not None:
            confirmed.add_metric([device_id], grant.confirmed_w)
    yield from (granted, confirmed, counted)


def _device_families(newest: LatestResults) -> Iterator[GaugeMetricFamily]:
    """The watts planned in each device's newest round, and predictions and observations of its last observed one."""
    families = {
        name: GaugeMetricFamily(f"wattfleet_device_{name}", text, labels=["device"])
        for name, text in (
            ("budget_watts", "Watts planned for the device in its newest round"),
            ("predicted_epoch_seconds", "Predicted seconds per epoch of the last reported training"),
            ("observed_epoch_seconds", "Last reported seconds per epoch"),
            ("predicted_power_watts", "Predicted watts of the last reported training"),
            ("observed_power_watts", "Last reported watts while training"),
        )
    }
    for chosen in list(newest.assignments.values()):
        families["budget_watts"].add_metric([chosen.device_id], chosen.power_limit_w)
    for chosen in list(newest.predictions.values()):
        families["predicted_epoch_seconds"].add_metric([chosen.device_id], chosen.epoch_s)
        families["predicted_power_watts"].add_metric([chosen.device_id], chosen.power_w)
    for seen in list(newest.observations.values()):
        families["observed_epoch_seconds"].add_metric([seen.device_id], seen.epoch_s)
        families["observed_power_watts"].add_metric([seen.device_id], seen.power_w)
    yield from families.values()


def _round_families(
    rounds: list[RoundRecord], newest: LatestResults, site_budget_w: float
) -> Iterator[GaugeMetricFamily]:
    """The newest planned, the newest observed and the newest evaluated round."""
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
    if (seen := newest.observed_round) is not None:
        site.add_metric(["observed"], seen.site_w)
        # The budget may have changed since, so the round's own budget is exported beside it.
        site.add_metric(["allowed_then"], seen.allowed_w)
        duration.add_metric(["observed"], seen.duration_s)
        # A newer plan may predict another duration.
        duration.add_metric(["predicted_then"], seen.predicted_s)
    if newest.evaluated_round is not None:
        accuracy.add_metric([], newest.evaluated_round.accuracy)
    yield from (number, duration, site, accuracy)


def _workload_families(fleet: Fleet) -> Iterator[GaugeMetricFamily]:
    """The workloads of live runs, those of the newest runs first; others have one label together."""
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
            counted = set(known.values()) if each.name == EVERY_WORKLOAD else {known.get(each.name, "")} - {""}
            for label in counted:
                labels[label] = max(labels.get(label, 0), each.profiled_modes)
        with_front.update(labels.keys())
        with_modes.update(label for label, modes in labels.items() if modes)
    for label in [*named, *([_OTHER_WORKLOADS] if others else [])]:
        predicted.add_metric([label], with_front[label])
        measured.add_metric([label], with_modes[label])
    yield from (runs, predicted, measured)


def _duty_families(duties: KeptDuties, device_ids: Sequence[str]) -> Iterator[Metric]:
    """How devices answer their requests; the counters begin anew with a device's agent."""
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


def _supply_families(fleet: Fleet, rounds: list[RoundRecord]) -> Iterator[GaugeMetricFamily]:
    """Each supply's budget in force, the watts that the newest round set aside behind it, and those reserved now."""
    power = GaugeMetricFamily(
        "wattfleet_supply_power_watts",
        "Power behind each supply in watts, including idle devices",
        labels=["supply", "kind"],
    )
    fallback = GaugeMetricFamily(
        "wattfleet_supply_fallback", "1 while the supply's fallback budget is in force, else 0", labels=["supply"]
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
    yield from (power, fallback)
