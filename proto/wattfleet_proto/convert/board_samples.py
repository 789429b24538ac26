"""A board's sample, as a message and as a value."""

from __future__ import annotations

import math

from wattfleet_proto.board_sample import BoardSample
from wattfleet_proto.convert.modes import mode_from_message, mode_to_message
from wattfleet_proto.v1 import session_pb2

_LARGEST = {
    "power_w": 10_000.0,
    "temperature_c": 200.0,
    "throttle_events": 2.0**53,
    "fan_share": 1.0,
    "gpu_use_share": 1.0,
    "energy_j": 1e15,
}
"""Largest plausible values; the smallest is 0, and -100 for temperatures."""

_COLDEST_C = -100.0


def board_sample_to_message(sample: BoardSample) -> session_pb2.BoardSample:
    """Convert to a message."""
    known = {name: value for name in _LARGEST if (value := getattr(sample, name)) is not None}
    mode = None if sample.mode is None else mode_to_message(sample.mode)
    return session_pb2.BoardSample(mode=mode, **known)


def board_sample_from_message(message: session_pb2.BoardSample) -> BoardSample:
    """Convert from a message; a value that no board can have counts as not reported.

    Raises:
        InvalidInputError: the mode has a knob that no board can have.
    """
    known = {name: getattr(message, name) for name in _LARGEST if message.HasField(name)}  # type: ignore[arg-type]
    plausible = {name: value for name, value in known.items() if _is_plausible(name, value)}
    return BoardSample(mode=mode_from_message(message.mode) if message.HasField("mode") else None, **plausible)


def _is_plausible(name: str, value: float) -> bool:
    lowest = _COLDEST_C if name == "temperature_c" else 0.0
    return math.isfinite(value) and lowest <= value <= _LARGEST[name]
