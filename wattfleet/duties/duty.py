"""A duty of a device: inference requests that it has to answer within a latency. Training has to wait for it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from wattfleet.duties.arrivals import Arrivals, arrivals_from_content, require_number
from wattfleet.errors import InvalidInputError
from wattfleet.modes import require_workload_name

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
