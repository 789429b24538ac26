"""Device states and the phases of grants as messages."""

from __future__ import annotations

from wattfleet.errors import InvalidInputError
from wattfleet_proto.device_state import DeviceState, GrantPhase
from wattfleet_proto.v1 import session_pb2

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
