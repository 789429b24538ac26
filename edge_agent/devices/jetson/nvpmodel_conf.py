"""NVIDIA's `nvpmodel.conf`: reads a board's preset modes, and adds a mode to a copy."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from edge_agent.devices.jetson.knobs import within
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import ModeSpace, PowerMode

_STANZA = re.compile(r"<\s*(\w+)((?:\s+\w+=\S+)*)\s*>")
_SETTING_WORDS = 3
_KINDS = {"FILE": 2, "CLOCK": 2, "HWMON": 3}
"""Words of an argument of each kind of parameter: its name and a path, for HWMON also a file below that path."""
_MASK_SUFFIX = "_PG_MASK"
_MAX_DIGITS = 20
"""Maximum of characters in a number, enough for 64 bits."""

SYSTEM_CONF = "/etc/nvpmodel.conf"
"""The system's own configuration."""

Argument = tuple[str, str]
"""A parameter and one of its arguments, such as `("GPU", "MAX_FREQ")`."""


class NvpmodelConfError(InvalidInputError):
    """An nvpmodel configuration cannot be parsed."""


@dataclass(frozen=True)
class NvpmodelMode:
    """A preset mode.

    Attributes:
        mode_id: its number.
        name: such as `MAXN`.
        settings: value by parameter and argument, in the order in which they are set; CPU in kHz, GPU and memory
            in Hz, -1 for no limit, and words such as `auto` for settings other than clocks.
    """

    mode_id: int
    name: str
    settings: Mapping[Argument, str]

    @property
    def gpu_masks(self) -> dict[str, int]:
        """Masks of the GPU's power gating by the name of their file, such as `tpc_pg_mask`; only a reboot sets them."""
        masks = {}
        for (_, argument), value in self.settings.items():
            if argument.endswith(_MASK_SUFFIX):
                with suppress(ValueError):
                    masks[argument.lower()] = int(value, 0)
        return masks


@dataclass(frozen=True)
class NvpmodelConf:
    """A configuration.

    Attributes:
        kinds: by parameter, FILE, CLOCK or HWMON.
        paths: the file to which each argument of each parameter is written; for HWMON, a folder and a file's name.
        modes: the modes in the order of their numbers.
        default: number of the mode that is used after installation.
    """

    kinds: Mapping[str, str]
    paths: Mapping[Argument, str]
    modes: tuple[NvpmodelMode, ...]
    default: int

    def mode_of_id(self, mode_id: int) -> NvpmodelMode:
        """Return the mode with a number.

        Raises:
            InvalidInputError: there is no such mode.
        """
        return self._find(lambda mode: mode.mode_id == mode_id, str(mode_id))

    def mode_of_name(self, name: str) -> NvpmodelMode:
        """Return the mode with a name.

        Raises:
            InvalidInputError: there is no such mode.
        """
        return self._find(lambda mode: mode.name == name, repr(name))

    def with_mode(self, name: str, settings: Mapping[Argument, str]) -> NvpmodelConf:
        """Return this configuration with one more mode at the end, and modes numbered without gaps.

        jetson-stats treats a mode's number as its position in the list, so with a gap it would choose the wrong mode.
        """
        modes = tuple(NvpmodelMode(place, mode.name, mode.settings) for place, mode in enumerate(self.modes))
        default = next((place for place, mode in enumerate(self.modes) if mode.mode_id == self.default), 0)
        return NvpmodelConf(self.kinds, self.paths, (*modes, NvpmodelMode(len(modes), name, settings)), default)

    def text(self) -> str:
        """Return the configuration in nvpmodel's format."""
        lines = []
        for parameter, kind in self.kinds.items():
            lines.append(f"< PARAM TYPE={kind} NAME={parameter} >")
            lines += [f"{argument} {path}" for (owner, argument), path in self.paths.items() if owner == parameter]
            lines.append("")
        for mode in self.modes:
            lines.append(f"< POWER_MODEL ID={mode.mode_id} NAME={mode.name} >")
            lines += [f"{parameter} {argument} {value}" for (parameter, argument), value in mode.settings.items()]
            lines.append("")
        return "\n".join([*lines, f"< PM_CONFIG DEFAULT={self.default} >", ""])

    def _find(self, wanted: Callable[[NvpmodelMode], bool], called: str) -> NvpmodelMode:
        for mode in self.modes:
            if wanted(mode):
                return mode
        offered = ", ".join(f"{mode.name} ({mode.mode_id})" for mode in self.modes)
        raise InvalidInputError(f"nvpmodel has no mode {called}; choose one of {offered}")


def parse_conf(text: str, name: str) -> NvpmodelConf:
    """Parse a configuration.

    Args:
        text: the file's text.
        name: the file's name, for messages.

    Raises:
        NvpmodelConfError: the text is not a valid configuration.
    """
    parser = _Parser(name)
    for number, line in enumerate(text.splitlines(), start=1):
        parser.take(number, line.partition("#")[0].strip())
    return parser.conf()


@dataclass
class _Parser:
    """Parses a configuration line by line; a stanza lasts until the next one."""

    name: str
    kinds: dict[str, str] = field(default_factory=dict)
    paths: dict[Argument, str] = field(default_factory=dict)
    modes: dict[int, tuple[str, dict[Argument, str]]] = field(default_factory=dict)
    default: int | None = None
    parameter: str | None = None
    settings: dict[Argument, str] | None = None
    number: int = 0

    def take(self, number: int, line: str) -> None:
        self.number = number
        if line.startswith("<"):
            self._begin(line)
        elif line and self.parameter is not None:
            self._argument(self.parameter, line.split())
        elif line and self.settings is not None:
            self._setting(self.settings, line.split())
        elif line:
            raise self._error("is outside any stanza")

    def conf(self) -> NvpmodelConf:
        if not self.modes:
            raise NvpmodelConfError(f"{self.name}: has no POWER_MODEL")
        if self.default is None:
            raise NvpmodelConfError(f"{self.name}: has no PM_CONFIG, which nvpmodel requires")
        modes = tuple(NvpmodelMode(mode_id, *self.modes[mode_id]) for mode_id in sorted(self.modes))
        return NvpmodelConf(self.kinds, self.paths, modes, self.default)

    def _begin(self, line: str) -> None:
        found = _STANZA.fullmatch(line)
        if found is None:
            raise self._error("is not a stanza such as < POWER_MODEL ID=0 NAME=MAXN >")
        kind = found[1]
        attributes = dict(pair.split("=", 1) for pair in found[2].split())
        self.parameter = self.settings = None
        if kind == "PARAM":
            self._begin_parameter(attributes)
        elif kind == "POWER_MODEL":
            mode_id = self._number(self._attribute(attributes, "ID"))
            if mode_id in self.modes:
                raise self._error(f"repeats the ID {mode_id}")
            self.settings = {}
            self.modes[mode_id] = (self._attribute(attributes, "NAME"), self.settings)
        elif kind == "PM_CONFIG":
            self.default = self._number(self._attribute(attributes, "DEFAULT"))
        elif kind != "FAN_CONFIG":
            # FAN_CONFIG is for nvfancontrol and does not affect modes.
            raise self._error(f"begins an unknown stanza {kind}")

    def _begin_parameter(self, attributes: Mapping[str, str]) -> None:
        name, kind = self._attribute(attributes, "NAME"), self._attribute(attributes, "TYPE")
        if kind not in _KINDS:
            raise self._error(f"has the TYPE {kind}; use one of {', '.join(_KINDS)}")
        if name in self.kinds:
            raise self._error(f"repeats the parameter {name}")
        self.kinds[name] = kind
        self.parameter = name

    def _argument(self, parameter: str, words: list[str]) -> None:
        if len(words) != _KINDS[self.kinds[parameter]] or not words[1].startswith("/"):
            raise self._error("is not an argument and a path")
        self.paths[parameter, words[0]] = " ".join(words[1:])

    def _setting(self, settings: dict[Argument, str], words: list[str]) -> None:
        if len(words) != _SETTING_WORDS:
            raise self._error("is not a parameter, an argument and a value")
        argument = words[0], words[1]
        if argument not in self.paths:
            raise self._error(f"sets {' '.join(argument)}, which no earlier PARAM defines")
        if self.kinds[words[0]] == "CLOCK":
            self._number(words[2])
        settings[argument] = words[2]

    def _attribute(self, attributes: Mapping[str, str], name: str) -> str:
        if name not in attributes:
            raise self._error(f"lacks {name}=")
        return attributes[name]

    def _number(self, word: str) -> int:
        if not re.fullmatch(r"-?\d+", word):
            raise self._error(f"has {word!r} instead of a number")
        if len(word) > _MAX_DIGITS:
            raise self._error(f"has a number of {len(word):,} characters")
        return int(word)

    def _error(self, what: str) -> NvpmodelConfError:
        return NvpmodelConfError(f"{self.name}, line {self.number}: {what}")


# --- Presets ----------------------------------------------------------------------------------------------------------
# Converts NVIDIA's preset modes to power modes of a board.


def is_cpu_clock(parameter: str) -> bool:
    """Return whether a parameter of an nvpmodel configuration is a CPU clock."""
    return parameter.startswith("CPU_") and parameter != "CPU_ONLINE"


def preset_mode(preset: NvpmodelMode, space: ModeSpace) -> PowerMode:
    """Return the power mode of a preset; see `in_tables` for limits that are not in the board's tables."""
    settings = preset.settings
    offline = sum(parameter == "CPU_ONLINE" and value == "0" for (parameter, _), value in settings.items())
    limits_khz = [
        int(value)
        for (parameter, argument), value in settings.items()
        if is_cpu_clock(parameter) and argument == "MAX_FREQ"
    ]
    return PowerMode(
        max(space.cores) - offline,
        limited_cpu(space.cpu_khz, -1 if -1 in limits_khz else max(limits_khz, default=-1)),
        limited(space.gpu_hz, int(settings.get(("GPU", "MAX_FREQ"), "-1"))),
        limited(space.mem_hz, int(settings.get(("EMC", "MAX_FREQ"), "-1"))),
    )


def in_tables(wanted: PowerMode, space: ModeSpace) -> PowerMode:
    """Return a mode whose limits need not be in a board's tables as it stands on the board.

    As seen on boards, a CPU limit stands at the nearest frequency: 918 MHz at 921.6 on a Nano. A limit of the GPU
    stands at the next lower one: 640 MHz at 614.4 on a Nano, 828.75 MHz at 816 on an AGX Orin.
    """
    return PowerMode(
        wanted.cores,
        limited_cpu(space.cpu_khz, wanted.cpu_khz),
        limited(space.gpu_hz, wanted.gpu_hz),
        limited(space.mem_hz, wanted.mem_hz),
    )


def limited_cpu(table: tuple[int, ...], limit: int) -> int:
    """Return the CPU frequency at which a limit stands, the nearest one; -1 means no limit."""
    return min(table, key=lambda khz: abs(khz - limit)) if limit > 0 else table[-1]


def limited(table: tuple[int, ...], limit: int) -> int:
    """Return the highest frequency within a limit; -1 means no limit, as does 0 for the memory on JetPack 4 and 5."""
    return within(table, limit) if limit > 0 else table[-1]
