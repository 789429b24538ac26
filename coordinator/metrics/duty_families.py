"""Metric families of how devices answer the requests of their duties."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from coordinator.state.kept_duties import KeptDuties
from wattfleet.duties import LATENCY_LIMITS_MS


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
