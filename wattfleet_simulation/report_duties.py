"""Reports how the boards of a simulation kept their duties: what each board served and trained, on its own clock."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_agent.devices.virtual.span_file import SpanFile
from edge_agent.paths import SERVED_FILE
from edge_agent.serving.served_spans import ServedSpan
from edge_agent.serving.simulated_duty import SWITCH_MS, simulated_duty
from wattfleet.duties import ConstantArrivals
from wattfleet_simulation.devices import SimulatedDevice

Values = NDArray[np.float64]

_MOST_BUCKETS = 600
"""Number of time intervals in a plot; each is at least a second long."""

_NEGLIGIBLE_S = 0.01

_MOST_MISSED = 1000
"""How many late requests of a board a plot shows; those with the longest latency first."""


def duties_of(
    devices: Sequence[SimulatedDevice], state_directories: Mapping[str, Path], runs: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the report on the duties, by device; empty if there are none.

    Args:
        devices: the fleet.
        state_directories: each agent's state directory.
        runs: the runs in the report.
    """
    found = {}
    for device in devices:
        if device.duty is not None:
            spans = list(SpanFile(state_directories[device.device_id] / SERVED_FILE, ServedSpan).read())
            found[device.device_id] = _kept(device.duty, spans) | _training(device.device_id, spans, runs)
    return found


def _kept(text: str, spans: Sequence[ServedSpan]) -> dict[str, Any]:
    """Return a duty and how its requests were answered."""
    duty = simulated_duty(text)
    assert isinstance(duty.arrivals, ConstantArrivals), "simulated requests have a constant rate"
    at_s, latency_ms = _joined(spans, "arrival_s"), _joined(spans, "latency_ms")
    beside, alone = ([span for span in spans if span.is_training is wanted] for wanted in (True, False))
    late = np.flatnonzero(latency_ms > duty.latency_ms)
    shown = np.sort(late[np.argsort(-latency_ms[late], kind="stable")][:_MOST_MISSED])
    return {
        "duty": text,
        "network": duty.workload,
        "arrivals_per_s": duty.arrivals.per_s,
        "latency_ms": duty.latency_ms,
        "quantile": duty.quantile,
        "switch_ms": SWITCH_MS,
        "requests": len(latency_ms),
        "missed": len(late),
        "in_time_share": float((latency_ms <= duty.latency_ms).mean()) if len(latency_ms) else None,
        "beside_training": _quantiles(_joined(beside, "latency_ms")),
        "at_rest": _quantiles(_joined(alone, "latency_ms")),
        "spans": list(_merged(spans)),
        "series": _series(spans, at_s, latency_ms),
        "late": {"at_s": at_s[shown].round(2).tolist(), "latency_ms": latency_ms[shown].round(1).tolist()},
    }


def _training(device_id: str, spans: Sequence[ServedSpan], runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what was trained while answering requests, and the ratio of planned to observed seconds per epoch."""
    trained = [span for span in spans if span.is_training]
    ratios = [
        part["predicted_epoch_s"] / part["observed_epoch_s"]
        for run in runs
        for one in run["rounds"]
        for part in one["assignments"]
        if part["device"] == device_id and part["observed_epoch_s"] is not None and not part["length_assumed"]
    ]
    return {
        "minibatches": sum(len(span.minibatch_end_s) for span in trained),
        "training_s": sum(span.end_s - span.begin_s for span in trained),
        "rest_s": sum(span.end_s - span.begin_s for span in spans if not span.is_training),
        "training_of_plan": float(np.median(ratios)) if ratios else None,
        "observed_trainings": len(ratios),
    }


def _quantiles(latency_ms: Values) -> dict[str, float | None]:
    names = {"p50_ms": 0.5, "p95_ms": 0.95, "p99_ms": 0.99}
    return {name: float(np.quantile(latency_ms, share)) if len(latency_ms) else None for name, share in names.items()}


def _merged(spans: Sequence[ServedSpan]) -> Iterator[dict[str, Any]]:
    """Merge spans of the same mode and kind that follow each other without a gap."""
    members: list[ServedSpan] = []
    for span, following in zip_longest(spans, spans[1:]):
        members.append(span)
        if following is None or not _continues(span, following):
            yield {
                "begin_s": members[0].begin_s,
                "end_s": span.end_s,
                "mode": span.mode._asdict(),
                "batch": span.batch,
                "is_training": span.is_training,
            }
            members.clear()


def _continues(span: ServedSpan, following: ServedSpan) -> bool:
    alike = (span.mode, span.is_training) == (following.mode, following.is_training)
    return alike and following.begin_s - span.end_s < _NEGLIGIBLE_S


def _series(spans: Sequence[ServedSpan], at_s: Values, latency_ms: Values) -> dict[str, Any]:
    """Return latencies and minibatches in intervals of equal length; intervals without requests are null."""
    begin_s = math.floor(min((span.begin_s for span in spans), default=0.0))
    end_s = max((span.end_s for span in spans), default=0.0)
    width_s = max(1.0, float(math.ceil((end_s - begin_s) / _MOST_BUCKETS)))
    edges = np.arange(begin_s, end_s + width_s, width_s)
    order = np.argsort(at_s, kind="stable")
    cuts = np.searchsorted(at_s[order], edges)
    parts = [latency_ms[order[first:last]] for first, last in pairwise(cuts.tolist())]
    ended = np.histogram(_joined(spans, "minibatch_end_s"), edges)[0]
    return {
        "width_s": width_s,
        "at_s": (edges[:-1] + width_s / 2).tolist(),
        **{
            name: [round(float(np.quantile(part, share)), 2) if len(part) else None for part in parts]
            for name, share in (("p50_ms", 0.5), ("p95_ms", 0.95))
        },
        "minibatches_per_s": (ended / width_s).round(3).tolist(),
    }


def _joined(spans: Sequence[ServedSpan], column: str) -> Values:
    return np.array([value for span in spans for value in getattr(span, column)], dtype=np.float64)
