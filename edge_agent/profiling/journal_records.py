"""What a journal holds: one kind of record for everything that can happen to a mode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from wattfleet.errors import InvalidInputError
from wattfleet.modes import Measurement, PowerMode


def require_above_zero(**figures: float) -> None:
    """Make sure that figures can be learnt from and stored.

    Raises:
        InvalidInputError: one is not finite, or not above 0.
    """
    for name, value in figures.items():
        if not 0 < value < float("inf"):
            raise InvalidInputError(f"{name} has to be finite and above 0, not {value}")


@dataclass(frozen=True)
class ModeRecord:
    """A measured mode.

    Attributes:
        mode: the power mode, read back from the device.
        minibatch_ms: median time of a minibatch, ms, the first one dropped.
        power_mw: median board power while training, mW, once it had settled.
        minibatch_spread: robust standard deviation of a single minibatch's time, as a share.
        power_spread: the same of a single power sample.
        minibatches: minibatches that `minibatch_ms` rests on.
        power_samples: samples that `power_mw` rests on.
        seconds: what measuring took, device-clock seconds.
        fetch_stall_ms: median time that a minibatch waited for its data, ms; None where the workload does not say.
        compute_ms: median time that it computed, ms; None where the workload does not say.
        first_minibatch_ms: time of the first minibatch, ms; None where it was no training's first, or in a line of an
            earlier version.

    Raises:
        InvalidInputError: the time or the power is not finite and above 0, or another figure not finite and 0 or more.
    """

    mode: PowerMode
    minibatch_ms: float
    power_mw: float
    minibatch_spread: float
    power_spread: float
    minibatches: int
    power_samples: int
    seconds: float
    fetch_stall_ms: float | None = None
    compute_ms: float | None = None
    first_minibatch_ms: float | None = None

    def __post_init__(self) -> None:
        require_above_zero(minibatch_ms=self.minibatch_ms, power_mw=self.power_mw)
        for name in (
            "minibatch_spread",
            "power_spread",
            "seconds",
            "fetch_stall_ms",
            "compute_ms",
            "first_minibatch_ms",
        ):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise InvalidInputError(f"{name} has to be finite and 0 or more, not {value}")

    @property
    def measurement(self) -> Measurement:
        """The row of a profile."""
        return Measurement(self.mode, self.minibatch_ms, self.power_mw)


@dataclass(frozen=True)
class Discarded:
    """A measurement that was given up because something disturbed it; no fit uses it.

    Attributes:
        mode: the power mode.
        reason: what disturbed it.
        minibatches: minibatches that were trained for it.
        seconds: what it took, device-clock seconds.
        overloaded: whether the board got too hot or throttled itself; a line of an earlier version does not say so.
    """

    mode: PowerMode
    reason: str
    minibatches: int
    seconds: float
    overloaded: bool = False


@dataclass(frozen=True)
class RoundRecord:
    """What a round's training showed of its mode.

    Attributes:
        mode: the power mode.
        minibatch_ms: mean time of a minibatch, ms, the first one left out.
        power_mw: mean board power while training, mW.

    Raises:
        InvalidInputError: the time or the power is not finite and above 0.
    """

    mode: PowerMode
    minibatch_ms: float
    power_mw: float

    def __post_init__(self) -> None:
        require_above_zero(minibatch_ms=self.minibatch_ms, power_mw=self.power_mw)

    @property
    def measurement(self) -> Measurement:
        """The row of a profile."""
        return Measurement(self.mode, self.minibatch_ms, self.power_mw)


@dataclass(frozen=True)
class Renewal:
    """The board or its work has changed: what was recorded before no longer counts.

    Attributes:
        reason: what showed it.
        modes: modes to measure anew, at most.
    """

    reason: str
    modes: int


Record = ModeRecord | Discarded | RoundRecord | Renewal

# A line that names no kind is a measured mode.
_KINDS: Mapping[str, type[Record]] = {"discarded": Discarded, "round": RoundRecord, "renewal": Renewal}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def to_line(record: Record) -> dict[str, Any]:
    """The record as a JSON object."""
    name = _NAMES.get(type(record))
    return asdict(record) if name is None else {"kind": name, **asdict(record)}


def from_line(line: Mapping[str, Any]) -> Record:
    """What `to_line` wrote, in this version or an earlier one.

    Raises:
        KeyError: no such kind of record, or a measurement without its mode.
        TypeError: a field is missing or no number, or there is one too many.
        InvalidInputError: a figure is out of range.
    """
    values = dict(line)
    kind = _KINDS[values.pop("kind")] if "kind" in values else ModeRecord
    if kind is not Renewal:
        values["mode"] = PowerMode(*values["mode"])
    return kind(**values)
