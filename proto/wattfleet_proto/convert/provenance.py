"""The provenance of figures as a message."""

from __future__ import annotations

from wattfleet.errors import InvalidInputError
from wattfleet_proto.v1 import power_pb2

_NAMES = {
    power_pb2.PROVENANCE_SIMULATED: "simulated",
    power_pb2.PROVENANCE_REPLAYED: "replayed",
    power_pb2.PROVENANCE_HARDWARE: "hardware",
}
_VALUES = {name: value for value, name in _NAMES.items()}


def provenance_to_message(provenance: str) -> power_pb2.Provenance.ValueType:
    """Convert `simulated`, `replayed` or `hardware` into its enum value."""
    return _VALUES[provenance]


def provenance_from_message(message: power_pb2.Provenance.ValueType) -> str:
    """Read the provenance from its enum value.

    Raises:
        InvalidInputError: it is unset or unknown.
    """
    if message not in _NAMES:
        raise InvalidInputError("the provenance is missing: a device's figures are simulated, replayed or hardware")
    return _NAMES[message]
