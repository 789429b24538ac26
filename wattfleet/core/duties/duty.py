"""A duty of a device: inference requests that it has to answer within a latency. Training has to wait for it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
from numpy.typing import NDArray

from wattfleet.core.budgets import DaySpan, minute_of_day, require_whole_day
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import ModeArray, PowerMode, require_workload_name

# --- Arrivals ---------------------------------------------------------------------------------------------------------
# The rate at which requests arrive: constant, by a daily schedule, or as measured by the device.


MAX_ARRIVALS_PER_S = 1e5
"""Largest plausible number of requests per second on one device."""


@dataclass(frozen=True)
class ConstantArrivals:
    """The same rate at all times.

    Attributes:
        per_s: requests per second, above 0.

    Raises:
        InvalidInputError: the rate is not a number above 0, or beyond `MAX_ARRIVALS_PER_S`.
    """

    per_s: float

    def __post_init__(self) -> None:
        _require_rate("arrivals", self.per_s)

    def rate(self, now: datetime, measured_per_s: float | None) -> float:
        """The constant rate, requests per second."""
        return self.per_s

    def content(self) -> dict[str, Any]:
        """The arrivals as a JSON object."""
        return {"per_s": self.per_s}


@dataclass(frozen=True)
class ArrivalSpan(DaySpan):
    """A time span of every day, and its arrivals.

    Attributes:
        per_s: requests per second in the span; 0 for none.

    Raises:
        InvalidInputError: a minute is out of range, the span is empty, or the rate is not 0 to `MAX_ARRIVALS_PER_S`.
    """

    per_s: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_rate(str(self), self.per_s, or_none=True)


@dataclass(frozen=True)
class DailyArrivals:
    """The same spans every day, by the wall clock of a time zone.

    Attributes:
        zone: time zone of the wall clock.
        spans: spans that together cover every minute of the day exactly once.

    Raises:
        InvalidInputError: some minutes are in no span or in several, or no requests ever arrive.
    """

    zone: ZoneInfo
    spans: tuple[ArrivalSpan, ...]

    def __post_init__(self) -> None:
        require_whole_day(self.spans, "arrivals", "rates of arrivals")
        if not any(span.per_s for span in self.spans):
            raise InvalidInputError("the schedule has no arrivals at all: remove the duty instead")

    @classmethod
    def of(cls, zone: ZoneInfo, spans: Mapping[str, float]) -> DailyArrivals:
        """Parse a schedule of spans such as `{"06:00-18:00": 30, "18:00-06:00": 2}`.

        Raises:
            InvalidInputError: a span has another form, a rate is out of range, or the day has gaps or overlaps.
        """
        return cls(zone, tuple(ArrivalSpan(*DaySpan.minutes_of(text), per_s) for text, per_s in spans.items()))

    def rate(self, now: datetime, measured_per_s: float | None) -> float:
        """The rate of the current span, requests per second.

        Raises:
            InvalidInputError: the time has no offset.
        """
        minute = minute_of_day(now, self.zone)
        return next(span.per_s for span in self.spans if span.holds(minute))

    def content(self) -> dict[str, Any]:
        """The arrivals as a JSON object."""
        return {"zone": self.zone.key, "schedule": {str(span): span.per_s for span in self.spans}}


@dataclass(frozen=True)
class MeasuredArrivals:
    """The rate that the device has measured.

    Attributes:
        assumed_per_s: requests per second until it has measured any, above 0.

    Raises:
        InvalidInputError: the rate is not a number above 0, or beyond `MAX_ARRIVALS_PER_S`.
    """

    assumed_per_s: float

    def __post_init__(self) -> None:
        _require_rate("assumed arrivals", self.assumed_per_s)

    def rate(self, now: datetime, measured_per_s: float | None) -> float:
        """The measured rate if there is one, otherwise the assumed rate, requests per second."""
        return self.assumed_per_s if measured_per_s is None else measured_per_s

    def content(self) -> dict[str, Any]:
        """The arrivals as a JSON object."""
        return {"assumed_per_s": self.assumed_per_s}


Arrivals = ConstantArrivals | DailyArrivals | MeasuredArrivals


def arrivals_from_content(content: object) -> Arrivals:
    """Create arrivals from the JSON object that their `content` returned.

    Raises:
        InvalidInputError: a key is unknown or missing, or a value is out of range.
    """
    if isinstance(content, dict):
        keys = set(content)
        if keys == {"per_s"}:
            return ConstantArrivals(require_number("per_s", content["per_s"]))
        if keys == {"assumed_per_s"}:
            return MeasuredArrivals(require_number("assumed_per_s", content["assumed_per_s"]))
        if keys == {"zone", "schedule"} and isinstance(content["schedule"], dict):
            spans = {str(text): require_number(str(text), per_s) for text, per_s in content["schedule"].items()}
            return DailyArrivals.of(_zone(content["zone"]), spans)
    raise InvalidInputError('arrivals must have the keys "per_s", or "assumed_per_s", or "zone" and "schedule"')


def require_number(what: str, value: object) -> float:
    """Check that a JSON value is a number, and return it.

    Raises:
        InvalidInputError: it is not a number, or is too large.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidInputError(f"{what} must be a number, not {str(value)[:40]!r}")
    try:
        return float(value)
    except OverflowError:
        raise InvalidInputError(f"{what} is too large a number: give a smaller one") from None


def _zone(name: object) -> ZoneInfo:
    try:
        return ZoneInfo(str(name))
    except (KeyError, ValueError, OSError):
        raise InvalidInputError(f"{str(name)[:40]!r} is not a time zone: write one as Europe/Berlin") from None


def _require_rate(what: str, per_s: float, or_none: bool = False) -> None:
    least_holds = per_s >= 0 if or_none else per_s > 0
    if not (math.isfinite(per_s) and least_holds and per_s <= MAX_ARRIVALS_PER_S):
        least = "0" if or_none else "above 0"
        raise InvalidInputError(
            f"{what}: requests per second must be {least} to {MAX_ARRIVALS_PER_S:,g}, not {per_s:g}"
        )


# --- Duty -------------------------------------------------------------------------------------------------------------

MAX_LATENCY_MS = 600_000.0
"""Upper bound of a duty's latency limit, ms."""

_KEYS = {"workload", "arrivals", "latency_ms", "quantile"}


@dataclass(frozen=True)
class Duty:
    """Requests that a device answers; they always have priority over training.

    Attributes:
        workload: name of the inference workload, such as `mobilenet-camera`.
        arrivals: how many requests arrive per second.
        latency_ms: the limit from a request's arrival to its answer, ms.
        quantile: the share of requests that have to be answered within the limit, 0.5 to below 1.

    Raises:
        InvalidInputError: the name is not a valid workload name, or a number is out of range.
    """

    workload: str
    arrivals: Arrivals
    latency_ms: float
    quantile: float = 0.95

    def __post_init__(self) -> None:
        require_workload_name(self.workload)
        if not 0 < self.latency_ms <= MAX_LATENCY_MS:
            raise InvalidInputError(f"latency_ms must be above 0 to {MAX_LATENCY_MS:,g} ms, not {self.latency_ms:g}")
        if not 0.5 <= self.quantile < 1:
            raise InvalidInputError(f"quantile must be 0.5 to below 1, such as 0.95, not {self.quantile:g}")

    def arrivals_per_s(self, now: datetime, measured_per_s: float | None = None) -> float:
        """The requests that arrive per second.

        Args:
            now: with a UTC offset.
            measured_per_s: the rate that the device measures; None if it has not measured yet.

        Raises:
            InvalidInputError: the time has no offset.
        """
        return self.arrivals.rate(now, measured_per_s)

    def to_json(self) -> str:
        """The duty as one line of JSON, for `from_json`."""
        content = {
            "workload": self.workload,
            "arrivals": self.arrivals.content(),
            "latency_ms": self.latency_ms,
            "quantile": self.quantile,
        }
        return json.dumps(content)

    @classmethod
    def from_json(cls, text: str) -> Duty:
        """Parse a duty that `to_json` wrote.

        Raises:
            InvalidInputError: it is not a JSON object, a key is unknown or missing, or a value is out of range.
        """
        try:
            content: Any = json.loads(text)
        except (ValueError, RecursionError):
            raise InvalidInputError("a duty must be a JSON object") from None
        if not isinstance(content, dict):
            raise InvalidInputError("a duty must be a JSON object")
        if unknown := sorted(map(str, set(content) - _KEYS)):
            raise InvalidInputError(f"a duty has the unknown key {unknown[0][:40]!r}: use {', '.join(sorted(_KEYS))}")
        if missing := sorted(_KEYS - {"quantile"} - set(content)):
            raise InvalidInputError(f"a duty needs the key {missing[0]!r}")
        if not isinstance(content["workload"], str):
            raise InvalidInputError("workload must be a text")
        return cls(
            content["workload"],
            arrivals_from_content(content["arrivals"]),
            require_number("latency_ms", content["latency_ms"]),
            require_number("quantile", content.get("quantile", cls.quantile)),
        )


# --- Slowdown ---------------------------------------------------------------------------------------------------------
# An upper bound of a batch's slowdown in another power mode, from the clocks alone.


def largest_slowdown(measured: PowerMode, other: PowerMode) -> float:
    """The largest factor by which any work can take longer in another mode than in the measured one.

    Work that needs the CPU, the GPU and the memory in any proportion, at the same time or in turn, slows down at most
    as much as the part that slows down most. Work on the CPU may use all cores. Below 1 where every clock is higher.

    Args:
        measured: the mode in which the time is known.
        other: the mode to bound the time in.
    """
    cpu = measured.cpu_khz / other.cpu_khz
    cores = max(1.0, measured.cores / other.cores)
    return max(cpu * cores, measured.gpu_hz / other.gpu_hz, measured.mem_hz / other.mem_hz)


def largest_slowdowns(measured: PowerMode, others: ModeArray) -> NDArray[np.float64]:
    """The results of `largest_slowdown` for `[n, 4]` other modes, `[n]`."""
    cores, cpu, gpu, mem = (np.array(measured, dtype=np.float64) / others).T
    return np.asarray(np.maximum.reduce([cpu * np.maximum(1.0, cores), gpu, mem]))


# --- Kept duty --------------------------------------------------------------------------------------------------------
# The figures that a device reports about how it keeps its duty.

LATENCY_LIMITS_MS = (5.0, 10.0, 20.0, 35.0, 50.0, 75.0, 100.0, 150.0, 200.0, 350.0, 500.0, 750.0, 1e3, 2e3, 5e3, 1e4)
"""Upper limits of the histogram of latencies, ms, ascending; one further count is for all later answers."""

_MAX_REASON = 500


@dataclass(frozen=True)
class KeptDuty:
    """A duty and how well it is kept. Counters start at 0 when the agent starts or the duty changes.

    Attributes:
        workload: name of the inference workload.
        latency_ms: the duty's limit, ms.
        quantile: the share of requests that have to be answered within the limit.
        arrivals_per_s: requests per second in the last half minute.
        requests: number of requests that got an answer or an error.
        missed: number of requests that were answered later than the limit, or got an error.
        latency_counts: histogram of the answers' latencies over `LATENCY_LIMITS_MS`; the last count is for all later
            answers.
        latency_sum_ms: sum of the latencies of all answers, ms.
        latency_at_quantile_ms: latency of the latest answers at the duty's quantile, ms; None before the first answer.
        batch: requests in the latest batch; 0 before the first.
        training_share: the share of the last half minute in which minibatches had the device, 0 to 1.
        servers: inference servers that are connected.
        waits: why a training waits, as text for people; empty if none does.

    Raises:
        InvalidInputError: a figure is one that no device can have.
    """

    workload: str
    latency_ms: float
    quantile: float
    arrivals_per_s: float
    requests: int
    missed: int
    latency_counts: tuple[int, ...]
    latency_sum_ms: float
    latency_at_quantile_ms: float | None
    batch: int
    training_share: float
    servers: int
    waits: str = ""

    def __post_init__(self) -> None:
        require_workload_name(self.workload)
        figures = (self.latency_ms, self.arrivals_per_s, self.latency_sum_ms, self.latency_at_quantile_ms or 0.0)
        is_plausible = (
            all(0 <= each < math.inf for each in figures)
            and 0 < self.quantile < 1
            and 0 <= self.training_share <= 1
            and min(self.requests, self.missed, self.batch, self.servers, *self.latency_counts) >= 0
            and len(self.latency_counts) == len(LATENCY_LIMITS_MS) + 1
            and len(self.waits) <= _MAX_REASON
        )
        if not is_plausible:
            raise InvalidInputError(f"the figures of the duty {self.workload!r} are not plausible")

    @property
    def missed_share(self) -> float:
        """The share of requests that missed the limit, 0 to 1; 0 before the first."""
        return min(1.0, self.missed / max(1, self.requests))

    def lines(self) -> dict[str, str]:
        """The figures as text, by their labels."""
        limit = f"{self.workload}: {100 * self.quantile:g}% of requests within {self.latency_ms:g} ms"
        if not self.servers:
            return {"duty": limit, "requests": "no inference server is connected"}
        latency = self.latency_at_quantile_ms
        answers = "none answered yet" if latency is None else f"{100 * self.quantile:g}% within {latency:.0f} ms"
        lines = {
            "duty": limit,
            "requests": f"{self.arrivals_per_s:.1f} per second, in batches of {self.batch or '?'}; {answers}",
            "missed": f"{self.missed:,} of {self.requests:,} ({self.missed_share:.1%})",
            "training": f"{self.training_share:.0%} of the last half minute",
        }
        if self.waits:
            lines["training"] += f"; it waits: {self.waits}"
        return lines
