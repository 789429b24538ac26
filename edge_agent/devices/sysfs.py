"""A Jetson read and set through the kernel's files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from edge_agent.devices.device import Activity, Device, KnobNotReachedError, Knobs, ModeNotAppliedError
from edge_agent.devices.host import HostDevice, PhysicalBoard
from edge_agent.devices.jetson.board import (
    TPC_MASK,
    BoardPower,
    GpuGating,
    gpu_parts,
    identify,
    read_conditions,
    read_gating,
    read_mask,
)
from edge_agent.devices.jetson.knobs import Cpu, CpuSettings, Fan, Gpu, Memory, MemorySettings, RangesHz, Step, noting
from edge_agent.devices.jetson.nvpmodel_conf import (
    SYSTEM_CONF,
    NvpmodelConfError,
    NvpmodelMode,
    in_tables,
    parse_conf,
    preset_mode,
)
from edge_agent.devices.meters import PolledMeter
from edge_agent.devices.tree import Tree
from wattfleet.common.clock import Clock
from wattfleet.common.programs import RunProgram
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import BOARDS, ModeArray, ModeSpace, PowerMode, Provenance, array_to_modes, modes_to_array
from wattfleet_proto.device_state import BoardSample


class RebootNeededError(ModeNotAppliedError):
    """A mode would need a reboot, which is left to the owner."""


@dataclass(frozen=True)
class JetsonSettings:
    """The settings of a board that a mode sets.

    Attributes:
        cpu: cores and their frequencies.
        gpu_hz: the lowest and the highest frequency of the GPU's nodes, Hz.
        memory: how the memory is held.
    """

    cpu: CpuSettings
    gpu_hz: RangesHz
    memory: MemorySettings


class SysfsDevice(PhysicalBoard):
    """A Jetson read and set through sysfs (a `Device`); changing anything needs root.

    A mode is held by setting both minimum and maximum of each frequency to it. Every change makes all reductions first,
    then the increases, so that no state in between draws more than both of its ends.

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
        self.gpu = Gpu(tree, self.identity.board.gpu_driver)
        self.memory = Memory(tree, self.identity.usual_memory_hz)
        self.fan = Fan(tree, run)
        self.power = BoardPower(tree, self.identity.board.rails)
        self._list_modes()

    def _list_modes(self) -> None:
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
    def basis(self) -> str:
        """The rails that make up its power, and the parts of its GPU that are on."""
        return "; ".join([self.power.included, *gpu_parts(self._tree, self.identity.board.tpcs)])

    @property
    def presets(self) -> dict[str, PowerMode]:
        """NVIDIA's modes by name, as power modes; empty if its configuration cannot be read, see `doctor`."""
        return {mode.name: preset_mode(mode, self.space) for mode in self._nvpmodel_modes()}

    @property
    def need_reboot(self) -> dict[str, str]:
        """Why presets cannot be applied before a reboot, by name: another part of the GPU would have to be on."""
        gating = read_gating(self._tree, self.identity.board.tpcs)
        return {mode.name: why for mode in self._nvpmodel_modes() if (why := reboot_reason(self._tree, gating, mode))}

    def require_no_reboot(self, name: str) -> None:
        """Check that a mode does not need a reboot.

        Args:
            name: the name of a preset; any other name is accepted.

        Raises:
            RebootNeededError: it needs one.
        """
        if (why := self.need_reboot.get(name)) is None:
            return
        mode_id = next(mode.mode_id for mode in self._nvpmodel_modes() if mode.name == name)
        raise RebootNeededError(
            f"{name} needs a reboot, so it was not applied: {why}. To apply it, run `nvpmodel -m {mode_id}` yourself"
            f" and reboot. Its clocks alone are the mode {mode_argument(self.presets[name])}"
        )

    def _nvpmodel_modes(self) -> tuple[NvpmodelMode, ...]:
        """Return NVIDIA's modes; none if its configuration cannot be read."""
        try:
            return parse_conf(self._tree.read(SYSTEM_CONF), SYSTEM_CONF).modes
        except (OSError, NvpmodelConfError):
            return ()

    @property
    def modes(self) -> ModeArray:
        """`[n, 4]` modes that can be applied."""
        return self._modes

    def try_knobs(self) -> None:
        """Find out whether the memory's cap can be raised; if not, modes above it are no longer offered."""
        if self.memory.try_cap():
            self._list_modes()

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
        to = self._settings(mode)

        def raise_limits() -> None:
            for step in self._increases(to):
                step()
            if found := self.differences(mode):
                raise self.not_reached(f"the mode {mode.label()} was set, but: ", found)

        self._change(to, mode.label(), raise_limits)

    def differences(self, mode: PowerMode) -> list[str]:
        """Describe how the current settings differ from an applied mode."""
        to = self._settings(mode)
        return [
            *self.cpu.differences(to.cpu),
            *self.gpu.differences(to.gpu_hz),
            *self.memory.differences(to.memory),
        ]

    def not_reached(self, message: str, found: list[str]) -> ModeNotAppliedError:
        """Return the error for settings that stand at other values; it states the knob if they are all of one.

        Args:
            message: what was tried.
            found: the differences.
        """
        knobs = {self._knob_of(_path_in(text)) for text in found}
        text = f"{message}{'; '.join(found)}"
        return KnobNotReachedError(text, knobs.pop()) if len(knobs) == 1 else ModeNotAppliedError(text)

    def _knob_of(self, path: str) -> str:
        """Return the knob that a file sets."""
        if path in self.cpu.written_files():
            return "cores" if path.endswith("/online") else "cpu_khz"
        return "gpu_hz" if path in self.gpu.written_files() else "mem_hz"

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

    def conditions(self) -> BoardSample:
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
        before = as_numbers(self.fan.knobs())
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
        return {**self._board_knobs(), **self.fan.knobs()}

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
        as_numbers(knobs)

    def restore(self, knobs: Knobs) -> None:
        """Restore settings that `knobs` returned, in this process or an earlier one.

        If one fails, the others are still restored.

        Raises:
            InvalidInputError: the settings are not this board's.
            ModeNotAppliedError: some were refused, or other values were read back.
        """
        self.require_restorable(knobs)
        values = as_numbers(knobs)
        failed = self._put_back(self._saved(values))
        with noting(failed):
            self.fan.put_back(values)
        if failed:
            raise ModeNotAppliedError(
                f"not restored: {'; '.join(failed)}. If it fails again, reboot: the board then starts in its own"
                " nvpmodel mode, and the next `wattfleet agent restore` sets what still differs"
            )

    def _settings(self, mode: PowerMode, locks_memory: bool = True) -> JetsonSettings:
        """Return the settings of a mode.

        Args:
            mode: the mode.
            locks_memory: whether the memory is locked, if it can be; if not, its lock stays as it is.
        """
        return JetsonSettings(
            self.cpu.at(mode.cores, mode.cpu_khz),
            self.gpu.at(mode.gpu_hz, mode.gpu_hz),
            self.memory.at(mode.mem_hz, with_lock=locks_memory),
        )

    def _saved(self, values: Mapping[str, int]) -> JetsonSettings:
        """Return the settings that `knobs` returned."""
        return JetsonSettings(self.cpu.saved(values), self.gpu.saved(values), self.memory.saved(values))

    def _change(self, to: JetsonSettings, label: str, raise_limits: Callable[[], None]) -> None:
        """Change to other settings, so that no state in between draws more than both the old and the new ones.

        If a reduction fails, the other reductions are still made, and nothing is raised. If an increase fails, the
        increases so far are taken back. The board is then left with the lower of the old and new settings.

        Args:
            to: the new settings.
            label: their name in errors.
            raise_limits: makes all other changes once the reductions are in force.
        """
        failed: list[str] = []
        for step in self._reductions(to):
            with noting(failed):
                step()
        if failed:
            raise ModeNotAppliedError(failed[0])
        if found := self._not_lowered(to):
            raise self.not_reached(f"the mode {label} was not applied: ", found)
        lowered = self._saved(as_numbers(self._board_knobs()))
        try:
            raise_limits()
        except ModeNotAppliedError:
            cpu = replace(lowered.cpu, sets_offline_policies=False)
            for step in self._reductions(replace(lowered, cpu=cpu)):
                with suppress(ModeNotAppliedError):
                    step()
            raise

    def _put_back(self, to: JetsonSettings) -> list[str]:
        """Change to earlier settings, whatever fails; return what failed."""
        failed: list[str] = []
        for step in chain(self._reductions(to), self._increases(to)):
            with noting(failed):
                step()
        known = {_path_in(text) for text in failed}
        found = [
            *self.cpu.differences(to.cpu),
            *self.gpu.differences(to.gpu_hz),
            *self.memory.differences(to.memory),
        ]
        return [*dict.fromkeys(failed), *(text for text in found if _path_in(text) not in known)]

    def _reductions(self, to: JetsonSettings) -> Iterator[Step]:
        """Yield the steps to other settings that cannot raise the board's power."""
        yield from self.cpu.reductions(to.cpu)
        yield from self.gpu.reductions(to.gpu_hz)
        yield from self.memory.reductions(to.memory)

    def _not_lowered(self, to: JetsonSettings) -> list[str]:
        """Describe which reductions have not taken effect."""
        return [
            *self.cpu.not_lowered(to.cpu),
            *self.gpu.not_lowered(to.gpu_hz),
            *self.memory.not_lowered(to.memory),
        ]

    def _arrivals(self, to: JetsonSettings) -> Iterator[Step]:
        """Yield the steps that bring cores online.

        If a core has to run at an old clock until the clock can be set, all other clocks are lowered first.
        """
        if self.cpu.passes_old_limits(to.cpu):
            yield from self.cpu.reductions(self.cpu.lowest())
            yield from self.gpu.reductions(self.gpu.at(self.gpu.table_hz[0], self.gpu.table_hz[0]))
            if to.memory.lock_hz is not None or to.memory.range_hz is not None:
                yield from self.memory.reductions(self.memory.held_lowest())
        yield from self.cpu.arrivals(to.cpu)

    def _increases(self, to: JetsonSettings) -> Iterator[Step]:
        """Yield the remaining steps to other settings, after `_reductions`."""
        yield from self._arrivals(to)
        yield from self.cpu.increases(to.cpu)
        yield from self.gpu.increases(to.gpu_hz)
        yield from self.memory.increases(to.memory)

    def _board_knobs(self) -> dict[str, str]:
        """Return the current settings that a mode sets."""
        return {**self.cpu.knobs(), **self.gpu.knobs(), **self.memory.knobs()}


def reboot_reason(tree: Tree, gating: GpuGating | None, mode: NvpmodelMode) -> str | None:
    """Return why one of NVIDIA's modes needs a reboot; None if it does not, or if the kernel shows no masks.

    Args:
        tree: the board's files.
        gating: which parts of the GPU are on.
        mode: the mode.
    """
    if gating is None:
        return None
    for name, wanted in sorted(mode.gpu_masks.items(), key=lambda each: each[0] != TPC_MASK):
        held = read_mask(tree, gating.folder, name)
        if held is not None and held != wanted:
            if name == TPC_MASK:
                return f"its GPU has {gating.with_mask(wanted)}, but this board has booted with {gating.statement}"
            return f"its GPU has {name} {wanted:#x}, but this board has booted with {held:#x}"
    return None


def _path_in(text: str) -> str:
    """Return the file that a description of a failure names."""
    return text.partition(": ")[0]


def as_numbers(knobs: Knobs) -> dict[str, int]:
    """Return the values of settings as numbers.

    Raises:
        InvalidInputError: one is not a number.
    """
    for name, value in knobs.items():
        if not re.fullmatch(r"-?\d+", value):
            raise InvalidInputError(f"cannot restore {name}: {value!r} is not a number")
    return {name: int(value) for name, value in knobs.items()}


# --- Mode names -------------------------------------------------------------------------------------------------------
# Power modes on the command line: four numbers, or the name of a preset.

_FORM = "cores,CPU kHz,GPU Hz,memory Hz"


def mode_argument(mode: PowerMode) -> str:
    """Return a mode as a command-line argument, such as `12,2201600,1300500000,3199000000`."""
    return ",".join(map(str, mode))


def presets_of(device: Device) -> Mapping[str, PowerMode]:
    """Return the named modes of a device.

    A Jetson has the modes of NVIDIA's configuration, a host its GPUs' power limits, and a simulated board the modes
    shipped for its kind.
    """
    if isinstance(device, (SysfsDevice, HostDevice)):
        return device.presets
    known = BOARDS.get(device.board_kind)
    if known is None:
        return {}
    return {name: in_tables(preset, known.space) for name, preset in known.presets.items()}


def need_reboot(device: Device) -> Mapping[str, str]:
    """Return why presets of a device cannot be applied before a reboot, by their names."""
    return device.need_reboot if isinstance(device, SysfsDevice) else {}


def applicable_presets(device: Device) -> Mapping[str, PowerMode]:
    """Return the named modes of a device that it can apply without a reboot."""
    later = need_reboot(device)
    return {name: mode for name, mode in presets_of(device).items() if name not in later}


def parse_mode(device: Device, text: str) -> PowerMode:
    """Parse a mode given on the command line.

    Args:
        device: the device that must offer the mode.
        text: four numbers such as `12,2201600,1300500000,3199000000`, or the name of a preset.

    Raises:
        InvalidInputError: the text is neither, or the device does not offer the mode. The message names the nearest
            mode.
    """
    presets = presets_of(device)
    if text in presets:
        return presets[text]
    if not re.fullmatch(r"\d+(,\d+){3}", text):
        choices = f", or one of the presets {', '.join(presets)}" if presets else "; this device has no presets"
        example = mode_argument(array_to_modes(device.modes[-1:])[0])
        raise InvalidInputError(f"unknown mode {text!r}; use {_FORM}, such as {example}{choices}")
    mode = PowerMode(*map(int, text.split(",")))
    if not (device.modes == modes_to_array([mode])).all(axis=1).any():
        raise InvalidInputError(
            f"{device.board_kind} does not offer the mode {text} ({_FORM}); its nearest mode is"
            f" {mode_argument(nearest(device.modes, mode))}"
        )
    return mode


def nearest(modes: ModeArray, mode: PowerMode) -> PowerMode:
    """Return the one of `[n, 4]` modes that is nearest to a mode in log distance."""
    # Avoid log(0); every real setting is at least 1.
    wanted = np.log(np.maximum(modes_to_array([mode]), 0.5))
    distance = np.abs(np.log(modes) - wanted).sum(axis=1)
    place = int(distance.argmin())
    return array_to_modes(modes[place : place + 1])[0]
