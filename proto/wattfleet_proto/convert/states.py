"""Converts what devices report of their state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from wattfleet.core.errors import InvalidInputError
from wattfleet_proto.convert.by_name import message_of, values_of
from wattfleet_proto.convert.plans import front_from_message, front_to_message
from wattfleet_proto.convert.workloads import mode_from_message
from wattfleet_proto.device_state import MAX_PRESETS, READINGS, BoardSample, DeviceState, GrantPhase, PresetPoint
from wattfleet_proto.v1 import power_pb2, session_pb2

# --- Board samples ----------------------------------------------------------------------------------------------------
# A board's sample, as a message and as a value.


def board_sample_to_message(sample: BoardSample) -> session_pb2.BoardSample:
    """Convert to a message."""
    return message_of(session_pb2.BoardSample, sample)


def board_sample_from_message(message: session_pb2.BoardSample) -> BoardSample:
    """Convert from a message; a value that no board can have counts as not reported.

    Raises:
        InvalidInputError: the mode has a knob that no board can have.
    """
    known = values_of(message, leave_out=("mode",))
    plausible = {
        name: value
        for name, reading in READINGS.items()
        if (value := known[name]) is not None and reading.is_plausible(value)
    }
    return BoardSample(mode=mode_from_message(message.mode) if message.HasField("mode") else None, **plausible)


# --- Preset points ----------------------------------------------------------------------------------------------------
# The presets of a board, as messages and as values.


def presets_to_messages(presets: Iterable[PresetPoint]) -> list[power_pb2.PresetPoint]:
    """Convert to messages."""
    return [
        power_pb2.PresetPoint(
            name=each.name, point=front_to_message(each.front).points[0], is_measured=each.is_measured
        )
        for each in presets
    ]


def presets_from_messages(messages: Sequence[power_pb2.PresetPoint]) -> tuple[PresetPoint, ...]:
    """Read presets from messages.

    Raises:
        InvalidInputError: there are too many, or one is invalid (see `PresetPoint` and `Front`).
    """
    if len(messages) > MAX_PRESETS:
        raise InvalidInputError(f"a board has up to {MAX_PRESETS} presets, not {len(messages)}")
    return tuple(
        PresetPoint(each.name, front_from_message(power_pb2.Front(points=[each.point])), each.is_measured)
        for each in messages
    )


# --- Device states ----------------------------------------------------------------------------------------------------
# Device states and the phases of grants as messages.

_TO_MESSAGE = {state: session_pb2.DeviceState.Value(f"DEVICE_STATE_{state.name}") for state in DeviceState}
_FROM_MESSAGE = {message: state for state, message in _TO_MESSAGE.items()}
_PHASE_TO_MESSAGE = {phase: session_pb2.GrantPhase.Value(f"GRANT_PHASE_{phase.name}") for phase in GrantPhase}
_PHASE_FROM_MESSAGE = {message: phase for phase, message in _PHASE_TO_MESSAGE.items()}


def state_to_message(state: DeviceState) -> session_pb2.DeviceState.ValueType:
    """Convert a device's state into its message value."""
    return _TO_MESSAGE[state]


def state_from_message(message: session_pb2.DeviceState.ValueType) -> DeviceState:
    """Read a device's state from its message value.

    Raises:
        InvalidInputError: the state is unset, or unknown to this version.
    """
    if message not in _FROM_MESSAGE:
        known = ", ".join(state.value for state in DeviceState)
        raise InvalidInputError(f"unknown device state {message}: expected one of {known}")
    return _FROM_MESSAGE[message]


def phase_to_message(phase: GrantPhase) -> session_pb2.GrantPhase.ValueType:
    """Convert a grant's phase into its message value."""
    return _PHASE_TO_MESSAGE[phase]


def phase_from_message(message: session_pb2.GrantPhase.ValueType) -> GrantPhase:
    """Read a grant's phase from its message value.

    Raises:
        InvalidInputError: the phase is unset, or unknown to this version.
    """
    if message not in _PHASE_FROM_MESSAGE:
        known = ", ".join(phase.value for phase in GrantPhase)
        raise InvalidInputError(f"unknown phase of a grant {message}: expected one of {known}")
    return _PHASE_FROM_MESSAGE[message]
