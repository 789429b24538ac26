"""Metric families of the workloads of live runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily

from coordinator.state.fleet import Fleet
from coordinator.state.workload_fronts import EVERY_WORKLOAD

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
            counted = set(known.values()) if each.name == EVERY_WORKLOAD else {known.get(each.name, "")} - {""}
            for label in counted:
                labels[label] = max(labels.get(label, 0), each.profiled_modes)
        with_front.update(labels.keys())
        with_modes.update(label for label, modes in labels.items() if modes)
    for label in [*named, *([_OTHER_WORKLOADS] if others else [])]:
        predicted.add_metric([label], with_front[label])
        measured.add_metric([label], with_modes[label])
    yield from (runs, predicted, measured)
