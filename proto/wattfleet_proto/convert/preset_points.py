"""The presets of a board, as messages and as values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from wattfleet.errors import InvalidInputError
from wattfleet_proto.convert.fronts import front_from_message, front_to_message
from wattfleet_proto.preset_point import MAX_PRESETS, PresetPoint
from wattfleet_proto.v1 import power_pb2


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
