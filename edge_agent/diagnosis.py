"""The checks of `wattfleet agent doctor`."""

from __future__ import annotations

import math
import os
import re
import socket
import stat
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from edge_agent.devices.device import Device, ModeNotAppliedError
from edge_agent.devices.host import HOST_FILE, HostDevice
from edge_agent.devices.jetson.board import (
    HIDDEN_DEVICE_TREE,
    BoardPower,
    JetsonIdentity,
    gpu_parts,
    identify,
    is_jetson,
    read_conditions,
    read_throttle_alerts,
    read_throttle_counters,
    read_zones,
    sign_of_hidden_jetson,
)
from edge_agent.devices.jetson.description import read_described
from edge_agent.devices.jetson.knobs import WRITABLE, Cpu, Fan, Gpu, Memory
from edge_agent.devices.jetson.nvpmodel_conf import (
    SYSTEM_CONF,
    NvpmodelConf,
    NvpmodelConfError,
    NvpmodelMode,
    parse_conf,
)
from edge_agent.devices.meters import latest_power_mw, power_now_mw
from edge_agent.devices.sysfs import SysfsDevice, mode_argument
from edge_agent.devices.tree import Tree
from edge_agent.exporter import is_exposed
from edge_agent.learning.transfer import Expectation, expectation_of
from edge_agent.profiling.stored_profile import FittedDevice
from edge_agent.systemd.installation import SETTINGS_PATH, InstalledConnection
from edge_agent.training.mode_change import KnobBackupError, has_backup, holder_of
from wattfleet.common.addresses import split_address
from wattfleet.common.clock import SystemClock, utc_now
from wattfleet.common.console import count_of
from wattfleet.common.identity.authority import VALID_FROM
from wattfleet.common.identity.channels import PLAINTEXT_WARNING, is_loopback
from wattfleet.common.identity.identity_folder import FOLDER_MODE, KEY, Identity, read_identity, require_secret
from wattfleet.common.identity.peers import Role, UnknownPeerError
from wattfleet.common.identity.renewal import due_at, expiry_text, stored_at
from wattfleet.common.programs import run_no_program
from wattfleet.common.systemd import InstalledCode, code_problem
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet.core.modes import PowerMode, array_to_modes

# --- Finding ----------------------------------------------------------------------------------------------------------
# The result of one check.


Level = Literal["ok", "limited", "absent", "fails"]
"""The levels: fine; works with restrictions; missing on this kind of machine, so it joins no rounds; must be fixed."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        topic: what was checked, such as `power rails`.
        level: what the result means for the agent.
        found: the result.
        advice: what to do; empty if nothing.
    """

    topic: str
    level: Level
    found: str
    advice: str = ""


def fine(topic: str, found: str) -> Finding:
    """A check without problems."""
    return Finding(topic, "ok", found)


def limited(topic: str, found: str, advice: str) -> Finding:
    """A problem that the agent can work with."""
    return Finding(topic, "limited", found, advice)


def absent(topic: str, found: str, advice: str) -> Finding:
    """A missing part without which the agent joins no rounds; not an error."""
    return Finding(topic, "absent", found, advice)


def failing(topic: str, found: str, advice: str) -> Finding:
    """A problem that stops the agent from working."""
    return Finding(topic, "fails", found, advice)


# --- Host -------------------------------------------------------------------------------------------------------------
# Checks of a machine without power modes.


def host_findings(device: HostDevice, holder: str | None = None) -> Iterator[Finding]:
    """Check a machine that is no Jetson; many have no power meter and therefore join no rounds.

    Args:
        device: the machine.
        holder: id of the process that has locked it, whose modes must not be overwritten; None if nobody has.
    """
    mode = device.current_mode().label()
    if device.has_modes:
        name = f"{device.board_kind} ({device.provenance}), {len(device.modes):,} modes by {device.file.modes}"
        yield fine("device", f"{name}, mode {mode}")
        if holder is not None:
            yield fine("permission", f"not tried, since process {holder} uses the device")
        elif (refused := device.may_set()) is not None:
            what, _, remedy = refused.rpartition("; ")
            yield failing("permission", what or remedy, remedy)
        else:
            yield fine("permission", "its modes can be set")
    elif device.is_jetson:
        yield limited("device", f"host: this is a Jetson, used without its power modes, in {mode}", _AS_JETSON)
    else:
        yield limited(
            "device",
            f"host: not a Jetson, so its only mode is {mode}, which is never changed",
            f"with a power meter, it can be measured and join rounds. {_modes_advice(device)}",
        )
    if not (device.has_power_meter or device.power_is_refused):
        yield absent("power", device.power_statement, _power_advice(device))
    elif math.isnan(power_mw := power_now_mw(device)):
        problem = device.meter_problem
        found = f"{device.power_statement}: {problem}" if problem else device.power_statement
        yield failing("power", found, _power_advice(device))
    elif device.file.is_stated:
        yield limited(
            "power",
            f"{device.power_statement}; {power_mw / 1e3:.1f} W now",
            "its predictions and plans are labelled `stated`; a meter makes them measured (docs/devices.md)",
        )
    else:
        yield fine("power", f"{device.power_statement}: {power_mw / 1e3:.1f} W now")
    yield from _gpu_findings(device)
    conditions = device.conditions()
    if conditions.temperature_c is None:
        yield limited(
            "temperature",
            "no thermal zone on the chip can be read",
            "watch the temperature yourself; a profile cannot pause for it",
        )
    else:
        yield fine("temperature", f"{conditions.temperature_c:.0f} degrees C")
    if conditions.throttle_events is None:
        yield limited("throttling", "not counted", "check `dmesg` if a profile seems slow")
    else:
        yield fine("throttling", f"{count_of(conditions.throttle_events, 'time')} since boot")


_AS_JETSON = "pass --device auto, which sets power modes and reads the power monitor; NVML reports no Jetson's power"


def _gpu_findings(device: HostDevice) -> Iterator[Finding]:
    """Check what else uses the GPUs of a machine, and whether their driver keeps a limit."""
    if device.nvml is None:
        return
    names = ", ".join(dict.fromkeys(device.nvml.names))
    if others := device.nvml.shared_with():
        yield limited(
            "GPU",
            f"{names}: also used by {' and '.join(others)}",
            "power is measured as it is, theirs included; stop them while modes are measured",
        )
    else:
        yield fine("GPU", f"{names}: used by nothing else")
    if device.file.modes == "gpu-power" and not device.nvml.keeps_limits():
        yield limited(
            "GPU driver",
            "its persistence mode is off, so a limit set by `apply` is lost when nothing uses the GPU",
            "run `nvidia-smi -pm 1`; the agent itself keeps the driver loaded",
        )


def _modes_advice(device: HostDevice) -> str:
    """Return how an owner lets the modes of a machine be set."""
    setting = "gpu-power" if device.nvml else "cpu"
    return f'To let the agent set its modes, write `[host]` and `modes = "{setting}"` to {HOST_FILE} (docs/devices.md)'


def _power_advice(device: HostDevice) -> str:
    if device.is_jetson:
        return _AS_JETSON
    if device.meter_problem is not None:
        return f"check the meter, and `meter` in {HOST_FILE}"
    if device.power_is_refused:
        return "run this as root: `sudo wattfleet agent doctor`"
    if device.has_power_meter:
        return "check `dmesg` and `nvidia-smi` for driver errors"
    return (
        f"for an NVIDIA GPU, install its driver and `pip install 'wattfleet[nvml]'`; otherwise, name a meter or state"
        f" the watts in {HOST_FILE} (docs/devices.md). A simulated board (--device simulated:<kind>) needs neither"
    )


# --- Identity ---------------------------------------------------------------------------------------------------------
# Checks the protection of the connection to the coordinator: certificate, key, clock, and allowed plaintext.

_ENROL = "enrol the board with `wattfleet agent join` and the line of `wattfleet coordinator invite`"
_AS_ROOT = "run this as root: `sudo wattfleet agent doctor`"
_SET_CLOCK = "let it follow a time server, such as with `sudo timedatectl set-ntp true`"
_CLOCK_LAG = timedelta(days=1)
"""A clock that is slow by less than this does no harm: it only delays the renewal of a certificate."""


def identity_findings(folder: Path, service: InstalledConnection | None, now: datetime) -> Iterator[Finding]:
    """Check the identity of a device, and the machine's clock against it.

    Args:
        folder: the folder of the identity; it need not exist.
        service: how the installed service connects; None if none is installed.
        now: the machine's time.
    """
    if not _may_enter(folder):
        yield limited("certificate", f"{folder}: permission denied", _AS_ROOT)
        return
    yield from _key(folder)
    identity = None
    try:
        identity = read_identity(folder)
    except InvalidInputError as error:
        yield failing("certificate", str(error), f"repair it, or {_ENROL}")
    else:
        yield (
            limited("certificate", f"none in {folder}", _ENROL)
            if identity is None
            else _certificate(folder, identity, now)
        )
    yield _clock(None if identity is None else stored_at(folder), now)
    yield _connection(identity, service)
    if service is not None and service.metrics_address:
        yield _metrics(folder, service)


def _may_enter(folder: Path) -> bool:
    return os.access(folder, os.R_OK | os.X_OK) if os.path.exists(folder) else True


def _key(folder: Path) -> Iterator[Finding]:
    """Check who may read the private key, if there is one."""
    if not (folder / KEY).exists():
        return
    try:
        require_secret(folder / KEY)
    except InvalidInputError as error:
        yield failing("key file", str(error).partition(": run")[0], f"run `chmod 600 {folder / KEY}`, and enrol again")
        return
    if stat.S_IMODE(folder.stat().st_mode) & ~FOLDER_MODE:
        yield limited("key file", f"other users may enter {folder}", f"run `chmod 700 {folder}`")
        return
    yield fine("key file", f"{folder / KEY}: only its owner may read it")


def _certificate(folder: Path, identity: Identity, now: datetime) -> Finding:
    found = f"{_owner(identity)}; {expiry_text(identity.certificate, now)}"
    if not _is_of_a_device(identity):
        return failing("certificate", f"{found}: it is not one of a device", _ENROL)
    if identity.certificate.not_after <= now:
        return failing("certificate", found, _ENROL)
    if due_at(folder) <= now:
        return limited(
            "certificate",
            f"{found}: its renewal is due",
            "the agent renews it while it reaches the coordinator; see `journalctl -u wattfleet-agent`",
        )
    return fine("certificate", found)


def _owner(identity: Identity) -> str:
    try:
        return str(identity.peer)
    except UnknownPeerError:
        return "names no peer"


def _is_of_a_device(identity: Identity) -> bool:
    try:
        return identity.peer.role is Role.DEVICE
    except UnknownPeerError:
        return False


def _clock(stored: datetime | None, now: datetime) -> Finding:
    """Check the machine's clock.

    Args:
        stored: when the certificate was stored, the later of this clock's and the invite's time; None without one.
        now: the machine's time.
    """
    shown = f"{now:%Y-%m-%d %H:%M} UTC"
    if now < VALID_FROM:
        return failing("clock", f"{shown}: no certificate is valid at that time", _SET_CLOCK)
    if stored is not None and now < stored - _CLOCK_LAG:
        return limited(
            "clock",
            f"{shown}, but the certificate was stored on {stored:%Y-%m-%d %H:%M} UTC: it would be renewed too late",
            _SET_CLOCK,
        )
    return fine("clock", shown)


def _metrics(folder: Path, service: InstalledConnection) -> Finding:
    """Check who may read the service's metrics."""
    address = service.metrics_address
    try:
        if is_exposed(address, folder, service.is_insecure):
            return limited("metrics", f"on {address} in {PLAINTEXT_WARNING}", _ENROL)
        is_local = is_loopback(split_address(address)[0])
    except InvalidInputError as error:
        problem, _, remedy = str(error).removeprefix("--metrics-address ").rpartition(": ")
        return failing("metrics", problem or remedy, remedy)
    return fine("metrics", f"on {address}, {'for this machine only' if is_local else 'for viewers and operators'}")


def _connection(identity: Identity | None, service: InstalledConnection | None) -> Finding:
    """Check whether the service may connect in plaintext."""
    if identity is not None:
        if service is not None and service.is_insecure:
            return limited(
                "connection",
                "mutual TLS; the service falls back to plaintext if the certificate is missing",
                f"remove the line with INSECURE from {SETTINGS_PATH}, and restart the service",
            )
        return fine("connection", "mutual TLS")
    if service is None:
        return limited("connection", "plaintext, to a coordinator on this machine only", _ENROL)
    if service.leaves_machine:
        return limited("connection", f"to {service.coordinator} in {PLAINTEXT_WARNING}", _ENROL)
    return fine("connection", f"plaintext to {service.coordinator}, which is this machine")


# --- Jetson -----------------------------------------------------------------------------------------------------------
# Checks a Jetson: what its kernel reports, and which settings may be written.


def jetson_findings(tree: Tree, is_changed: bool = False) -> Iterator[Finding]:
    """Check each part of a Jetson separately, so that one failure does not hide another.

    Args:
        tree: the board's files.
        is_changed: whether an agent may have changed the board's mode.
    """
    try:
        identity = identify(tree)
    except InvalidInputError as error:
        yield failing("board", str(error), "the rails that make up its power must be known")
        return
    yield fine("board", f"{identity.model}, kind {identity.kind}")
    yield _software(identity.l4t, identity.jetpack)
    yield from _clocks(tree, identity)
    yield from _power(tree, identity)
    yield from _presets(tree, is_changed)
    yield _zones(tree)
    yield _throttling(tree)
    fan = Fan(tree, run_no_program)
    yield (
        fine("fan", "can be held at full speed while measuring")
        if fan.exists
        else limited("fan", "none that can be set", "cool the board well, and equally in every measurement")
    )


def _software(l4t: str | None, jetpack: int | None) -> Finding:
    if l4t is None:
        # Images of Yocto and Nix need not have the file. The release is only shown.
        return fine("software", "/etc/nv_tegra_release does not name the Jetson Linux release, which is only shown")
    return fine("software", f"Jetson Linux {l4t}, {f'JetPack {jetpack}' if jetpack else 'JetPack unknown'}")


def _clocks(tree: Tree, identity: JetsonIdentity) -> Iterator[Finding]:
    """Check cores, GPU and memory, and whether they may be set."""
    writable: list[str] = []
    checks: tuple[Callable[[], tuple[Finding, list[str]]], ...] = (
        lambda: _cpu(tree),
        lambda: _gpu(tree, identity),
        lambda: _memory(tree, identity),
    )
    for topic, check in zip(("CPU", "GPU", "memory"), checks, strict=True):
        try:
            finding, files = check()
        except (InvalidInputError, ModeNotAppliedError) as error:
            yield failing(topic, str(error), _driver_advice(topic, identity.board.gpu_driver))
            continue
        writable += files
        yield finding
    writable += Fan(tree, run_no_program).written_files()
    refused = [path for path in writable if not tree.may_write(path)]
    if refused:
        found = f"{len(refused)} of {len(writable)} settings are not writable, such as {refused[0]}"
        if tree.is_read_only(refused[0]):
            yield failing("permission", f"{found}: mounted read-only", WRITABLE)
        else:
            yield failing("permission", found, _AS_ROOT)
    else:
        yield fine("permission", f"all {len(writable)} settings are writable")


def _driver_advice(topic: str, gpu_driver: str) -> str:
    """Return what to do if the frequencies of a part cannot be read."""
    if topic == "GPU":
        return (
            f"load the driver (`modprobe {gpu_driver}`), or wait a minute if the board has just started; it comes with"
            " NVIDIA's kernel of JetPack 4 to 7. An upstream kernel does not have it, so boot NVIDIA's"
        )
    driver = ", and has its CPU frequency driver" if topic == "CPU" else ""
    return f"check that the kernel is NVIDIA's, from JetPack 4 to 7{driver}"


def _cpu(tree: Tree) -> tuple[Finding, list[str]]:
    cpu = Cpu(tree)
    policies = tree.glob("/sys/devices/system/cpu/cpufreq/policy*")
    shared = f"{len(policies)} {'policy' if len(policies) == 1 else 'policies'}"
    found = f"{cpu.cores} cores, {len(cpu.online())} online, {shared}; {_span(cpu.table_khz, 1e3)}"
    return fine("CPU", found), cpu.written_files()


def _gpu(tree: Tree, identity: JetsonIdentity) -> tuple[Finding, list[str]]:
    gpu = Gpu(tree, identity.board.gpu_driver)
    found = [gpu.folder.rpartition("/")[2], _span(gpu.table_hz, 1e6), *gpu_parts(tree, identity.board.tpcs)]
    return fine("GPU", "; ".join(found)), gpu.written_files()


def _memory(tree: Tree, identity: JetsonIdentity) -> tuple[Finding, list[str]]:
    memory = Memory(tree, identity.usual_memory_hz)
    is_listed = identity.board.memory_is_listed
    if not memory.written_files():
        found = "no interface to set it, so it has one frequency"
        return limited("memory", found, _debugfs("one") if is_listed else _FIXED_MEMORY), []
    found, files = f"{memory.interface}; {_span(memory.table_hz, 1e6)}", memory.written_files()
    if not memory.table_is_live:
        if not is_listed:
            return fine("memory", f"{found}, which is all that is known of this kind"), files
        return limited("memory", f"{found}, the default table of its kind", _debugfs("the live table")), files
    if not memory.is_held:
        return limited("memory", f"{found}; capped, but not locked", _debugfs("a lock")), files
    return fine("memory", f"{found}, the live table; {'locked' if memory.has_lock else 'held'}"), files


_FIXED_MEMORY = "nothing to do: modes of this board differ in cores, CPU and GPU only"


def _debugfs(what: str) -> str:
    return f"for {what}, mount debugfs (`sudo mount -t debugfs none /sys/kernel/debug`) and {_AS_ROOT}"


def _power(tree: Tree, identity: JetsonIdentity) -> Iterator[Finding]:
    power = BoardPower(tree, identity.board.rails)
    named, driver = " + ".join(power.rails), identity.board.power_driver
    if power.missing and not identity.has_power_monitor:
        yield absent(
            "power",
            "this kit has no power monitor, so its power cannot be measured",
            "use another kit, such as a Nano with 4 GB, to take part in rounds",
        )
        return
    if power.missing:
        yield failing(
            "power",
            f"of {named}, missing: {', '.join(power.missing)}",
            f"load the driver {driver} (`modprobe {driver}`), and check `dmesg` for its errors",
        )
        return
    now_mw = power.read_mw()
    if math.isnan(now_mw):
        yield failing("power", f"{named}: found, but a rail cannot be read", f"check `dmesg` for {driver} errors")
        return
    supply = power.read_supply()
    at = f" ({supply.text})" if supply else ""
    found = f"{named}: {now_mw / 1e3:.1f} W now{at}"
    if supply and supply.rail in _FIVE_VOLT_INPUTS and supply.volts < _LOWEST_INPUT_V:
        yield limited("power", f"{found}: too low for 5 V", "use a stronger supply or a shorter cable, or it throttles")
    else:
        yield fine("power", found)


_NO_NVPMODEL = (
    "for NVIDIA's presets, install its nvpmodel (Yocto's meta-tegra: the recipe tegra-nvpmodel; jetpack-nixos:"
    " services.nvpmodel.enable)"
)
_FIVE_VOLT_INPUTS = ("VDD_IN", "POM_5V_IN")
_LOWEST_INPUT_V = 4.75
"""5 V less 5 %."""


def _presets(tree: Tree, is_changed: bool) -> Iterator[Finding]:
    """Check NVIDIA's configuration, and whether the mode in force has its clocks.

    Args:
        tree: the board's files.
        is_changed: whether an agent may have changed the board's mode.
    """
    numbers = "modes can still be given in numbers, see `wattfleet agent modes`"
    try:
        conf = parse_conf(tree.read(SYSTEM_CONF), SYSTEM_CONF)
    except OSError as error:
        yield limited("presets", f"{SYSTEM_CONF}: {error.strerror}", f"{_NO_NVPMODEL}; {numbers}")
        return
    except NvpmodelConfError as error:
        yield limited("presets", str(error), f"correct this line, or report it with the file; {numbers}")
        return
    try:
        board = SysfsDevice(tree, SystemClock(), run_no_program)
        later, standing = board.need_reboot, board.current_mode()
    except WattfleetError:
        return  # another check reports it
    names = ", ".join(f"{mode.name}{' (after a reboot)' if mode.name in later else ''}" for mode in conf.modes)
    stored_id = _stored_id(tree)
    in_force = next((mode for mode in conf.modes if mode.mode_id == stored_id), None)
    if in_force is None and stored_id is not None:
        yield limited(
            "presets",
            f"{names}; nvpmodel's stored mode {stored_id} is not among them",
            f"run `sudo nvpmodel -m {conf.default}`",
        )
        return
    if in_force is not None and not is_changed:
        own = board.presets[in_force.name]
        below = [
            f"{part} {held / per_mhz:g} of {wanted / per_mhz:g} MHz"
            for part, held, wanted, per_mhz in (
                ("CPU", standing.cpu_khz, own.cpu_khz, 1e3),
                ("GPU", standing.gpu_hz, max(own.gpu_hz, _super_gpu_hz(board, in_force)), 1e6),
                ("memory", standing.mem_hz, own.mem_hz, 1e6),
            )
            if held < wanted
        ]
        if below:
            yield limited(
                "presets",
                f"{names}; {in_force.name} is in force, but below its own clocks: {', '.join(below)}",
                f"run `sudo nvpmodel -m {in_force.mode_id}`; if that changes nothing, install the Jetson Linux and"
                " the firmware that this mode needs",
            )
            return
    if later:
        name, why = next(iter(later.items()))
        yield limited("presets", f"{names}: {why}", f"for {name}, {_reboot_command(conf, name)}")
        return
    yield fine("presets", names)


def _reboot_command(conf: NvpmodelConf, name: str) -> str:
    return f"run `sudo nvpmodel -m {conf.mode_of_name(name).mode_id}` and reboot"


def _stored_id(tree: Tree) -> int | None:
    """Return the mode that nvpmodel has stored for the next start; None if there is none."""
    try:
        found = re.fullmatch(r"pmode:(\d+).*", tree.read("/var/lib/nvpmodel/status"), re.DOTALL)
    except OSError:
        return None
    return int(found[1]) if found else None


def _super_gpu_hz(board: SysfsDevice, mode: NvpmodelMode) -> int:
    """Return the GPU's frequency in MAXN_SUPER, which a board may offer without having it; 0 for another mode."""
    return (board.identity.board.super_gpu_hz or 0) if mode.name == "MAXN_SUPER" else 0


def _zones(tree: Tree) -> Finding:
    zones, hottest_c = read_zones(tree), read_conditions(tree).temperature_c
    unreadable = [name for name, degrees in zones.items() if degrees is None]
    if hottest_c is None:
        return limited(
            "temperature",
            "no thermal zone on the chip can be read",
            "watch the temperature yourself; a profile cannot pause for it",
        )
    off = f", switched off: {', '.join(unreadable)}" if unreadable else ""
    return fine("temperature", f"{hottest_c:.0f} degrees C, {count_of(len(zones), 'zone')}{off}")


def _throttling(tree: Tree) -> Finding:
    try:
        counters = read_throttle_counters(tree)
        alerts = {} if counters else read_throttle_alerts(tree)
    except (OSError, ValueError):
        return limited("throttling", "a counter cannot be read", "check `dmesg` for soctherm errors")
    if alerts:
        in_force = [name for name, state in alerts.items() if state > 0]
        if not in_force:
            return fine("throttling", f"no alert in force ({', '.join(alerts)})")
        return limited(
            "throttling", f"in force now: {', '.join(in_force)}", "cool the board, or use a stronger power supply"
        )
    if not counters:
        return limited(
            "throttling",
            "not counted by this kernel",
            "nothing to do; throttled measurements show only in their spread",
        )
    found = ", ".join(f"{name} {events}" for name, events in counters.items())
    if sum(counters.values()):
        return limited(
            "throttling", f"events since boot: {found}", "use a stronger power supply or lower modes if the counts grow"
        )
    return fine("throttling", f"no event since boot ({', '.join(counters)})")


def _span(table: tuple[int, ...], per_mhz: float) -> str:
    if len(table) == 1:
        return f"{table[0] / per_mhz:g} MHz"
    return f"{len(table)} frequencies, {table[0] / per_mhz:g} to {table[-1] / per_mhz:g} MHz"


# --- Live samples -----------------------------------------------------------------------------------------------------
# Live samples of a device's power, temperature and mode, with the prediction for that mode.

_REPLACE_METER_AFTER_S = 300.0
"""Replace the meter this often: it keeps all its samples and returns them at every read."""


@dataclass(frozen=True)
class Sample:
    """The state of a device at one moment.

    Attributes:
        at_s: seconds since the first sample, on the device's clock.
        mode: the current mode; None if it cannot be read.
        problem: why the mode cannot be read; None if it can.
        power_w: watts; None if a rail cannot be read (missing is not zero).
        temperature_c: the hottest junction, degrees Celsius; None if the board does not report it.
        throttled: throttle events since the first sample; None if the board does not count them.
        expected: measured or predicted training time and power in this mode; None if unknown.
    """

    at_s: float
    mode: PowerMode | None
    problem: str | None
    power_w: float | None
    temperature_c: float | None
    throttled: int | None
    expected: Expectation | None

    @property
    def power_ratio(self) -> float | None:
        """Current power as a share of the expected training power; None if either is unknown."""
        if self.power_w is None or self.expected is None:
            return None
        return self.power_w / self.expected.power_w

    def content(self) -> dict[str, Any]:
        """Return the sample as JSON-compatible values."""
        return {
            "at_s": self.at_s,
            "mode": self.mode and self.mode._asdict(),
            "argument": self.mode and mode_argument(self.mode),
            "label": self.mode and self.mode.label(),
            "problem": self.problem,
            "power_w": self.power_w,
            "temperature_c": self.temperature_c,
            "throttled": self.throttled,
            "expected": self.expected and self.expected.content(),
            "power_ratio": self.power_ratio,
        }


def samples(
    device: Device, fitted: FittedDevice | None, seconds: float | None, wait: Callable[[], None]
) -> Generator[Sample, None, None]:
    """Sample a device repeatedly, without changing it. Close the iterator when leaving early.

    Args:
        device: the board.
        fitted: the fitted device, if there is one.
        seconds: how long to sample, device-clock seconds; None for ever.
        wait: called between two samples.
    """
    offered = frozenset(array_to_modes(device.modes)) if fitted else frozenset()
    begin_s, throttled_before = device.clock.now_s(), device.conditions().throttle_events
    meter, metered_from_s = device.start_meter(), 0.0
    try:
        while True:
            at_s = device.clock.now_s() - begin_s
            if at_s - metered_from_s >= _REPLACE_METER_AFTER_S:
                meter.stop()
                meter, metered_from_s = device.start_meter(), at_s
            mode, problem = _current_mode(device)
            power_mw, conditions = latest_power_mw(meter, device.clock), device.conditions()
            throttle_events = conditions.throttle_events
            yield Sample(
                at_s,
                mode,
                problem,
                None if math.isnan(power_mw) else power_mw / 1e3,
                conditions.temperature_c,
                None if throttle_events is None or throttled_before is None else throttle_events - throttled_before,
                # The current settings may not match any offered mode: between two modes, or under a governor.
                expectation_of(fitted, mode) if fitted and mode in offered else None,
            )
            if seconds is not None and at_s >= seconds:
                return
            wait()
    finally:
        meter.stop()


def _current_mode(device: Device) -> tuple[PowerMode | None, str | None]:
    try:
        return device.current_mode(), None
    except WattfleetError as error:
        return None, str(error)


# --- Machine ----------------------------------------------------------------------------------------------------------
# Runs all checks of a machine: board, device, state directory, installation, identity and socket.


def diagnose(
    spec: str,
    open_device: Callable[[], Device],
    state_directory: Path,
    device_folder: Path,
    socket_path: Path,
    code: InstalledCode,
    identity_folder: Path,
    root: Path = Path("/"),
    now: Callable[[], datetime] = utc_now,
) -> Iterator[Finding]:
    """Check everything that an agent needs.

    Args:
        spec: value of `--device`.
        open_device: opens the device.
        state_directory: the agent's directory.
        device_folder: folder with the backup of the device's settings.
        socket_path: socket where the agent serves the ClientApp.
        code: the code that it runs.
        identity_folder: folder of its key and certificate.
        root: root of the machine's files.
        now: the machine's time.
    """
    if spec.startswith("description:"):
        # What is of this machine, and not of the board, does not matter.
        yield from jetson_findings(read_described(Path(spec.partition(":")[2])))
        yield from _device(open_device, device_folder)
        return
    tree = _tree_of(spec)
    if tree is not None and is_jetson(tree):
        yield from jetson_findings(tree, _may_be_changed(device_folder))
    elif tree is not None and (sign := sign_of_hidden_jetson(tree)) is not None:
        yield failing("board", f"looks like a Jetson ({sign} exists) whose device tree is hidden", HIDDEN_DEVICE_TREE)
    elif tree is not None and spec != "auto":
        yield limited(
            "board",
            "not an NVIDIA Jetson",
            "pass --device simulated:<kind> to try things out, or --device host to train without power modes",
        )
    yield from _device(open_device, device_folder)
    yield _state_directory(state_directory)
    yield _backup(device_folder)
    yield _installed(code)
    yield from identity_findings(identity_folder, InstalledConnection.read(root), now())
    yield _socket(socket_path)


def _tree_of(spec: str) -> Tree | None:
    """Return the files of the Jetson that `spec` names; None if it does not name one."""
    kind, _, folder = spec.partition(":")
    if kind not in ("auto", "sysfs", "nvpmodel", "jtop"):
        return None
    return Tree(Path(folder or "/"))


def _device(open_device: Callable[[], Device], folder: Path) -> Iterator[Finding]:
    try:
        device = open_device()
        mode = device.current_mode()
    except WattfleetError as error:
        yield failing("device", str(error), "follow the advice above, or pass another --device")
        return
    if isinstance(device, HostDevice):
        yield from host_findings(device, _holder_of(folder))
        return
    yield fine("device", f"{device.board_kind} ({device.provenance}), {len(device.modes):,} modes, mode {mode.label()}")
    if math.isnan(power_now_mw(device)):
        yield limited("power now", "cannot be read", "no mode can be measured without it; see the lines above")


def _state_directory(path: Path) -> Finding:
    nearest = next(folder for folder in (path, *path.parents) if os.path.exists(folder))
    if not os.access(nearest, os.W_OK | os.X_OK):
        return failing("state directory", f"{path}: not writable", "run as root, or pass another --state-dir")
    if nearest != path:
        return fine("state directory", f"{path}: will be created at the first start")
    free_mb = os.statvfs(path).f_bavail * os.statvfs(path).f_frsize / 1e6
    if free_mb < _REQUIRED_FREE_MB:
        return failing(
            "state directory", f"{path}: only {free_mb:.0f} MB free", f"free at least {_REQUIRED_FREE_MB:.0f} MB"
        )
    return fine("state directory", f"{path}, {free_mb / 1e3:.1f} GB free")


_REQUIRED_FREE_MB = 50.0
"""A profile needs less than 1 MB, a reference a few."""


def _holder_of(folder: Path) -> str | None:
    try:
        return holder_of(folder)
    except KnobBackupError:
        return None  # Without permission to see the lock, there is none to set anything.


def _may_be_changed(folder: Path) -> bool:
    try:
        return has_backup(folder)
    except KnobBackupError:
        return True


def _backup(folder: Path) -> Finding:
    try:
        holder, kept = holder_of(folder), has_backup(folder)
    except KnobBackupError as error:
        return limited("restore file", str(error), "run this as root")
    if holder is not None:
        return fine("restore file", f"process {holder} uses the device and will restore it")
    if kept:
        return limited(
            "restore file",
            f"{folder}: the device may not be in its owner's mode",
            "run `wattfleet agent restore`; the agent's next start restores it, too",
        )
    return fine("restore file", "none: the device has its owner's settings")


def _installed(code: InstalledCode) -> Finding:
    try:
        problem = code_problem(code)
    except InvalidInputError as error:
        return limited("installation", str(error), "run this as root")
    if problem is None:
        return fine("installation", f"{code.program}, which only root can write; the service can run it")
    return limited("installation", f"`wattfleet agent install` would refuse this. {problem.found}", problem.remedy)


def _socket(path: Path) -> Finding:
    with closing(socket.socket(socket.AF_UNIX)) as connection:
        try:
            connection.connect(str(path))
        except PermissionError:
            return limited("socket", f"{path}: permission denied", "join its group: `usermod -aG wattfleet <user>`")
        except OSError:
            return limited("socket", f"{path}: no agent is running", "start one: `systemctl start wattfleet-agent`")
    return fine("socket", f"{path}: an agent is running")
