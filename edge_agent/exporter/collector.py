"""Exports an agent and its board as metric families. An unknown value has no sample; it is never exported as 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from edge_agent.exporter.figures import AgentFigures, DeviceFacts
from wattfleet.duties import LATENCY_LIMITS_MS, KeptDuty
from wattfleet_io.build_metric import build_family
from wattfleet_proto.board_sample import BoardSample


class AgentCollector(Collector):
    """Exports one agent."""

    def __init__(
        self, device: DeviceFacts, figures: Callable[[], AgentFigures], expires_at: Callable[[], datetime | None]
    ) -> None:
        """Set up the collector of one agent.

        Args:
            device: the device that it serves.
            figures: returns what the agent knows now; called in the thread of a request.
            expires_at: returns when its certificate expires; None without one.
        """
        self._device = device
        self._figures = figures
        self._expires_at = expires_at

    def collect(self) -> Iterator[Metric]:
        """Return all families, from the current figures."""
        figures, device = self._figures(), self._device
        info = GaugeMetricFamily(
            "wattfleet_agent_info",
            "Always 1; the labels say what the device is",
            labels=["device", "board", "provenance"],
        )
        info.add_metric([device.device_id, device.board, device.provenance], 1.0)
        yield info
        yield build_family()
        yield from _agent_families(figures)
        yield from _board_families(figures.sample)
        yield from _duty_families(figures.duty)
        expiry = GaugeMetricFamily(
            "wattfleet_agent_certificate_expiry_timestamp_seconds",
            "When the device's certificate expires, in seconds since 1970",
        )
        if (expires_at := self._expires_at()) is not None:
            expiry.add_metric([], expires_at.timestamp())
        yield expiry


def _agent_families(figures: AgentFigures) -> Iterator[Metric]:
    """Return the families on what the agent is doing."""
    state = GaugeMetricFamily(
        "wattfleet_agent_state", "Always 1; the label is the device's current state", labels=["state"]
    )
    state.add_metric([figures.state.value], 1.0)
    yield state
    for name, text, value in (
        ("connected", "1 while the coordinator holds a session with this device, else 0", float(figures.is_connected)),
        ("waiting_reports", "Reports that the coordinator has not acknowledged", figures.waiting_reports),
        ("profiled_modes", "Power modes measured of the latest workload", figures.profiled_modes),
        ("modes_to_measure", "Power modes that the profile in progress measures at most", figures.modes_to_measure),
        ("granted_watts", "Watts that the training in progress may draw", figures.granted_w),
    ):
        yield _gauge(f"wattfleet_agent_{name}", text, value)
    yield CounterMetricFamily(
        "wattfleet_agent_trainings", "Trainings that have begun since the agent started", figures.trainings
    )


def _board_families(sample: BoardSample | None) -> Iterator[Metric]:
    """Return the families with the board's latest sensor readings; a missing sensor has no sample."""
    read = sample or BoardSample()
    mode = read.mode
    for name, text, value in (
        ("power_watts", "Power of the board now, in watts", read.power_w),
        ("power_readable", "1 while the board's power can be read, else 0", float(read.power_w is not None)),
        ("temperature_celsius", "Temperature of the hottest part of the chip", read.temperature_c),
        ("online_cores", "Number of CPU cores that are online", None if mode is None else mode.cores),
        ("cpu_clock_hertz", "CPU clock of the mode in force", None if mode is None else mode.cpu_khz * 1e3),
        ("gpu_clock_hertz", "GPU clock of the mode in force", None if mode is None else mode.gpu_hz),
        ("memory_clock_hertz", "Memory clock of the mode in force", None if mode is None else mode.mem_hz),
        ("fan_ratio", "Speed of the fan, 0 to 1", read.fan_share),
        ("gpu_use_ratio", "Use of the GPU in the last moments, 0 to 1", read.gpu_use_share),
    ):
        yield _gauge(f"wattfleet_board_{name}", text, value)
    yield _counter(
        "wattfleet_board_energy_joules", "Joules that the board has drawn since its agent started", read.energy_j
    )
    yield _counter(
        "wattfleet_board_throttle_events",
        "Times the board has throttled itself since it booted",
        read.throttle_events,
    )


def _duty_families(duty: KeptDuty | None) -> Iterator[Metric]:
    """Return the families on how the device answers its duty's requests; another duty resets the counters."""
    latency = HistogramMetricFamily(
        "wattfleet_agent_duty_latency_seconds", "Seconds from a request's arrival to its answer"
    )
    if duty is not None:
        limits = [*(str(limit_ms / 1e3) for limit_ms in LATENCY_LIMITS_MS), "+Inf"]
        buckets = list(zip(limits, accumulate(map(float, duty.latency_counts)), strict=True))
        latency.add_metric([], buckets, duty.latency_sum_ms / 1e3)
    yield latency
    yield _counter(
        "wattfleet_agent_duty_requests", "Requests with an answer or an error", None if duty is None else duty.requests
    )
    yield _counter(
        "wattfleet_agent_duty_missed",
        "Requests that were answered too late, or with an error",
        None if duty is None else duty.missed,
    )


def _gauge(name: str, text: str, value: float | None) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text)
    if value is not None:
        family.add_metric([], value)
    return family


def _counter(name: str, text: str, value: float | None) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text)
    if value is not None:
        family.add_metric([], value)
    return family
