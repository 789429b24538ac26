"""What an agent is doing, as a pure state machine: what happened goes in, what to report and to do comes out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from wattfleet_proto.device_state import DeviceState

MAY_TRAIN = frozenset({DeviceState.READY, DeviceState.DEGRADED})
"""Where a training may begin: a degraded device whose mode takes again is well."""


class Action(Enum):
    """What a new state asks for."""

    REPORT_FRONT = auto()
    """Report the front by what is known now, before the state: a ready device is planned by its front."""
    MEASURE_ANEW = auto()
    RECOVER = auto()
    """Try until the device can be parked and its power be read."""


@dataclass(frozen=True)
class ModeMeasured:
    """A profile goes on; `detail` is its last step in words."""

    detail: str


@dataclass(frozen=True)
class ProfileEnded:
    """All that was to be measured is, and the device is parked; `anew` where a profile was begun anew."""

    anew: bool


@dataclass(frozen=True)
class TrainingBegan:
    """The assigned mode is in force; `mode` is its label."""

    mode: str


@dataclass(frozen=True)
class TrainingRefused:
    """The app asked for something that cannot be; the device is parked."""

    reason: str


@dataclass(frozen=True)
class TrainingBrokeOff:
    """Whoever trained is gone; the device is parked."""


@dataclass(frozen=True)
class TrainingEnded:
    """The app has finished, and the device is parked.

    Attributes:
        failed: the app's training failed, so there is nothing to learn.
        drift: why the device has to be measured anew; None where it does not.
        not_learnt: why what the round showed could not be kept; None where it was.
    """

    failed: bool = False
    drift: str | None = None
    not_learnt: str | None = None


@dataclass(frozen=True)
class DeviceFailed:
    """A knob did not follow or a sensor is gone: the device is not to be trusted with a round."""

    reason: str


@dataclass(frozen=True)
class DeviceRecovered:
    """The device was parked and its power read."""


@dataclass(frozen=True)
class BegunAnew:
    """The device is made ready once more, as at the agent's start; `reason` says why."""

    reason: str


Event = (
    ModeMeasured
    | ProfileEnded
    | TrainingBegan
    | TrainingRefused
    | TrainingBrokeOff
    | TrainingEnded
    | DeviceFailed
    | DeviceRecovered
    | BegunAnew
)


@dataclass(frozen=True)
class Decision:
    """What follows from an event.

    Attributes:
        state: the state from now on.
        detail: for people; None where there is nothing new to report.
        actions: what to do.
    """

    state: DeviceState
    detail: str | None
    actions: frozenset[Action] = frozenset()


class ImpossibleEventError(Exception):
    """An event that cannot happen in this state: a mistake in the agent."""


_PROFILED_ONCE = frozenset({DeviceState.PROFILING, DeviceState.READY, DeviceState.TRAINING, DeviceState.DEGRADED})
_POSSIBLE: dict[type[Event], frozenset[DeviceState]] = {
    ModeMeasured: frozenset({DeviceState.ENROLLED, DeviceState.PROFILING}),
    ProfileEnded: frozenset({DeviceState.ENROLLED, DeviceState.PROFILING}),
    TrainingBegan: MAY_TRAIN,
    TrainingRefused: frozenset({DeviceState.TRAINING}),
    # It may break off while its mode is being put in force, too.
    TrainingBrokeOff: frozenset({DeviceState.READY, DeviceState.TRAINING, DeviceState.DEGRADED}),
    TrainingEnded: frozenset({DeviceState.TRAINING}),
    DeviceFailed: _PROFILED_ONCE,
    DeviceRecovered: _PROFILED_ONCE,
    BegunAnew: frozenset({DeviceState.ENROLLED, DeviceState.PROFILING, DeviceState.READY, DeviceState.DEGRADED}),
}


def decide(state: DeviceState, event: Event, unfinished: bool = False) -> Decision:
    """What follows from an event.

    Args:
        state: the state so far.
        event: what happened.
        unfinished: a profile was begun anew and has not ended: the device is not ready before it has.

    Raises:
        ImpossibleEventError: it cannot happen in this state.
    """
    decision = _decided(state, event)
    if unfinished and decision.state is DeviceState.READY and not isinstance(event, ProfileEnded):
        detail = f"{decision.detail}; measuring goes on"
        return Decision(DeviceState.PROFILING, detail, frozenset({Action.MEASURE_ANEW}))
    return decision


def _decided(state: DeviceState, event: Event) -> Decision:
    if state not in _POSSIBLE[type(event)]:
        raise ImpossibleEventError(f"{event} cannot happen to a device that is {state.name.lower()}")
    if isinstance(event, ModeMeasured):
        return Decision(DeviceState.PROFILING, event.detail)
    if isinstance(event, ProfileEnded):
        return _parked("measured anew" if event.anew else None, Action.REPORT_FRONT)
    if isinstance(event, TrainingBegan):
        return Decision(DeviceState.TRAINING, f"training in {event.mode}")
    if isinstance(event, TrainingRefused):
        return _parked(event.reason)
    if isinstance(event, TrainingBrokeOff):
        return _parked("the last training broke off")
    if isinstance(event, TrainingEnded):
        return _after_training(event)
    if isinstance(event, DeviceFailed):
        return Decision(DeviceState.DEGRADED, event.reason, frozenset({Action.RECOVER}))
    if isinstance(event, BegunAnew):
        return Decision(DeviceState.PROFILING, event.reason)
    # Trained well in the meantime: there is nothing to recover from.
    return _parked("recovered") if state is DeviceState.DEGRADED else Decision(state, None)


def _after_training(ended: TrainingEnded) -> Decision:
    if ended.not_learnt is not None:
        return _parked(ended.not_learnt)
    if ended.drift is not None:
        return Decision(DeviceState.PROFILING, f"measured anew: {ended.drift}", frozenset({Action.MEASURE_ANEW}))
    return _parked(None) if ended.failed else _parked(None, Action.REPORT_FRONT)


def _parked(why: str | None, *actions: Action) -> Decision:
    return Decision(DeviceState.READY, f"parked; {why}" if why else "parked", frozenset(actions))
