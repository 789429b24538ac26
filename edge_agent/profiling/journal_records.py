"""The kinds of records in a journal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, get_args, get_type_hints

from wattfleet.choosing import ProfilingMethod
from wattfleet.errors import InvalidInputError
from wattfleet.modes import Measurement, PowerMode


def require_batch(batch: int | None) -> None:
    """Check a batch size; None means that it is not stated.

    Raises:
        InvalidInputError: the batch size is below 1.
    """
    if batch is not None and batch < 1:
        raise InvalidInputError(f"batch must be a whole number of samples, at least 1, not {batch}")


def require_above_zero(**figures: float) -> None:
    """Check that figures are finite and above 0.

    Raises:
        InvalidInputError: a figure is not finite, or not above 0.
    """
    for name, value in figures.items():
        if not 0 < value < float("inf"):
            raise InvalidInputError(f"{name} must be finite and above 0, not {value}")


@dataclass(frozen=True)
class ModeRecord:
    """A measured mode.

    Attributes:
        mode: the power mode, read back from the device.
        minibatch_ms: median time of a minibatch without the first one, ms.
        power_mw: median board power during training, after it has settled, mW.
        minibatch_spread: robust standard deviation of a single minibatch's time, as a share.
        power_spread: the same for a single power sample.
        minibatches: number of minibatches used for `minibatch_ms`.
        power_samples: number of samples used for `power_mw`.
        seconds: time spent measuring, device-clock seconds.
        fetch_stall_ms: median time that a minibatch waited for its data, ms; None if unknown.
        compute_ms: median time that it computed, ms; None if unknown.
        first_minibatch_ms: time of a training's first minibatch, ms; None if it was not measured, or an earlier version
            wrote the line.
        batch: samples in a minibatch; None for the header's number, as in lines written by earlier versions.

    Raises:
        InvalidInputError: the time or the power is not finite and above 0, or another figure is not finite and at least
            0.
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
    batch: int | None = None

    def __post_init__(self) -> None:
        require_batch(self.batch)
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
                raise InvalidInputError(f"{name} must be finite and at least 0, not {value}")

    @property
    def measurement(self) -> Measurement:
        """The record as a row of a profile."""
        return Measurement(self.mode, self.minibatch_ms, self.power_mw, self.batch)


@dataclass(frozen=True)
class Discarded:
    """A disturbed measurement, which no fit uses.

    Attributes:
        mode: the power mode.
        reason: what disturbed it.
        minibatches: minibatches that were trained for it.
        seconds: time spent on it, device-clock seconds.
        overloaded: whether the board got too hot or throttled; False if an earlier version wrote the line.
    """

    mode: PowerMode
    reason: str
    minibatches: int
    seconds: float
    overloaded: bool = False


@dataclass(frozen=True)
class RoundRecord:
    """Time and power of a mode observed in a round.

    Attributes:
        mode: the power mode.
        minibatch_ms: mean time of a minibatch, ms, without the first.
        power_mw: mean board power while training, mW.
        batch: samples in a minibatch; None for the header's number.
        first_minibatch_ms: time until the training's first minibatch had ended, ms; None if the app has not reported
            it.

    Raises:
        InvalidInputError: a time or the power is not finite and above 0.
    """

    mode: PowerMode
    minibatch_ms: float
    power_mw: float
    batch: int | None = None
    first_minibatch_ms: float | None = None

    def __post_init__(self) -> None:
        require_batch(self.batch)
        require_above_zero(minibatch_ms=self.minibatch_ms, power_mw=self.power_mw)
        if self.first_minibatch_ms is not None and not 0 <= self.first_minibatch_ms < float("inf"):
            raise InvalidInputError(f"first_minibatch_ms must be finite and at least 0, not {self.first_minibatch_ms}")

    @property
    def measurement(self) -> Measurement:
        """The record as a row of a profile."""
        return Measurement(self.mode, self.minibatch_ms, self.power_mw, self.batch)


@dataclass(frozen=True)
class Renewal:
    """The board or its workload has changed, so earlier records are no longer valid.

    Attributes:
        reason: how the change was noticed.
        modes: maximum number of modes to measure again.
    """

    reason: str
    modes: int


@dataclass(frozen=True)
class MethodRecord:
    """The method that selects the modes of the following records.

    Attributes:
        method: a value of `ProfilingMethod`.

    Raises:
        InvalidInputError: the method is unknown.
    """

    method: str

    def __post_init__(self) -> None:
        known = [str(method) for method in ProfilingMethod]
        if self.method not in known:
            raise InvalidInputError(f"the method must be one of {', '.join(known)}, not {self.method!r}")


Record = ModeRecord | Discarded | RoundRecord | Renewal | MethodRecord

# A line without a kind is a ModeRecord.
_KINDS: Mapping[str, type[Record]] = {
    "discarded": Discarded,
    "round": RoundRecord,
    "renewal": Renewal,
    "method": MethodRecord,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def to_line(record: Record) -> dict[str, Any]:
    """Return the record as a JSON object."""
    name = _NAMES.get(type(record))
    line = asdict(record) if name is None else {"kind": name, **asdict(record)}
    # An unstated batch is left out, so that earlier versions can read the line.
    return {key: value for key, value in line.items() if key != "batch" or value is not None}


def from_line(line: Mapping[str, Any]) -> Record:
    """Read a line that `to_line` wrote, in this version or an earlier one.

    Raises:
        KeyError: the kind is unknown, or the mode is missing.
        TypeError: a field is missing or unknown, or has another type.
        InvalidInputError: a figure is out of range.
    """
    values = dict(line)
    kind = _KINDS[values.pop("kind")] if "kind" in values else ModeRecord
    accepted = _ACCEPTED[kind]
    if kind not in (Renewal, MethodRecord):
        values["mode"] = _mode(values["mode"])
    for name, value in values.items():
        if type(value) not in accepted[name]:
            raise TypeError(f"{name} has another type")
        if isinstance(value, int | float) and not 0 <= value < math.inf:
            raise InvalidInputError(f"{name} must be finite and at least 0, not {value}")
    return kind(**values)


def _mode(knobs: Any) -> PowerMode:
    """Read a mode from a JSON list."""
    if not isinstance(knobs, list) or any(type(knob) is not int for knob in knobs):
        raise TypeError("a mode is a list of integers")
    mode = PowerMode(*knobs)
    if min(mode) < 0:
        raise InvalidInputError(f"mode must be at least 0, not {min(mode)}")
    return mode


def _accepted(hint: Any) -> frozenset[type]:
    """Return the types that a field's values may have; JSON may contain an integer for a float."""
    types = frozenset(get_args(hint) or (hint,))
    return types | {int} if float in types else types


_ACCEPTED: Mapping[type[Record], Mapping[str, frozenset[type]]] = {
    kind: {name: _accepted(hint) for name, hint in get_type_hints(kind).items()} for kind in (ModeRecord, *_NAMES)
}
