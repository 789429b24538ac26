"""Measured modes as messages."""

from __future__ import annotations

from collections.abc import Iterable

from wattfleet.errors import InvalidInputError
from wattfleet.modes import Measurement, Profile
from wattfleet_proto.convert.modes import mode_from_message, mode_to_message
from wattfleet_proto.session_limits import MAX_SHARED_MODES
from wattfleet_proto.v1 import session_pb2


def measured_to_message(measured: Measurement) -> session_pb2.MeasuredMode:
    """Convert a measured mode into its message."""
    return session_pb2.MeasuredMode(
        mode=mode_to_message(measured.mode),
        minibatch_ms=measured.minibatch_ms,
        power_mw=measured.power_mw,
        batch=measured.batch or 0,
    )


def measured_from_messages(messages: Iterable[session_pb2.MeasuredMode]) -> tuple[Measurement, ...]:
    """Read what one device has measured of a workload.

    Raises:
        InvalidInputError: there are too many modes, one is measured twice with the same batch, or a value is missing or
            out of range.
    """
    found = tuple(
        Measurement(mode_from_message(each.mode), each.minibatch_ms, each.power_mw, each.batch) for each in messages
    )
    if len(found) > MAX_SHARED_MODES:
        raise InvalidInputError(f"a device shares at most {MAX_SHARED_MODES} measured modes, not {len(found):,}")
    Profile.of(found)  # checks the values
    return found
