"""The agent's state machine, without side effects: it maps events to states, reports and actions."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from enum import Enum, auto

from edge_agent.devices.device import Device
from edge_agent.session.coordinator_session import CoordinatorSession
from wattfleet.common.console import count_of
from wattfleet.common.logs import fields
from wattfleet.core.errors import WattfleetError
from wattfleet.core.modes import PowerMode
from wattfleet_proto.convert import state_to_message
from wattfleet_proto.device_state import BoardSample, DeviceState
from wattfleet_proto.limits import MAX_DETAIL_CHARACTERS
from wattfleet_proto.v1 import session_pb2

_log = logging.getLogger(__name__)

MAY_TRAIN = frozenset({DeviceState.READY, DeviceState.DEGRADED})
"""States in which a training may begin. A degraded device that applies its mode has recovered."""


class Action(Enum):
    """What the agent has to do in a new state."""

    REPORT_FRONT = auto()
    """Report the current front before the state, as a ready device is planned by its front."""
    REPROFILE = auto()
    RECOVER = auto()
    """Retry until the device can be parked and its power can be read."""


@dataclass(frozen=True)
class ModeMeasured:
    """A profile has made progress.

    Attributes:
        detail: describes its last step.
        total: maximum of modes that it measures; None if unknown.
    """

    detail: str
    total: int | None = None


@dataclass(frozen=True)
class ProfileEnded:
    """A profile is complete and the device is parked; `repeated` is true if it was not the first profile."""

    repeated: bool


@dataclass(frozen=True)
class TrainingBegan:
    """The assigned mode was applied; `mode` is its label."""

    mode: str


@dataclass(frozen=True)
class TrainingParked:
    """The device is parked and its grant is over, but it is not free for the next round yet.

    Attributes:
        why: what it still does, for people.
    """

    why: str


@dataclass(frozen=True)
class TrainingRejected:
    """The app made an invalid request; the device is parked."""

    reason: str


@dataclass(frozen=True)
class TrainingAborted:
    """The app has disconnected during its training; the device is parked."""


@dataclass(frozen=True)
class TrainingEnded:
    """The app has finished, and the device is parked.

    Attributes:
        failed: the app's training failed, so nothing was learned.
        drift: why the device has to be profiled again; None if it does not.
        not_learned: why nothing could be learned from the round; None if it could.
        unmeasured: why no mode of the workload has been measured so far; None if one has.
    """

    failed: bool = False
    drift: str | None = None
    not_learned: str | None = None
    unmeasured: str | None = None


@dataclass(frozen=True)
class DeviceFailed:
    """A knob was not set or a sensor failed: the device must not get a round."""

    reason: str


@dataclass(frozen=True)
class DeviceRecovered:
    """The device was parked and its power was read."""


@dataclass(frozen=True)
class PreparationRestarted:
    """The device is prepared again, as at the agent's start; `reason` is for people."""

    reason: str


Event = (
    ModeMeasured
    | ProfileEnded
    | TrainingBegan
    | TrainingParked
    | TrainingRejected
    | TrainingAborted
    | TrainingEnded
    | DeviceFailed
    | DeviceRecovered
    | PreparationRestarted
)


@dataclass(frozen=True)
class Consequences:
    """The consequences of an event.

    Attributes:
        state: the new state.
        detail: the report's text; None if there is nothing new to report.
        actions: what to do.
    """

    state: DeviceState
    detail: str | None
    actions: frozenset[Action] = frozenset()


class ImpossibleEventError(Exception):
    """An event that is impossible in this state: a bug in the agent."""


_PROFILED_ONCE = frozenset({DeviceState.PROFILING, DeviceState.READY, DeviceState.TRAINING, DeviceState.DEGRADED})
_POSSIBLE: dict[type[Event], frozenset[DeviceState]] = {
    ModeMeasured: frozenset({DeviceState.ENROLLED, DeviceState.PROFILING}),
    ProfileEnded: frozenset({DeviceState.ENROLLED, DeviceState.PROFILING}),
    TrainingBegan: MAY_TRAIN,
    TrainingParked: frozenset({DeviceState.TRAINING}),
    TrainingRejected: frozenset({DeviceState.TRAINING}),
    # The app may also disconnect while its mode is being applied.
    TrainingAborted: frozenset({DeviceState.READY, DeviceState.TRAINING, DeviceState.DEGRADED}),
    TrainingEnded: frozenset({DeviceState.TRAINING}),
    DeviceFailed: _PROFILED_ONCE,
    DeviceRecovered: _PROFILED_ONCE,
    PreparationRestarted: frozenset(
        {DeviceState.ENROLLED, DeviceState.PROFILING, DeviceState.READY, DeviceState.DEGRADED}
    ),
}


def decide(state: DeviceState, event: Event, reprofiling: bool = False) -> Consequences:
    """Return the consequences of an event.

    Args:
        state: the state so far.
        event: what happened.
        reprofiling: whether a repeated profile is still in progress; the device is not ready until it has ended.

    Raises:
        ImpossibleEventError: the event is impossible in this state.
    """
    decision = _decided(state, event)
    if reprofiling and decision.state is DeviceState.READY and not isinstance(event, ProfileEnded):
        detail = f"{decision.detail}; profiling continues"
        return Consequences(DeviceState.PROFILING, detail, frozenset({Action.REPROFILE}))
    return decision


def _decided(state: DeviceState, event: Event) -> Consequences:
    if state not in _POSSIBLE[type(event)]:
        raise ImpossibleEventError(f"{event} cannot happen to a device that is {state.name.lower()}")
    if isinstance(event, ModeMeasured):
        return Consequences(DeviceState.PROFILING, event.detail)
    if isinstance(event, ProfileEnded):
        return _parked("profiled again" if event.repeated else None, Action.REPORT_FRONT)
    if isinstance(event, TrainingBegan):
        return Consequences(DeviceState.TRAINING, f"training in {event.mode}")
    if isinstance(event, TrainingParked):
        return Consequences(DeviceState.TRAINING, f"parked; {event.why}")
    if isinstance(event, TrainingRejected):
        return _parked(event.reason)
    if isinstance(event, TrainingAborted):
        return _parked("the last training was aborted")
    if isinstance(event, TrainingEnded):
        return _after_training(event)
    if isinstance(event, DeviceFailed):
        return Consequences(DeviceState.DEGRADED, event.reason, frozenset({Action.RECOVER}))
    if isinstance(event, PreparationRestarted):
        return Consequences(DeviceState.PROFILING, event.reason)
    # A training that succeeded in the meantime has already ended the degraded state.
    return _parked("recovered") if state is DeviceState.DEGRADED else Consequences(state, None)


def _after_training(ended: TrainingEnded) -> Consequences:
    if ended.not_learned is not None:
        return _parked(ended.not_learned)
    if ended.drift is not None:
        return Consequences(DeviceState.PROFILING, f"profiling again: {ended.drift}", frozenset({Action.REPROFILE}))
    if ended.failed:
        return _parked(None)
    why = None if ended.unmeasured is None else f"no mode measured yet: {ended.unmeasured}"
    return _parked(why, Action.REPORT_FRONT)


def _parked(why: str | None, *actions: Action) -> Consequences:
    return Consequences(DeviceState.READY, f"parked; {why}" if why else "parked", frozenset(actions))


# --- State reporter ---------------------------------------------------------------------------------------------------
# Holds the device's state, and reports its changes to the coordinator.


class StateReporter:
    """The only place that changes the state. Use it only on the event loop's thread.

    Args:
        session: reports states to the coordinator.

    Attributes:
        remark: another problem to mention, for people; it is added to every report.
        profiled_modes: modes measured so far, as last reported.
        modes_to_measure: maximum of modes that the profile in progress measures; None while no profile is in progress.
        trainings: number of trainings begun since the agent started.
    """

    def __init__(self, session: CoordinatorSession) -> None:
        self._session = session
        self.state = DeviceState.ENROLLED
        self.remark = ""
        self.profiled_modes = 0
        self.modes_to_measure: int | None = None
        self.trainings = 0
        self._reprofiling = False

    def decide(self, event: Event) -> Consequences:
        """Enter the state that follows from an event, without reporting it."""
        decision = decide(self.state, event, self._reprofiling)
        self.state = decision.state
        if isinstance(event, TrainingBegan):
            self.trainings += 1
        if isinstance(event, ModeMeasured):
            self.modes_to_measure = event.total
        elif decision.state is not DeviceState.PROFILING:
            self.modes_to_measure = None
        if Action.REPROFILE in decision.actions:
            self._reprofiling = True
        elif isinstance(event, ProfileEnded):
            self._reprofiling = False
        return decision

    def report(self, decision: Consequences, profiled_modes: int) -> None:
        """Report a decision to the coordinator, unless nothing has changed.

        Args:
            decision: the result of `decide`.
            profiled_modes: modes measured so far.
        """
        self.profiled_modes = profiled_modes
        if decision.detail is not None:
            detail = f"{decision.detail}; {self.remark}" if self.remark else decision.detail
            state = decision.state.value
            level = logging.WARNING if decision.state is DeviceState.DEGRADED else logging.INFO
            _log.log(
                level,
                "%s, %s measured%s",
                state,
                count_of(profiled_modes, "mode"),
                f": {detail}" if detail else "",
                extra=fields(state=state, profiled_modes=profiled_modes, detail=detail or None),
            )
            self._session.report_state(
                session_pb2.StateReport(
                    state=state_to_message(decision.state),
                    profiled_modes=profiled_modes,
                    detail=detail[:MAX_DETAIL_CHARACTERS],
                )
            )


# --- Board sampler ----------------------------------------------------------------------------------------------------
# Samples a board's power, temperature and mode while the agent runs; each lease carries the latest sample.

INTERVAL_S = 1.0
"""Seconds between two readings of power; energy is integrated from these readings."""

_CONDITIONS_EVERY = 5
"""Only every fifth reading includes temperature and mode, since these take many files to read."""

_LONGEST_GAP_S = 30.0
"""Energy over a longer gap between readings, such as a suspended board, is unknown and not counted."""


class BoardSampler:
    """Keeps the latest sample of one board.

    Args:
        device: the board.
        sleep: waits for a number of seconds.
    """

    def __init__(self, device: Device, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._device = device
        self._sleep = sleep
        self._readings = 0
        self._latest: BoardSample | None = None
        self._conditions = BoardSample()
        self._mode: PowerMode | None = None
        self._energy_j: float | None = None
        self._own_energy_from_mj: float | None = None
        self._before: tuple[float, float] | None = None
        self._is_failing = False

    @property
    def latest(self) -> BoardSample | None:
        """The latest sample; None before the first."""
        return self._latest

    async def run(self) -> None:
        """Sample until cancelled. If the board cannot be read, log that and try again."""
        while True:
            try:
                # In a thread, since a sensor may be slow.
                await asyncio.to_thread(self.sample)
                self._is_failing = False
            except (OSError, ValueError, WattfleetError) as error:
                if not self._is_failing:
                    _log.warning("the board's sensors cannot be read: %s", error)
                self._is_failing = True
                self._latest, self._before = None, None
            await self._sleep(INTERVAL_S)

    def sample(self) -> None:
        """Take the next reading.

        Raises:
            OSError: a sensor cannot be read.
            ValueError: a sensor returns no number.
            WattfleetError: the mode cannot be read.
        """
        now_s, activity = self._device.clock.now_s(), self._device.activity()
        power_w = activity.power_mw / 1e3 if math.isfinite(activity.power_mw) else None
        if activity.energy_mj is None:
            self._add_energy(now_s, power_w)
        else:
            if self._own_energy_from_mj is None:
                self._own_energy_from_mj = activity.energy_mj
            self._energy_j = (activity.energy_mj - self._own_energy_from_mj) / 1e3
        if self._readings % _CONDITIONS_EVERY == 0:
            self._conditions = self._device.conditions()
            self._mode = self._device.current_mode()
        self._readings += 1
        self._latest = replace(
            self._conditions,
            power_w=power_w,
            mode=self._mode,
            fan_share=activity.fan_share,
            gpu_use_share=activity.gpu_use_share,
            energy_j=self._energy_j,
        )

    def _add_energy(self, now_s: float, power_w: float | None) -> None:
        """Add the energy since the previous reading: the mean of both powers times the seconds between them."""
        if power_w is None:
            self._before = None
            return
        if self._before is not None and now_s - self._before[0] <= _LONGEST_GAP_S:
            before_s, before_w = self._before
            self._energy_j = (self._energy_j or 0.0) + (before_w + power_w) / 2 * (now_s - before_s)
        elif self._energy_j is None:
            self._energy_j = 0.0
        self._before = (now_s, power_w)
