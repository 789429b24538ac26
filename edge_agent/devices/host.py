"""Physical devices, and a machine that is no Jetson: a workstation, a server or a Raspberry Pi.

Such a machine keeps its settings, and its current state is its only mode, unless its owner's file says which of its
settings are modes.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Protocol

from edge_agent.devices.device import Activity, KnobNotReachedError, Knobs, ModeNotAppliedError
from edge_agent.devices.external_meters import MAX_PERIOD_S, MIN_PERIOD_S, ExternalMeter, Polled, parse_meter
from edge_agent.devices.jetson.board import is_jetson, shipped_boards, sign_of_hidden_jetson
from edge_agent.devices.jetson.knobs import Cpu, noting
from edge_agent.devices.meters import INTERVAL_S, PolledMeter, Rapl
from edge_agent.devices.nvml import Nvml
from edge_agent.devices.tree import Tree
from wattfleet.common.atomic_files import require_file_of
from wattfleet.common.clock import Clock
from wattfleet.common.parsing import parse_toml_table
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import ModeArray, PowerMode, Provenance, Workload, modes_to_array, nearest_mode
from wattfleet_proto.device_state import BoardSample

# --- Physical ---------------------------------------------------------------------------------------------------------
# The common base of all boards that physically exist.


class _HasClock(Protocol):
    @property
    def clock(self) -> Clock: ...


class PhysicalBoard:
    """Base of the devices that represent hardware."""

    mode_persists = True

    @property
    def basis(self) -> str:
        """What its figures depend on apart from the mode."""
        return ""

    def try_knobs(self) -> None:
        """Do nothing, as no setting is known to be out of reach."""

    def built_in_workload(self, workload: Workload | None = None) -> Callable[[], None] | None:
        """Return None, since a program has to train on the board."""
        return None

    def begin_training(self: _HasClock, workload: Workload | None = None) -> PhysicalTraining:
        """Begin an app's training in the mode in force."""
        return PhysicalTraining(self.clock)


class PhysicalTraining:
    """An app's training on hardware, which does the work itself (an `AppTraining`).

    Args:
        clock: the device's clock.
    """

    first_minibatch_observed = True

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def minibatches_ended(self, seconds: Sequence[float], ended: Callable[[int, float], bool]) -> None:
        """Replay the minibatches of a report up to the first mode change; the later ones ran in the previous mode."""
        ended_s = self._clock.now_s() - sum(seconds)
        for index, took_s in enumerate(seconds):
            ended_s += took_s
            if ended(index, ended_s):
                return

    def learned(self, workload: Workload | None) -> None:
        """Do nothing, since the hardware trains whatever the app does."""

    def finish(self, minibatches: int) -> None:
        """End the training, whose work the hardware has done."""


# --- Its owner's file -------------------------------------------------------------------------------------------------
# What the agent has to know of a machine and cannot read from it.

HOST_FILE = "/etc/wattfleet/host.toml"
"""The owner's file: what of a machine is a mode, and what measures its power. A machine need not have one."""

BUILT_IN = "built-in"
ModesOf = Literal["fixed", "gpu-power", "cpu"]
_MODES = ("fixed", "gpu-power", "cpu")
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")


@dataclass(frozen=True)
class HostFile:
    """What the owner says of a machine: the table `host` of its file.

    Attributes:
        kind: its name in commands and profiles. Devices of one kind learn from each other, so it should name the GPU or
            the model.
        modes: `fixed` never changes a setting; `gpu-power` sets the power limits of NVIDIA GPUs; `cpu` sets the number
            of online cores and their frequency.
        meter: what measures its power: `built-in` for NVML and RAPL, or as for `parse_meter`.
        period_s: seconds between two samples of that meter; None for its usual ones.
        rest_w: stated watts of what the meter does not measure.
        idle_w: stated watts while idle, instead of a meter; None if power is measured.
        busy_w: stated watts while fully used, in its highest mode; None if power is measured.
    """

    kind: str = "host"
    modes: ModesOf = "fixed"
    meter: str = BUILT_IN
    period_s: float | None = None
    rest_w: float = 0.0
    idle_w: float | None = None
    busy_w: float | None = None

    @property
    def is_stated(self) -> bool:
        """Whether its power is stated, not measured."""
        return self.idle_w is not None


def read_host_file(tree: Tree) -> HostFile:
    """Return what the owner says of a machine; the defaults without a file.

    It may name a command, so for root, nobody else may be able to write it.

    Raises:
        InvalidInputError: the file cannot be read, says something else, or can be written by others than root.
    """
    if not tree.exists(HOST_FILE):
        return HostFile()
    try:
        if os.geteuid() == 0:
            require_file_of(tree.location(HOST_FILE))
        return parse_host_file(tree.read(HOST_FILE).encode(), HOST_FILE)
    except OSError as error:
        raise InvalidInputError(f"{HOST_FILE}: cannot be used: {error.strerror}") from None


def parse_host_file(content: bytes, name: str) -> HostFile:
    """Parse the file of a machine.

    Args:
        content: the file's content.
        name: the file's name, for messages.

    Raises:
        InvalidInputError: it is not such a file.
    """
    known = [field.name for field in fields(HostFile)]
    try:
        found = parse_toml_table(content, "host", known, "see docs/devices.md")
    except ValueError as error:
        raise InvalidInputError(f"{name}: {error}") from None
    for key in ("kind", "modes", "meter"):
        if not isinstance(found.get(key, ""), str):
            raise InvalidInputError(f"{name}: {key} has to be a text, not {found[key]!r}")
    numbers = {key: _stated_number(found[key], key, name) for key in known[3:] if key in found}
    host = HostFile(**{**found, **numbers})
    if not _NAME.fullmatch(host.kind) or host.kind in {board.kind for board in shipped_boards()}:
        raise InvalidInputError(
            f"{name}: kind may have a-z, 0-9, dots and hyphens, and be no Jetson, not {host.kind!r}"
        )
    if host.modes not in _MODES:
        raise InvalidInputError(f"{name}: modes has to be one of {', '.join(_MODES)}, not {host.modes!r}")
    if host.meter != BUILT_IN:
        try:
            parse_meter(host.meter)
        except InvalidInputError as error:
            raise InvalidInputError(f"{name}: {error}") from None
    if host.period_s is not None and not MIN_PERIOD_S <= host.period_s <= MAX_PERIOD_S:
        raise InvalidInputError(f"{name}: period_s has to be from {MIN_PERIOD_S} to {MAX_PERIOD_S:g} s")
    if host.period_s is not None and host.meter == BUILT_IN:
        raise InvalidInputError(f"{name}: period_s is that of an external meter; name a meter, or remove period_s")
    if (host.idle_w is None) != (host.busy_w is None):
        raise InvalidInputError(f"{name}: idle_w and busy_w state the power together; give both or neither")
    if host.idle_w is not None and host.busy_w is not None and not host.idle_w < host.busy_w:
        raise InvalidInputError(f"{name}: busy_w has to be more than idle_w")
    if host.is_stated and ("meter" in found or "rest_w" in found):
        raise InvalidInputError(f"{name}: idle_w and busy_w are instead of meter and rest_w; remove either")
    return host


def _stated_number(value: Any, key: str, name: str) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    may_be_zero = key == "rest_w"
    if not is_number or not (0 < value <= _MOST_W or (may_be_zero and value == 0)):
        least = "of at least 0" if may_be_zero else "above 0"
        raise InvalidInputError(f"{name}: {key} has to be a number {least} and at most {_MOST_W:,.0f}, not {value!r}")
    return float(value)


_MOST_W = 20_000.0


# --- Modes ------------------------------------------------------------------------------------------------------------
# What a mode sets on a machine.

ABSENT_KHZ = 1_000_000
"""Placeholder for an unknown CPU frequency: a constant adds no information, and 1 GHz is easy to recognise."""
ABSENT_HZ = 1_000_000_000
"""Placeholder for an unknown GPU or memory clock."""

_CPUS = "/sys/devices/system/cpu"


class HostKnobs(Protocol):
    """The settings of a machine that are modes."""

    @property
    def modes(self) -> list[PowerMode]:
        """The modes that can be applied."""
        ...

    def current_mode(self) -> PowerMode:
        """Return the current mode, read back."""
        ...

    def apply(self, mode: PowerMode) -> None:
        """Apply one of the modes.

        Raises:
            ModeNotAppliedError: a setting was refused, or another value was read back.
        """
        ...

    def differences(self, mode: PowerMode) -> list[str]:
        """Describe how the current settings differ from a mode."""
        ...

    def knobs(self) -> Knobs:
        """Return the current settings, for `restore`."""
        ...

    def restore(self, knobs: Knobs) -> None:
        """Restore settings that `knobs` returned; see `Device.restore`."""
        ...


class _Fixed:
    """A machine whose settings are never changed (`HostKnobs`).

    Args:
        tree: the machine's files.
        nvml: its NVIDIA GPUs; None if it has none.

    Raises:
        InvalidInputError: it does not report which cores are online.
    """

    def __init__(self, tree: Tree, nvml: Nvml | None) -> None:
        self._tree = tree
        self._nvml = nvml
        self.modes = [self.current_mode()]

    def current_mode(self) -> PowerMode:
        """Return the online cores and the highest frequencies, with placeholders for unknown ones."""
        gpu_hz, mem_hz = (self._nvml.highest_clocks_hz() if self._nvml else None) or (ABSENT_HZ, ABSENT_HZ)
        return PowerMode(_online_cores(self._tree), _highest_khz(self._tree), gpu_hz, mem_hz)

    def apply(self, mode: PowerMode) -> None:
        """Do nothing, since it is the only mode."""

    def differences(self, mode: PowerMode) -> list[str]:
        """Describe the current mode if it differs; the owner may have taken a core offline or capped a clock."""
        in_force = self.current_mode()
        return [] if in_force == mode else [f"{in_force.label()} is in force"]

    def knobs(self) -> Knobs:
        """Return no settings, since nothing is ever changed."""
        return {}

    def restore(self, knobs: Knobs) -> None:
        """Do nothing, as nothing was changed.

        Raises:
            InvalidInputError: the settings are another device's.
        """
        if knobs:
            raise InvalidInputError(f"cannot restore {dict(knobs)}: this machine has no power modes")


class _GpuPower:
    """A machine whose modes are the power limits of its NVIDIA GPUs (`HostKnobs`); cores and CPU stay as they are.

    Args:
        tree: the machine's files.
        nvml: its GPUs.

    Raises:
        InvalidInputError: their limits cannot be set.
    """

    def __init__(self, tree: Tree, nvml: Nvml) -> None:
        highest_gpu_hz, mem_hz = nvml.highest_clocks_hz() or (ABSENT_HZ, ABSENT_HZ)
        self.limits = nvml.open_limits()
        self._highest_gpu_hz = highest_gpu_hz
        cores, cpu_khz = _online_cores(tree), _highest_khz(tree)
        self._limit_of = {
            PowerMode(cores, cpu_khz, gpu_hz, mem_hz): limit_mw
            for limit_mw, gpu_hz in self.limits.clocks_hz(highest_gpu_hz).items()
        }
        self.modes = list(self._limit_of)

    @property
    def presets(self) -> dict[str, PowerMode]:
        """The modes by their limits, such as `250W`."""
        return {f"{limit_mw / 1e3:g}W": mode for mode, limit_mw in self._limit_of.items()}

    def current_mode(self) -> PowerMode:
        """Return the mode of the highest limit in force; it is none of the modes if the owner has set another one."""
        limit_mw = self.limits.in_force_mw()
        for mode, each_mw in self._limit_of.items():
            if not self.limits.differences(each_mw):
                return mode
        return self.modes[0]._replace(gpu_hz=self.limits.clock_hz(limit_mw, self._highest_gpu_hz) + 1)

    def apply(self, mode: PowerMode) -> None:
        """Set the limit of every GPU."""
        self.limits.apply(self._limit_of[mode])

    def differences(self, mode: PowerMode) -> list[str]:
        """Describe which GPUs have another limit."""
        return self.limits.differences(self._limit_of[mode])

    def knobs(self) -> Knobs:
        """Return the limit of each GPU."""
        return self.limits.knobs()

    def restore(self, knobs: Knobs) -> None:
        """Restore the limit of each GPU."""
        self.limits.restore(knobs)


class _CpuClocks:
    """A machine whose modes are the online cores and their frequency (`HostKnobs`).

    Args:
        tree: the machine's files.

    Raises:
        InvalidInputError: its kernel lists no frequencies.
    """

    def __init__(self, tree: Tree) -> None:
        try:
            self._cpu = Cpu(tree)
        except InvalidInputError as error:
            raise InvalidInputError(f'{error}; set `modes = "fixed"` in {HOST_FILE}') from None
        self.modes = [self._mode(cores, khz) for cores in range(1, self._cpu.cores + 1) for khz in self._cpu.table_khz]

    @staticmethod
    def _mode(cores: int, khz: int) -> PowerMode:
        return PowerMode(cores, khz, ABSENT_HZ, ABSENT_HZ)

    def current_mode(self) -> PowerMode:
        """Return the online cores and the highest frequency that their limits allow."""
        return self._mode(len(self._cpu.online()), self._cpu.frequency_khz())

    def apply(self, mode: PowerMode) -> None:
        """Set cores and frequencies, all reductions first. What fails leaves the lower of old and new settings."""
        to = self._cpu.at(mode.cores, mode.cpu_khz)
        for step in self._cpu.reductions(to):
            step()
        if found := self._cpu.not_lowered(to):
            raise _not_reached(f"the mode {mode.label()} was not applied: ", found)
        lowered = self._cpu.saved({name: int(value) for name, value in self._cpu.knobs().items()})
        try:
            for steps in (self._cpu.arrivals, self._cpu.increases):
                for step in steps(to):
                    step()
            if found := self._cpu.differences(to):
                raise _not_reached(f"the mode {mode.label()} was set, but: ", found)
        except ModeNotAppliedError:
            for step in self._cpu.reductions(replace(lowered, sets_offline_policies=False)):
                with suppress(ModeNotAppliedError):
                    step()
            raise

    def differences(self, mode: PowerMode) -> list[str]:
        """Describe which cores and limits differ."""
        return self._cpu.differences(self._cpu.at(mode.cores, mode.cpu_khz))

    def knobs(self) -> Knobs:
        """Return which cores are online, and the limits of their frequencies."""
        return self._cpu.knobs()

    def restore(self, knobs: Knobs) -> None:
        """Restore cores and limits. If one fails, the others are still restored."""
        names = self._cpu.knob_names()
        is_number = all(value.isdecimal() for value in knobs.values())
        if not (is_number and names.required <= set(knobs) <= names.required | names.optional):
            raise InvalidInputError(f"cannot restore {dict(knobs)}: these are not the CPU settings of this machine")
        to = self._cpu.saved({name: int(value) for name, value in knobs.items()})
        failed: list[str] = []
        for steps in (self._cpu.reductions, self._cpu.arrivals, self._cpu.increases):
            for step in steps(to):
                with noting(failed):
                    step()
        if failed := [*dict.fromkeys(failed)] or self._cpu.differences(to):
            raise ModeNotAppliedError(f"not restored: {'; '.join(failed)}. If it fails again, reboot")

    @property
    def written_files(self) -> list[str]:
        """The files that are written."""
        return self._cpu.written_files()


def _not_reached(message: str, found: list[str]) -> ModeNotAppliedError:
    knobs = {"cores" if text.partition(": ")[0].endswith("/online") else "cpu_khz" for text in found}
    text = f"{message}{'; '.join(found)}"
    return KnobNotReachedError(text, knobs.pop()) if len(knobs) == 1 else ModeNotAppliedError(text)


def _online_cores(tree: Tree) -> int:
    text = _text(tree, f"{_CPUS}/online")
    try:
        ranges = [part.partition("-") for part in (text or "").split(",")]
        return sum(int(last or first) - int(first) + 1 for first, _, last in ranges)
    except ValueError:
        raise InvalidInputError(
            f"{_CPUS}/online holds {text!r}, which is not a list of cores; a Linux machine with sysfs is needed"
        ) from None


def _highest_khz(tree: Tree) -> int:
    limits = [_number(tree, path) for path in tree.glob(f"{_CPUS}/cpu*/cpufreq/scaling_max_freq")]
    return max((khz for khz in limits if khz is not None), default=ABSENT_KHZ)


def _text(tree: Tree, path: str) -> str | None:
    try:
        return tree.read(path)
    except OSError:
        return None


def _number(tree: Tree, path: str) -> int | None:
    try:
        return int(_text(tree, path) or "")
    except ValueError:
        return None


# --- Power ------------------------------------------------------------------------------------------------------------
# What measures a machine, or states its power.


class _BuiltIn:
    """The sum of what NVML and RAPL measure."""

    def __init__(self, tree: Tree, clock: Clock, nvml: Nvml | None) -> None:
        self._nvml = nvml
        self._rapl = Rapl(tree, clock)
        self.interval_s = INTERVAL_S

    @property
    def sources(self) -> list[str]:
        """What is measured, in words."""
        return [
            *([f"{self._nvml.gpus} GPU(s) by NVML"] if self._nvml else []),
            *([f"{self._rapl.packages} CPU package(s) by RAPL"] if self._rapl.packages else []),
        ]

    @property
    def is_refused(self) -> bool:
        """Whether there are counters that this process may not read."""
        return self._rapl.unreadable

    def reader(self) -> Callable[[], float]:
        """Return a reader of the power, mW; RAPL gives the mean since the last reading."""
        sources: list[Callable[[], float]] = [self._nvml.power_mw] if self._nvml else []
        if self._rapl.packages:
            sources.append(self._rapl.reader())
        return lambda: sum(read_mw() for read_mw in sources) if sources else math.nan


class _Stated:
    """Stated watts: those while idle, and up to those while busy by the use of the machine.

    Args:
        tree: the machine's files.
        idle_w: watts while idle.
        busy_w: watts while fully used in the highest mode.
        relative_speed: returns the speed of the mode in force relative to the highest one, 0 to 1.
        nvml: the GPUs whose use counts; None if it is that of the cores.
    """

    def __init__(
        self, tree: Tree, idle_w: float, busy_w: float, relative_speed: Callable[[], float], nvml: Nvml | None
    ):
        self._tree = tree
        self._idle_w, self._busy_w = idle_w, busy_w
        self._relative_speed = relative_speed
        self._nvml = nvml

    def reader(self) -> Callable[[], float]:
        """Return a reader of the power, mW, by the use since the last reading."""
        before = self._ticks()

        def read_mw() -> float:
            nonlocal before
            if self._nvml is not None:
                share = self._nvml.use_share()
            else:
                earlier, before = before, self._ticks()
                share = _use_between(earlier, before)
            if share is None:
                return math.nan
            return 1e3 * (self._idle_w + (self._busy_w - self._idle_w) * share * self._relative_speed())

        return read_mw

    def _ticks(self) -> tuple[int, int] | None:
        """Return the ticks of all cores since the start: busy and total; None if the kernel does not count them."""
        for line in (_text(self._tree, "/proc/stat") or "").splitlines():
            if line.startswith("cpu "):
                with suppress(ValueError):
                    ticks = [int(each) for each in line.split()[1:9]]
                    return sum(ticks) - sum(ticks[3:5]), sum(ticks)
        return None


def _use_between(earlier: tuple[int, int] | None, now: tuple[int, int] | None) -> float | None:
    """Return the share of busy ticks between two readings; None if they are unknown or no tick has passed."""
    if earlier is None or now is None or now[1] <= earlier[1]:
        return None
    return min(1.0, max(0.0, (now[0] - earlier[0]) / (now[1] - earlier[1])))


# --- Host -------------------------------------------------------------------------------------------------------------

_LONGEST_INTERVAL_S = 1.0
# The zones that measure the chip: x86, Raspberry Pi, and other ARM boards.
_ON_CHIP = ("x86_pkg_temp", "cpu-thermal", "cpu_thermal", "soc_thermal")


class HostDevice(PhysicalBoard):
    """A machine that is no Jetson (a `Device`).

    Args:
        tree: the machine's files.
        clock: the time base of measurements.
        nvml: its NVIDIA GPUs; None if it has none.
        meter: reads the meter that its file names; None to open it by the file.

    Attributes:
        file: what its owner says of it.
        is_jetson: whether it is a Jetson, whose power NVML does not report.
        nvml: its NVIDIA GPUs; None if it has none.

    Raises:
        InvalidInputError: it does not report which cores are online, its file cannot be used, or it has no settings as
            the file wants them.
    """

    def __init__(self, tree: Tree, clock: Clock, nvml: Nvml | None, meter: ExternalMeter | None = None) -> None:
        self._tree = tree
        self._clock = clock
        self.nvml = nvml
        self.file = read_host_file(tree)
        self.is_jetson = is_jetson(tree) or sign_of_hidden_jetson(tree) is not None
        self._settings = self._open_knobs()
        self._modes = modes_to_array(self._settings.modes)
        self._built_in = _BuiltIn(tree, clock, nvml)
        self._polled: Polled | None = None
        if self.file.meter != BUILT_IN:
            self._polled = Polled(meter or parse_meter(self.file.meter), clock, self.file.period_s)
        self._live_power: Callable[[], float] | None = None

    def _open_knobs(self) -> HostKnobs:
        if self.file.modes == "cpu":
            return _CpuClocks(self._tree)
        if self.file.modes == "fixed":
            return _Fixed(self._tree, self.nvml)
        if self.nvml is None:
            raise InvalidInputError(
                f"{HOST_FILE}: modes is gpu-power, but NVML finds no NVIDIA GPU: install its driver and"
                " `pip install 'wattfleet[nvml]'`, or set `modes = \"fixed\"`"
            )
        return _GpuPower(self._tree, self.nvml)

    @property
    def board_kind(self) -> str:
        """The kind that its file gives it, or `host`."""
        return self.file.kind

    @property
    def provenance(self) -> Provenance:
        """`stated` if its power is stated by its owner, else `hardware`."""
        return "stated" if self.file.is_stated else "hardware"

    @property
    def basis(self) -> str:
        """What its power includes, and what its modes set."""
        return "; ".join([self.power_statement, *([f"modes by {self.file.modes}"] if self.has_modes else [])])

    @property
    def clock(self) -> Clock:
        """The time base of everything measured on it."""
        return self._clock

    @property
    def modes(self) -> ModeArray:
        """`[n, 4]` modes that can be applied; one if its settings are never changed."""
        return self._modes

    @property
    def has_modes(self) -> bool:
        """Whether its file says that settings are changed."""
        return self.file.modes != "fixed"

    @property
    def presets(self) -> dict[str, PowerMode]:
        """Its modes by their power limits, such as `250W`; empty if it has none."""
        return self._settings.presets if isinstance(self._settings, _GpuPower) else {}

    @property
    def power_statement(self) -> str:
        """A sentence that states what the power figures include."""
        file = self.file
        if file.is_stated:
            return f"stated by its owner, not measured: {file.idle_w:g} W idle, {file.busy_w:g} W in full use"
        rest = f"; {file.rest_w:g} W stated for the rest" if file.rest_w else ""
        if self._polled is not None:
            return f"power by {self._polled.meter.statement}{rest}"
        if sources := self._built_in.sources:
            return f"power of {' and '.join(sources)}{rest or '; the rest of the machine is not included'}"
        reason = "only root may read RAPL" if self._built_in.is_refused else "neither NVML nor RAPL is available"
        return f"power cannot be read ({reason}), so this machine cannot be profiled"

    @property
    def has_power_meter(self) -> bool:
        """Whether this process has a source of its power."""
        return self.file.is_stated or self._polled is not None or bool(self._built_in.sources)

    @property
    def power_is_refused(self) -> bool:
        """Whether there are power counters that this process may not read."""
        return self._polled is None and self._built_in.is_refused

    @property
    def meter_problem(self) -> str | None:
        """Why the meter of its file gave no power; None if it did, or there is none."""
        return self._polled.problem if self._polled else None

    def may_set(self) -> str | None:
        """Return why its modes cannot be set, and what to do; None if they can, or it has none."""
        if isinstance(self._settings, _GpuPower):
            return self._settings.limits.may_set()
        if isinstance(self._settings, _CpuClocks):
            refused = [path for path in self._settings.written_files if not self._tree.may_write(path)]
            return f"{refused[0]}: not writable; run the agent as root" if refused else None
        return None

    def current_mode(self) -> PowerMode:
        """Return the current mode, read back."""
        return self._settings.current_mode()

    def apply(self, mode: PowerMode) -> None:
        """Apply a mode.

        Raises:
            InvalidInputError: it is none of its modes.
            ModeNotAppliedError: a setting was refused, or another value was read back.
        """
        self._require_offered(mode)
        self._settings.apply(mode)

    def differences(self, mode: PowerMode) -> list[str]:
        """Describe how the current settings differ from a mode."""
        return self._settings.differences(mode)

    def start_meter(self) -> PolledMeter:
        """Start sampling power; without a power source, every sample is missing."""
        # A longer interval would look like a meter that has failed; then a value is repeated until there is a new one.
        interval_s = min(self._polled.period_s, _LONGEST_INTERVAL_S) if self._polled else INTERVAL_S
        return PolledMeter(self._power_reader(), self._clock, interval_s)

    def _power_reader(self) -> Callable[[], float]:
        """Return a reader of its power, mW; NaN without a source."""
        file = self.file
        if file.idle_w is not None and file.busy_w is not None:
            gpus = self.nvml if file.modes != "cpu" else None
            return _Stated(self._tree, file.idle_w, file.busy_w, self._relative_speed, gpus).reader()
        read_mw = self._polled.read_mw if self._polled else self._built_in.reader()
        return lambda: read_mw() + 1e3 * file.rest_w

    def _relative_speed(self) -> float:
        """Return the speed of the mode in force relative to the highest, 0 to 1."""
        try:
            mode, highest = self.current_mode(), self._settings.modes[-1]
        except ModeNotAppliedError:
            return 1.0
        return min(1.0, mode.cores * mode.cpu_khz * mode.gpu_hz / (highest.cores * highest.cpu_khz * highest.gpu_hz))

    def conditions(self) -> BoardSample:
        """Return the hottest temperature of CPU and GPUs, and the CPU's thermal throttle count."""
        known = [self.nvml.temperature_c()] if self.nvml else []
        for zone in self._tree.glob("/sys/class/thermal/thermal_zone*"):
            if _text(self._tree, f"{zone}/type") in _ON_CHIP:
                millidegrees = _number(self._tree, f"{zone}/temp")
                known.append(None if millidegrees is None else millidegrees / 1e3)
        events = [
            _number(self._tree, path)
            for path in self._tree.glob(f"{_CPUS}/cpu*/thermal_throttle/package_throttle_count")
        ]
        counts = [count for count in events if count is not None]
        return BoardSample(
            temperature_c=max((temperature_c for temperature_c in known if temperature_c is not None), default=None),
            # Every core reports the count of its package.
            throttle_events=max(counts) if counts else None,
        )

    def activity(self) -> Activity:
        """Return the current power and the use of the GPUs."""
        if self._live_power is None:
            self._live_power = self._power_reader()
        return Activity(self._live_power(), gpu_use_share=self.nvml.use_share() if self.nvml else None)

    def measuring(self) -> AbstractContextManager[None]:
        """Change nothing, since the machine controls its own fans."""
        return nullcontext()

    def knobs(self) -> Knobs:
        """Return the current settings, for `restore`; none if nothing is ever changed."""
        return self._settings.knobs()

    def restore(self, knobs: Knobs) -> None:
        """Restore settings that `knobs` returned, in this process or an earlier one.

        Raises:
            InvalidInputError: the settings are another device's.
            ModeNotAppliedError: some were refused, or other values were read back.
        """
        self._settings.restore(knobs)

    def _require_offered(self, mode: PowerMode) -> None:
        if mode in self._settings.modes:
            return
        if not self.has_modes:
            only = self._settings.modes[0].label()
            raise InvalidInputError(f"this machine does not offer the mode {mode.label()}; it has only {only}")
        nearest = nearest_mode(self._modes, mode)
        raise InvalidInputError(
            f"{self.board_kind} does not offer the mode {mode.label()}; the nearest one of its"
            f" {len(self._settings.modes)} is {nearest.label()}"
        )
