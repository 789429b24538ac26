"""A Jetson read through jetson-stats (jtop) instead of the kernel's files: power, temperature and fan.

jetson-stats is AGPL-licensed and a separate extra; only `open_jtop` imports it. Its setters return before the change
takes effect, so the new value is polled.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from edge_agent.devices.device import Activity, Device, Knobs, ModeNotAppliedError, PowerTrace
from edge_agent.devices.host import PhysicalBoard
from wattfleet.common.clock import Clock
from wattfleet.common.parsing import parse_json
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet.core.modes import ModeArray, PowerMode, Provenance
from wattfleet_proto.device_state import BoardSample

_INTERVAL_S = 0.5
_APPLIED_WITHIN_S = 10.0
_LOOK_AGAIN_S = 0.5
_FULL_SPEED = 100.0
# Tolerance: jtop writes the fan's speed as one of 256 values and reads it back.
_SPEED_TOLERANCE = 1.0
_MANUAL = "manual"
_PREFIX = "jtop/"


class JtopUnavailableError(WattfleetError):
    """jtop cannot be used: jetson-stats is not installed, or its service does not run."""


class JtopMeter:
    """Collects every sample that jtop publishes (a `PowerMeter`).

    Args:
        client: a started `jtop.jtop`.
        clock: stamps each sample.
        rails: as for `JtopDevice`.
    """

    def __init__(self, client: Any, clock: Clock, rails: Sequence[str]) -> None:
        self._client = client
        self._clock = clock
        self._rails = rails
        self._samples: list[tuple[float, float]] = []
        client.attach(self._sample)

    def read(self) -> PowerTrace:
        """Return the samples so far."""
        samples = np.array(self._samples.copy(), dtype=np.float64).reshape(-1, 2)
        return PowerTrace(samples[:, 0], samples[:, 1])

    def stop(self) -> PowerTrace:
        """Stop sampling and return all samples."""
        self._client.detach(self._sample)
        return self.read()

    def _sample(self, client: Any) -> None:
        self._samples.append((self._clock.now_s(), _total_mw(client.power, self._rails)))


class JtopDevice(PhysicalBoard):
    """A board that is set through another device and read through jtop (a `Device`).

    Args:
        board: applies the modes and reads them back.
        client: a started `jtop.jtop`.
        rails: the rails whose sum is the board's power; without any, jtop's total is used.
    """

    def __init__(self, board: Device, client: Any, rails: Sequence[str] = ()) -> None:
        self._board = board
        self._client = client
        self._rails = rails

    @property
    def board_kind(self) -> str:
        """Kind of board, such as `agx-orin`."""
        return self._board.board_kind

    @property
    def basis(self) -> str:
        """What its figures depend on apart from the mode."""
        return self._board.basis

    @property
    def provenance(self) -> Provenance:
        """The source of its figures."""
        return self._board.provenance

    @property
    def clock(self) -> Clock:
        """The time base of everything measured on it."""
        return self._board.clock

    @property
    def modes(self) -> ModeArray:
        """`[n, 4]` modes that can be applied."""
        return self._board.modes

    def try_knobs(self) -> None:
        """Find out which settings the board does not reach."""
        self._board.try_knobs()

    def current_mode(self) -> PowerMode:
        """Return the current mode, read back from the board."""
        return self._board.current_mode()

    def apply(self, mode: PowerMode) -> None:
        """Apply a mode.

        Raises:
            InvalidInputError: the board does not offer this mode.
            ModeNotAppliedError: it was set, but another one was read back.
        """
        self._board.apply(mode)

    def differences(self, mode: PowerMode) -> list[str]:
        """Describe how the current settings differ from an applied mode."""
        return self._board.differences(mode)

    def start_meter(self) -> JtopMeter:
        """Start sampling board power."""
        return JtopMeter(self._client, self.clock, self._rails)

    def conditions(self) -> BoardSample:
        """Return the hottest temperature that jtop reports, and whatever else the board itself reports."""
        hottest = [_temperature_c(part) for part in self._client.temperature.values()]
        known = [temperature_c for temperature_c in hottest if temperature_c is not None]
        return replace(self._board.conditions(), temperature_c=max(known, default=None))

    def activity(self) -> Activity:
        """Return the power and the fan speed that jtop published last, and whatever else the board itself reports."""
        speeds = [state.speed for state in self._fans().values()]
        fan_share = max(speeds) / _FULL_SPEED if speeds else None
        return replace(self._board.activity(), power_mw=_total_mw(self._client.power, self._rails), fan_share=fan_share)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Hold the fans at full speed until the block ends.

        Raises:
            ModeNotAppliedError: a fan did not reach full speed.
        """
        before = self._fans()
        try:
            for name in before:
                self._set_fan(name, _FanState(_MANUAL, _FULL_SPEED))
            yield
        finally:
            self._put_back(before)

    def knobs(self) -> Knobs:
        """Return the current settings, including the fans."""
        fans = {f"{_PREFIX}{name}": json.dumps(state) for name, state in self._fans().items()}
        return {**self._board.knobs(), **fans}

    def restore(self, knobs: Knobs) -> None:
        """Restore settings that `knobs` returned.

        Raises:
            InvalidInputError: the settings are not this board's.
            ModeNotAppliedError: they were set, but other values were read back.
        """
        fans = {name: value for name, value in knobs.items() if name.startswith(_PREFIX)}
        if set(fans) != {f"{_PREFIX}{name}" for name in self._fans()}:
            raise InvalidInputError(f"cannot restore {dict(knobs)}: jtop has other fans on this board")
        states = {name.removeprefix(_PREFIX): _fan_state(value) for name, value in fans.items()}
        self._board.restore({name: value for name, value in knobs.items() if name not in fans})
        self._put_back(states)

    def close(self) -> None:
        """Close the connection to jtop's service."""
        self._client.close()

    def _fans(self) -> dict[str, _FanState]:
        fan = self._client.fan
        return {name: _FanState(fan.get_profile(name), float(fan.get_speed(name))) for name in fan}

    def _put_back(self, states: Mapping[str, _FanState]) -> None:
        for name, state in states.items():
            self._set_fan(name, state)

    def _set_fan(self, name: str, wanted: _FanState) -> None:
        """Set one fan, and wait until jtop's service has applied it."""
        try:
            self._client.fan.set_profile(name, wanted.profile)
            if wanted.profile == _MANUAL:
                self._client.fan.set_speed(name, wanted.speed)
        except importlib.import_module("jtop").JtopException as error:
            raise ModeNotAppliedError(f"jtop's fan {name}: {error}; use --device sysfs on this board") from None
        give_up_s = self.clock.now_s() + _APPLIED_WITHIN_S
        while not wanted.matches(found := self._fans()[name]):
            if self.clock.now_s() >= give_up_s:
                raise ModeNotAppliedError(
                    f"jtop's fan {name}: wanted {wanted}, still {found} after {_APPLIED_WITHIN_S:g} s; check that"
                    " this user is in the group jtop"
                )
            self.clock.sleep_s(_LOOK_AGAIN_S)


class _FanState(NamedTuple):
    profile: str
    speed: float

    def __str__(self) -> str:
        return f"{self.profile} at {self.speed:.0f} %"

    def matches(self, found: _FanState) -> bool:
        """Return whether a fan is in this state; outside the manual profile, any speed is accepted."""
        near = abs(found.speed - self.speed) <= _SPEED_TOLERANCE
        return found.profile == self.profile and (near or self.profile != _MANUAL)


def _fan_state(value: str) -> _FanState:
    try:
        profile, speed = parse_json(value)
        return _FanState(str(profile), float(speed))
    except (ValueError, TypeError):
        raise InvalidInputError(f"cannot restore the fan state {value!r}: it is not a profile with a speed") from None


def open_jtop(board: Device, rails: Sequence[str] = ()) -> JtopDevice:
    """Read a board through jtop.

    Args:
        board: applies its modes.
        rails: as for `JtopDevice`.

    Raises:
        JtopUnavailableError: jetson-stats is not installed, too old, or its service cannot be reached.
    """
    try:
        library = importlib.import_module("jtop")
    except ModuleNotFoundError:
        raise JtopUnavailableError("jetson-stats is not installed; run pip install 'wattfleet[jetson]'") from None
    client = library.jtop(interval=_INTERVAL_S)
    try:
        client.start()
        try:
            # Wait for the first sample: before it, every dictionary is empty.
            is_publishing = client.ok()
        except BaseException:
            client.close()
            raise
    except (library.JtopException, OSError, EOFError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise JtopUnavailableError(
            f"jtop's service does not answer ({reason}); run sudo systemctl start jtop"
        ) from None
    if not is_publishing:
        client.close()
        raise JtopUnavailableError("jtop's service publishes no samples; run sudo systemctl restart jtop")
    if not isinstance(client.power, Mapping) or "tot" not in client.power:
        client.close()
        raise JtopUnavailableError("this jtop reports no total power; install jetson-stats 4.3 or newer on the board")
    if missing := [name for name in rails if _rail_mw(client.power, name) is None]:
        client.close()
        raise JtopUnavailableError(
            f"this jtop does not report {', '.join(missing)}, which make up the power of this board; install"
            " jetson-stats 7.2 or newer on the board, or use --device sysfs"
        )
    return JtopDevice(board, client, rails)


def _total_mw(power: Mapping[str, Any], rails: Sequence[str]) -> float:
    """Return the board's power in a sample, mW; NaN if it is missing.

    Without an input rail, jtop's total is the sum of all rails, even of those that are measured inside others.
    """
    if not rails:
        total = power.get("tot", {}).get("power")
        return math.nan if total is None else float(total)
    found = [_rail_mw(power, name) for name in rails]
    return math.nan if None in found else float(sum(filter(None, found)))


def _rail_mw(power: Mapping[str, Any], name: str) -> float | None:
    """Return the power of a rail in a sample, mW; None if it is missing. jtop shows an input rail as the total."""
    total = power.get("tot", {})
    rail = total if total.get("name") == name else power.get("rail", {}).get(name, {})
    mw = rail.get("power")
    return None if mw is None else float(mw)


def _temperature_c(part: Any) -> float | None:
    """Return the temperature of a part, degrees Celsius; None while its sensor is offline."""
    return float(part["temp"]) if part.get("online", True) else None
