"""The agent's state machine, without side effects: it maps events to states, reports and actions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from wattfleet_proto.device_state import DeviceState

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
class Decision:
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


def decide(state: DeviceState, event: Event, reprofiling: bool = False) -> Decision:
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
        return Decision(DeviceState.PROFILING, detail, frozenset({Action.REPROFILE}))
    return decision


def _decided(state: DeviceState, event: Event) -> Decision:
    if state not in _POSSIBLE[type(event)]:
        raise ImpossibleEventError(f"{event} cannot happen to a device that is {state.name.lower()}")
    if isinstance(event, ModeMeasured):
        return Decision(DeviceState.PROFILING, event.detail)
    if isinstance(event, ProfileEnded):
        return _parked("profiled again" if event.repeated else None, Action.REPORT_FRONT)
    if isinstance(event, TrainingBegan):
        return Decision(DeviceState.TRAINING, f"training in {event.mode}")
    if isinstance(event, TrainingParked):
        return Decision(DeviceState.TRAINING, f"parked; {event.why}")
    if isinstance(event, TrainingRejected):
        return _parked(event.reason)
    if isinstance(event, TrainingAborted):
        return _parked("the last training was aborted")
    if isinstance(event, TrainingEnded):
        return _after_training(event)
    if isinstance(event, DeviceFailed):
        return Decision(DeviceState.DEGRADED, event.reason, frozenset({Action.RECOVER}))
    if isinstance(event, PreparationRestarted):
        return Decision(DeviceState.PROFILING, event.reason)
    # A training that succeeded in the meantime has already ended the degraded state.
    return _parked("recovered") if state is DeviceState.DEGRADED else Decision(state, None)


def _after_training(ended: TrainingEnded) -> Decision:
    if ended.not_learned is not None:
        return _parked(ended.not_learned)
    if ended.drift is not None:
        return Decision(DeviceState.PROFILING, f"profiling again: {ended.drift}", frozenset({Action.REPROFILE}))
    if ended.failed:
        return _parked(None)
    why = None if ended.unmeasured is None else f"no mode measured yet: {ended.unmeasured}"
    return _parked(why, Action.REPORT_FRONT)


def _parked(why: str | None, *actions: Action) -> Decision:
    return Decision(DeviceState.READY, f"parked; {why}" if why else "parked", frozenset(actions))
