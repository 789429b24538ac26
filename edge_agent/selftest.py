"""The test that owners run on their own board: every knob at both ends, read back, with its watts, and restored."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from edge_agent.devices.device import Device, Knobs, require_in_force
from edge_agent.devices.host import HostDevice
from edge_agent.devices.sysfs import SysfsDevice
from edge_agent.diagnosis import Finding, failing, fine, limited
from edge_agent.profiling.mode_measurement import DEFAULT_LIMITS
from edge_agent.training.mode_change import backed_up
from wattfleet.common.console import count_of
from wattfleet.core.errors import WattfleetError
from wattfleet.core.modes import PowerMode, array_to_modes, nearest_mode

SETTLE_S, SAMPLE_S = 2.0, 3.0
"""How long a mode is held before its power is sampled, and while it is, s."""
_LEAST_W, _MOST_W, _MOST_OF_A_HOST_W = 0.3, 250.0, 20_000.0
"""No Jetson, and no other machine, draws less or more."""
_NOISE = 0.05
"""Share by which the power of the same mode may differ."""

_KNOBS = (
    ("cores", "cores", 1, ""),
    ("CPU", "cpu_khz", 1e3, " MHz"),
    ("GPU", "gpu_hz", 1e6, " MHz"),
    ("memory", "mem_hz", 1e6, " MHz"),
)
"""Name of each knob, its field of a mode, and the unit to show it in."""

WORKS = "works"
_TIME = "time"
_REPORT = "report it in an issue with the file of `sudo wattfleet agent describe`"


class _TooHotError(WattfleetError):
    """The board is too hot to go on."""


class _OutOfTimeError(WattfleetError):
    """The time for the test is over."""


@dataclass
class _Test:
    """One run of the test.

    Attributes:
        device: the board.
        end_s: when no further mode is tried, device-clock seconds.
        watts: the power of each mode that was tried, W.
    """

    device: Device
    end_s: float
    watts: dict[PowerMode, float] = field(default_factory=dict)

    def try_mode(self, mode: PowerMode) -> float:
        """Apply a mode, read it back, and return its power while the board works, W; NaN if it cannot be read.

        Raises:
            WattfleetError: it did not take effect, or did not stay in force, or the test has to end.
        """
        if mode in self.watts:
            return self.watts[mode]
        device, clock = self.device, self.device.clock
        if clock.now_s() >= self.end_s:
            raise _OutOfTimeError("the time is over")
        degrees = device.conditions().temperature_c
        if degrees is not None and degrees > DEFAULT_LIMITS.temperature_c:
            raise _TooHotError(f"the board is at {degrees:.0f} degrees C")
        device.apply(mode)
        require_in_force(device, mode)
        self._work(SETTLE_S)
        meter = device.start_meter()
        try:
            self._work(SAMPLE_S)
        finally:
            trace = meter.stop()
        require_in_force(device, mode)
        known_mw = trace.power_mw[np.isfinite(trace.power_mw)]
        self.watts[mode] = float(np.median(known_mw)) / 1e3 if len(known_mw) else math.nan
        return self.watts[mode]

    def _work(self, seconds: float) -> None:
        """Let time pass; a virtual board trains meanwhile."""
        clock, step = self.device.clock, self.device.built_in_workload()
        until_s = clock.now_s() + seconds
        while step is not None and clock.now_s() < until_s:
            step()
        clock.sleep_s(max(0.0, until_s - clock.now_s()))


def selftest(
    device: Device,
    folder: Path,
    limit_s: float,
    busy: Callable[[int], AbstractContextManager[None]],
    interrupting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Generator[Finding, None, None]:
    """Try both ends of every knob of a board; its settings are restored at the end. Close the iterator to end early.

    Args:
        device: the board.
        folder: the device's own folder, for the backup of its settings.
        limit_s: no further mode is tried after this time, s; the last one takes a few seconds more.
        busy: keeps this number of cores busy.
        interrupting: returns a context that is held while the board is tried, but not while it is restored.

    Raises:
        DeviceBusyError: another process has locked the device.
        KnobBackupError: the settings cannot be backed up; the device was not touched.
        ModeNotAppliedError: the settings could not be restored before the test, after an earlier process.
    """
    test = _Test(device, device.clock.now_s() + limit_s)
    throttled_before = device.conditions().throttle_events
    with ExitStack() as held:
        held.enter_context(backed_up(device, folder))
        # An earlier mode of Wattfleet has been undone.
        before = device.knobs()
        with busy(int(device.modes[:, 0].max())), interrupting():
            yield from _knobs(test)
        with interrupting():
            yield _fan(device)
        yield _restored(device, held, before)
    yield from _throttling(device, throttled_before)


def result_of(findings: Sequence[Finding]) -> str:
    """Return `works`, `not finished`, or what fails."""
    if failed := [finding.topic for finding in findings if finding.level == "fails"]:
        return f"fails: {', '.join(failed)}"
    return "not finished" if any(finding.topic == _TIME for finding in findings) else WORKS


@contextmanager
def busy_cores(cores: int) -> Iterator[None]:
    """Keep cores busy until the block ends, or this process does."""
    spin = f"import os\nwhile os.getppid() == {os.getpid()}:\n    for _ in range(1_000_000): pass"
    # In a session of their own, so that Ctrl-C reaches only this process, which ends them.
    # Isolated, since Python 3.10 would import `os` from the current folder.
    command = [sys.executable, "-I", "-S", "-c", spin]
    running = [subprocess.Popen(command, start_new_session=True) for _ in range(cores)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def load_of(device: Device) -> Callable[[int], AbstractContextManager[None]]:
    """Return what keeps a board busy during the test: its cores, or nothing if it is virtual."""
    return busy_cores if device.provenance in ("hardware", "stated") else lambda cores: nullcontext()


def report_row(device: Device, version: str, findings: Sequence[Finding]) -> str:
    """Return the row for the table of what was tried by whom."""
    board, software = device.board_kind, "unknown"
    if isinstance(device, SysfsDevice):
        identity = device.identity
        board, software = f"{identity.model} ({board})", f"Jetson Linux {identity.l4t or 'unknown'}"
    return f"| {board} | {software} | {version} | {result_of(findings)} | <your name>, <date> |"


def _knobs(test: _Test) -> Iterator[Finding]:
    device = test.device
    lowest, highest = array_to_modes(np.stack([device.modes.min(axis=0), device.modes.max(axis=0)]))
    # The other knobs stay where the owner has them, so that one that does not follow spoils only its own check.
    base = nearest_mode(device.modes, device.current_mode())
    try:
        for name, knob, per_unit, unit in _KNOBS:
            low, high = getattr(lowest, knob), getattr(highest, knob)
            if low == high:
                yield fine(name, f"has one value, {high / per_unit:g}{unit}")
                continue
            values = f"{low / per_unit:g} to {high / per_unit:g}{unit}"
            yield _tried(name, values, test, base._replace(**{knob: low}), base._replace(**{knob: high}))
        yield _tried("lowest mode", lowest.label(), test, lowest)
        yield _tried("highest mode", highest.label(), test, highest)
    except _TooHotError as error:
        yield failing("temperature", str(error), "cool it, and check that its fan runs; then try again")
    except _OutOfTimeError:
        yield limited(_TIME, "over before every knob was tried", "pass more --minutes")
    else:
        yield from _power(test, lowest, highest)


def _tried(name: str, values: str, test: _Test, *modes: PowerMode) -> Finding:
    """Try modes one after another.

    Raises:
        _TooHotError: the board is too hot.
        _OutOfTimeError: the time is over.
    """
    try:
        watts = [test.try_mode(mode) for mode in modes]
    except (_TooHotError, _OutOfTimeError):
        raise
    except WattfleetError as error:
        return failing(name, str(error), _REPORT)
    text = " to ".join("power unknown" if math.isnan(each) else f"{each:.1f} W" for each in watts)
    return fine(name, f"{values}: set and read back, {text}")


def _power(test: _Test, lowest: PowerMode, highest: PowerMode) -> Iterator[Finding]:
    watts = list(test.watts.values())
    host = test.device if isinstance(test.device, HostDevice) else None
    most_w = _MOST_W if host is None else _MOST_OF_A_HOST_W
    if not watts or any(map(math.isnan, watts)):
        yield failing("power", "cannot be read", "run `wattfleet agent doctor` for the reason")
    elif not all(_LEAST_W < each < most_w for each in watts):
        found = f"{min(watts):.1f} to {max(watts):.1f} W is not what a {'machine' if host else 'Jetson'} draws"
        yield failing("power", found, f"check what is measured in `wattfleet agent doctor`, and {_REPORT}")
    elif host is not None and (host.file.modes == "gpu-power" or host.file.is_stated):
        why = "stated, not measured" if host.file.is_stated else "its GPUs are not used by the test"
        yield fine("power", f"{min(watts):.1f} to {max(watts):.1f} W; {why}, so it need not follow the modes")
    elif lowest in test.watts and highest in test.watts:
        low_w, high_w = test.watts[lowest], test.watts[highest]
        found = f"{low_w:.1f} W in the lowest mode, {high_w:.1f} W in the highest, with all cores busy"
        if high_w > low_w * (1 + _NOISE):
            yield fine("power", found)
        else:
            yield failing("power", f"{found}: it does not follow the clocks", f"check the rails, and {_REPORT}")


def _fan(device: Device) -> Finding:
    try:
        with device.measuring():
            share = device.activity().fan_share
    except WattfleetError as error:
        return failing("fan", str(error), _REPORT)
    return fine("fan", "none that can be set" if share is None else f"{share:.0%} while measuring, then as before")


def _restored(device: Device, held: ExitStack, before: Knobs) -> Finding:
    try:
        held.close()
        changed = [name for name, value in device.knobs().items() if before.get(name) != value]
    except WattfleetError as error:
        return failing("restored", str(error), _REPORT)
    # What controls the fan has set its speed again.
    changed = [name for name in changed if not name.startswith(("fan/pwm", "jtop/"))]
    if changed:
        return failing("restored", f"{', '.join(changed)} differ from before", f"reboot, and {_REPORT}")
    return fine("restored", f"{count_of(len(before), 'setting')}, each as before")


def _throttling(device: Device, before: int | None) -> Iterator[Finding]:
    now = device.conditions().throttle_events
    if now is not None and before is not None and now > before:
        yield limited(
            "throttling",
            f"{count_of(now - before, 'event')} during the test",
            "use a stronger power supply; such modes are not measured",
        )
