"""A named mode of a board with its prediction, as agents report it with a front."""

from __future__ import annotations

from dataclasses import dataclass

from wattfleet.choosing import Front
from wattfleet.errors import InvalidInputError

MAX_PRESETS = 16
_MAX_NAME = 64


@dataclass(frozen=True)
class PresetPoint:
    """One of a board's presets, such as MAXN.

    Attributes:
        name: of the preset.
        front: of this mode alone.
        is_measured: whether the device has measured the mode.
    """

    name: str
    front: Front
    is_measured: bool

    def __post_init__(self) -> None:
        if not self.name.isprintable() or not 0 < len(self.name) <= _MAX_NAME:
            raise InvalidInputError(f"a preset's name has 1 to {_MAX_NAME} printable characters")
        if len(self.front) != 1:
            raise InvalidInputError(f"the preset {self.name} is one mode, not {len(self.front)}")
