"""Checks a Jetson: what its kernel reports, and which settings may be written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from edge_agent.devices.device import ModeNotAppliedError
from edge_agent.devices.jetson.cpu import Cpu
from edge_agent.devices.jetson.fan import Fan
from edge_agent.devices.jetson.gpu import Gpu
from edge_agent.devices.jetson.identity import identify
from edge_agent.devices.jetson.memory import Memory
from edge_agent.devices.jetson.rails import BoardPower
from edge_agent.devices.jetson.thermal import read_conditions, read_throttle_counters, read_zones
from edge_agent.devices.sysfs import default_memory_hz
from edge_agent.devices.tree import Tree
from edge_agent.diagnosis.finding import Finding, failing, fine, limited
from wattfleet.errors import InvalidInputError
from wattfleet_io.console import count_of
from wattfleet_io.programs import run_no_program

_AS_ROOT = "run this as root: `sudo wattfleet agent doctor`"
_DRIVER = "check that the kernel is NVIDIA's, from JetPack 4 to 7"


def jetson_findings(tree: Tree) -> Iterator[Finding]:
    """Check each part of a Jetson separately, so that one failure does not hide another."""
    try:
        identity = identify(tree)
    except InvalidInputError as error:
        yield failing("board", str(error), "ask for support of this board; its power rails must be known")
        return
    yield fine("board", f"{identity.model}, kind {identity.kind}")
    yield _software(identity.l4t, identity.jetpack)
    yield from _clocks(tree, identity.kind)
    yield from _power(tree, identity.kind)
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
        return limited(
            "software",
            "/etc/nv_tegra_release does not name the Jetson Linux release",
            "nothing to do; it is for information only",
        )
    return fine("software", f"Jetson Linux {l4t}, {f'JetPack {jetpack}' if jetpack else 'JetPack unknown'}")


def _clocks(tree: Tree, kind: str) -> Iterator[Finding]:
    """Check cores, GPU and memory, and whether they may be set."""
    writable: list[str] = []
    checks: tuple[Callable[[], tuple[Finding, list[str]]], ...] = (
        lambda: _cpu(tree),
        lambda: _gpu(tree),
        lambda: _memory(tree, kind),
    )
    for topic, check in zip(("CPU", "GPU", "memory"), checks, strict=True):
        try:
            finding, files = check()
        except (InvalidInputError, ModeNotAppliedError) as error:
            yield failing(topic, str(error), _DRIVER)
            continue
        writable += files
        yield finding
    writable += Fan(tree, run_no_program).written_files()
    refused = [path for path in writable if not tree.may_write(path)]
    if refused:
        yield failing(
            "permission", f"{len(refused)} of {len(writable)} settings are not writable, such as {refused[0]}", _AS_ROOT
        )
    else:
        yield fine("permission", f"all {len(writable)} settings are writable")


def _cpu(tree: Tree) -> tuple[Finding, list[str]]:
    cpu = Cpu(tree)
    policies = tree.glob("/sys/devices/system/cpu/cpufreq/policy*")
    shared = f"{len(policies)} {'policy' if len(policies) == 1 else 'policies'}"
    found = f"{cpu.cores} cores, {len(cpu.online())} online, {shared}; {_span(cpu.table_khz, 1e3)}"
    return fine("CPU", found), cpu.written_files()


def _gpu(tree: Tree) -> tuple[Finding, list[str]]:
    gpu = Gpu(tree)
    return fine("GPU", f"{gpu.folder.rpartition('/')[2]}; {_span(gpu.table_hz, 1e6)}"), gpu.written_files()


def _memory(tree: Tree, kind: str) -> tuple[Finding, list[str]]:
    memory = Memory(tree, default_memory_hz(kind))
    if not memory.written_files():
        found = "no interface to set it, so it has one frequency"
        return limited("memory", found, f"{_AS_ROOT}; a Nano has no interface"), []
    found = f"{memory.interface}; {_span(memory.table_hz, 1e6)}"
    if not memory.table_is_live:
        return limited(
            "memory", f"{found}, the default table of its kind", _debugfs("the live table")
        ), memory.written_files()
    if not memory.has_lock:
        return limited("memory", f"{found}; capped, but not locked", _debugfs("a lock")), memory.written_files()
    return fine("memory", f"{found}, the live table; locked"), memory.written_files()


def _debugfs(what: str) -> str:
    return f"for {what}, mount debugfs and {_AS_ROOT}; a Nano has none"


def _power(tree: Tree, kind: str) -> Iterator[Finding]:
    power = BoardPower(tree, kind)
    named = " + ".join(power.rails)
    if power.missing:
        yield failing(
            "power",
            f"of {named}, missing: {', '.join(power.missing)}",
            "load the driver ina3221 (`modprobe ina3221`)",
        )
        return
    now_mw = power.read_mw()
    if math.isnan(now_mw):
        yield failing("power", f"{named}: found, but a rail cannot be read", "check `dmesg` for ina3221 errors")
    else:
        yield fine("power", f"{named}: {now_mw / 1e3:.1f} W now")


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
    except (OSError, ValueError):
        return limited("throttling", "a counter cannot be read", "check `dmesg` for soctherm errors")
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
