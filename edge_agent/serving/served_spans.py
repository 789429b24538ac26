"""Records what a simulated board served and trained, span by span, in a file for reports."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from edge_agent.devices.virtual.served_duty import ServedDuty
from wattfleet.modes import PowerMode

_log = logging.getLogger(__name__)

MAX_BYTES = 256_000_000
"""Maximum size of the file; it holds about ten million requests."""


@dataclass(frozen=True)
class ServedSpan:
    """A period in which a board served requests in one power mode. All times are seconds of the board's clock.

    Attributes:
        begin_s: the start.
        end_s: the end.
        mode: the power mode.
        batch: largest number of requests in a batch.
        is_training: whether minibatches were trained between the requests.
        power_mw: mean power, mW.
        arrival_s: when each answered request arrived.
        latency_ms: time from the arrival to the answer, ms.
        minibatch_end_s: when each minibatch ended.
    """

    begin_s: float
    end_s: float
    mode: PowerMode
    batch: int
    is_training: bool
    power_mw: float
    arrival_s: list[float]
    latency_ms: list[float]
    minibatch_end_s: list[float]

    @classmethod
    def of(cls, run: ServedDuty, mode: PowerMode, batch: int, is_training: bool) -> ServedSpan:
        """Make the span of a period of service."""
        return cls(
            begin_s=run.begin_s,
            end_s=run.begin_s + run.duration_s,
            mode=mode,
            batch=batch,
            is_training=is_training,
            power_mw=run.power_mw,
            arrival_s=run.arrival_s.round(4).tolist(),
            latency_ms=run.latency_ms.round(3).tolist(),
            minibatch_end_s=run.minibatch_end_s.round(4).tolist(),
        )


class SpanFile:
    """Appends spans to a file, which is emptied when the agent starts.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes = 0

    def append(self, span: ServedSpan) -> None:
        """Write a span. If that fails, log it and write no more spans."""
        if self._bytes >= MAX_BYTES:
            return
        line = json.dumps(asdict(span), separators=(",", ":")) + "\n"
        try:
            with self._path.open("a" if self._bytes else "w", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            _log.error("%s: cannot be written: %s; no further requests are recorded", self._path, error.strerror)
            self._bytes = MAX_BYTES
        self._bytes += len(line)

    def read(self) -> Iterator[ServedSpan]:
        """Return all spans in the file; none if there is no file."""
        if self._path.exists():
            with self._path.open(encoding="utf-8") as file:
                for line in file:
                    content = json.loads(line)
                    yield ServedSpan(**{**content, "mode": PowerMode(*content["mode"])})
