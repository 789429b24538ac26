"""A Jetson read and set through the kernel's files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from edge_agent.devices.device import Activity, Conditions, Knobs, ModeNotAppliedError, Provenance
from edge_agent.devices.jetson.cpu import Cpu
from edge_agent.devices.jetson.fan import Fan
from edge_agent.devices.jetson.gpu import Gpu
from edge_agent.devices.jetson.identity import identify
from edge_agent.devices.jetson.knob_files import noting
from edge_agent.devices.jetson.memory import Memory
from edge_agent.devices.jetson.nvpmodel_conf import SYSTEM_CONF, NvpmodelConfError, parse_conf
from edge_agent.devices.jetson.presets import preset_mode
from edge_agent.devices.jetson.rails import BoardPower
from edge_agent.devices.jetson.thermal import read_conditions
from edge_agent.devices.meters.polled_meter import PolledMeter
from edge_agent.devices.physical import PhysicalBoard
from edge_agent.devices.tree import Tree
from wattfleet.errors import InvalidInputError
from wattfleet.modes import BOARDS, ModeArray, ModeSpace, PowerMode
from wattfleet_io.clock import Clock
from wattfleet_io.programs import RunProgram

# The Nano is not a simulated board; only its maximum is known.
_NANO_MEMORY_HZ = (1_600_000_000,)


class SysfsDevice(PhysicalBoard):
    """A Jetson read and set through sysfs (a `Device`); changing anything needs root.

    A mode is held by setting both minimum and maximum of each frequency to it.

    Args:
        tree: the board's files.
        clock: the time base of measurements.
        run: runs the system's programs.

    Raises:
        InvalidInputError: this is not a known Jetson, or its kernel does not list its frequencies.
    """

    def __init__(self, tree: Tree, clock: Clock, run: RunProgram) -> None:
        self._tree = tree
        self._clock = clock
        self.identity = identify(tree)
        self.cpu = Cpu(tree)
        self.gpu = Gpu(tree)
        self.memory = Memory(tree, default_memory_hz(self.identity.kind))
        self.fan = Fan(tree, run)
        self.power = BoardPower(tree, self.identity.kind)
        self._space = ModeSpace(
            tuple(range(1, self.cpu.cores + 1)), self.cpu.table_khz, self.gpu.table_hz, self.memory.table_hz
        )
        self._modes = self._space.array()

    @property
    def board_kind(self) -> str:
        """Kind of board, such as `agx-orin`."""
        return self.identity.kind

    @property
    def provenance(self) -> Provenance:
        """The source of its figures."""
        return "hardware"

    @property
    def clock(self) -> Clock:
        """The time base of everything measured on it."""
        return self._clock

    @property
    def space(self) -> ModeSpace:
        """The values of each knob, as listed by the kernel."""
        return self._space

    @property
    def presets(self) -> dict[str, PowerMode]:
        """NVIDIA's modes by name, as power modes; empty if its configuration cannot be read."""
        try:
            modes = parse_conf(self._tree.read(SYSTEM_CONF), SYSTEM_CONF).modes
        except (OSError, NvpmodelConfError):
            return {}
        return {mode.name: preset_mode(mode, self.space) for mode in modes}

    @property
    def modes(self) -> ModeArray:
        """`[n, 4]` modes that can be applied."""
        return self._modes

    def current_mode(self) -> PowerMode:
        """Return the current mode, read back from the board.

        Raises:
            ModeNotAppliedError: a setting cannot be read.
        """
        return PowerMode(
            len(self.cpu.online()), self.cpu.frequency_khz(), self.gpu.frequency_hz(), self.memory.frequency_hz()
        )

    def apply(self, mode: PowerMode) -> None:
        """Apply a mode.

        Raises:
            InvalidInputError: the board does not offer this mode.
            ModeNotAppliedError: the kernel refused a setting, or another value was read back.
        """
        self.require_offered(mode)
        self.cpu.set(mode.cores, mode.cpu_khz)
        self.gpu.set(mode.gpu_hz)
        self.memory.set(mode.mem_hz)
        found = self.differences(mode)
        if found:
            raise ModeNotAppliedError(f"the mode {mode.label()} was set, but: {'; '.join(found)}")

    def differences(self, mode: PowerMode) -> list[str]:
        """Describe how the current settings differ from an applied mode."""
        return [
            *self.cpu.differences(mode.cores, mode.cpu_khz),
            *self.gpu.differences(mode.gpu_hz),
            *self.memory.differences(mode.mem_hz),
        ]

    def require_offered(self, mode: PowerMode) -> None:
        """Check that the board offers a mode.

        Raises:
            InvalidInputError: it does not.
        """
        if mode not in self._space:
            raise InvalidInputError(
                f"{self.board_kind} does not offer the mode {mode.label()}; choose one of its {len(self._space)}"
            )

    def start_meter(self) -> PolledMeter:
        """Start sampling board power."""
        return PolledMeter(self.power.read_mw, self._clock)

    def conditions(self) -> Conditions:
        """Return the current temperature and throttle count."""
        return read_conditions(self._tree)

    def activity(self) -> Activity:
        """Return the current power, fan speed and GPU use."""
        return Activity(self.power.read_mw(), self.fan.share(), self.gpu.use_share())

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Hold the fan at full speed until the block ends.

        Raises:
            ModeNotAppliedError: the fan cannot be held or restored.
        """
        before = _as_numbers(self.fan.knobs())
        try:
            self.fan.hold_full()
            yield
        finally:
            self.fan.put_back(before)

    def knobs(self) -> Knobs:
        """Return the current settings, for `restore`.

        Raises:
            ModeNotAppliedError: a setting cannot be read.
        """
        return {**self.cpu.knobs(), **self.gpu.knobs(), **self.memory.knobs(), **self.fan.knobs()}

    def require_restorable(self, knobs: Knobs) -> None:
        """Check that settings belong to this board, before changing any.

        Raises:
            InvalidInputError: they are another board's.
        """
        names = [group.knob_names() for group in (self.cpu, self.gpu, self.memory, self.fan)]
        required = set().union(*(group.required for group in names))
        unknown = set(knobs) - required.union(*(group.optional for group in names))
        if missing := required - set(knobs):
            raise InvalidInputError(f"{self.board_kind}: cannot restore without {', '.join(sorted(missing))}")
        if unknown:
            raise InvalidInputError(f"{self.board_kind}: has no {', '.join(sorted(unknown))} to restore")
        _as_numbers(knobs)

    def restore(self, knobs: Knobs) -> None:
        """Restore settings that `knobs` returned, in this process or an earlier one.

        If one fails, the others are still restored.

        Raises:
            InvalidInputError: the settings are not this board's.
            ModeNotAppliedError: some were refused, or other values were read back.
        """
        self.require_restorable(knobs)
        values = _as_numbers(knobs)
        steps: tuple[Callable[[Mapping[str, int]], None], ...] = (
            self.cpu.put_back,
            self.gpu.put_back,
            self.memory.put_back,
            self.fan.put_back,
        )
        failed: list[str] = []
        for put_back in steps:
            with noting(failed):
                put_back(values)
        if failed:
            raise ModeNotAppliedError(f"not restored: {'; '.join(failed)}")


def default_memory_hz(kind: str) -> tuple[int, ...]:
    """Return the memory frequencies of a kind of board, used if its kernel does not list them."""
    return BOARDS[kind].space.mem_hz if kind in BOARDS else _NANO_MEMORY_HZ


def _as_numbers(knobs: Knobs) -> dict[str, int]:
    for name, value in knobs.items():
        if not re.fullmatch(r"-?\d+", value):
            raise InvalidInputError(f"cannot restore {name}: {value!r} is not a number")
    return {name: int(value) for name, value in knobs.items()}
