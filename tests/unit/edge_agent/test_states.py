"""What follows from what happens to a device, decided without a device, a network or a clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.runtime.states import (
    MAY_TRAIN,
    Action,
    BegunAnew,
    Decision,
    DeviceFailed,
    DeviceRecovered,
    ImpossibleEventError,
    ModeMeasured,
    ProfileEnded,
    State,
    TrainingBegan,
    TrainingBrokeOff,
    TrainingEnded,
    TrainingRefused,
    decide,
)
from wattfleet_proto.v1 import session_pb2

FRONT, ANEW, RECOVER = (frozenset({action}) for action in (Action.REPORT_FRONT, Action.MEASURE_ANEW, Action.RECOVER))
NOTHING = frozenset()

TABLE = [
    (State.ENROLLED, ModeMeasured("measured 4c"), State.PROFILING, "measured 4c", NOTHING),
    (State.ENROLLED, ProfileEnded(anew=False), State.READY, "parked", FRONT),
    (State.PROFILING, ProfileEnded(anew=False), State.READY, "parked", FRONT),
    (State.PROFILING, ProfileEnded(anew=True), State.READY, "parked; measured anew", FRONT),
    (State.READY, TrainingBegan("4c"), State.TRAINING, "training in 4c", NOTHING),
    (State.DEGRADED, TrainingBegan("4c"), State.TRAINING, "training in 4c", NOTHING),
    (State.TRAINING, TrainingEnded(), State.READY, "parked", FRONT),
    (State.TRAINING, TrainingEnded(failed=True), State.READY, "parked", NOTHING),
    (State.TRAINING, TrainingEnded(drift="slower"), State.PROFILING, "measured anew: slower", ANEW),
    (State.TRAINING, TrainingEnded(not_learnt="disk full"), State.READY, "parked; disk full", NOTHING),
    (State.TRAINING, TrainingRefused("no epochs"), State.READY, "parked; no epochs", NOTHING),
    (State.TRAINING, TrainingBrokeOff(), State.READY, "parked; the last training broke off", NOTHING),
    (State.READY, TrainingBrokeOff(), State.READY, "parked; the last training broke off", NOTHING),
    (State.READY, DeviceFailed("no permission"), State.DEGRADED, "no permission", RECOVER),
    (State.TRAINING, DeviceFailed("no sensor"), State.DEGRADED, "no sensor", RECOVER),
    (State.PROFILING, DeviceFailed("too hot"), State.DEGRADED, "too hot", RECOVER),
    (State.DEGRADED, DeviceFailed("still"), State.DEGRADED, "still", RECOVER),
    (State.DEGRADED, DeviceRecovered(), State.READY, "parked; recovered", NOTHING),
    (State.READY, DeviceRecovered(), State.READY, None, NOTHING),
    (State.READY, BegunAnew("another reference"), State.PROFILING, "another reference", NOTHING),
    (State.DEGRADED, BegunAnew("another reference"), State.PROFILING, "another reference", NOTHING),
]

MEASURING_GOES_ON = [
    (State.DEGRADED, DeviceRecovered(), "parked; recovered; measuring goes on"),
    (State.TRAINING, TrainingEnded(), "parked; measuring goes on"),
    (State.TRAINING, TrainingBrokeOff(), "parked; the last training broke off; measuring goes on"),
]

EVENTS = st.sampled_from([event for _, event, *_ in TABLE])


@pytest.mark.parametrize(("state", "event", "then", "detail", "actions"), TABLE)
def test_what_follows(state, event, then, detail, actions):
    assert decide(state, event) == Decision(then, detail, actions)


@pytest.mark.parametrize(("state", "event", "detail"), MEASURING_GOES_ON)
def test_a_device_that_was_to_be_measured_is_not_ready_before_it_was(state, event, detail):
    assert decide(state, event, unfinished=True) == Decision(State.PROFILING, detail, ANEW)
    ended = decide(State.PROFILING, ProfileEnded(anew=True), unfinished=True)
    assert ended == Decision(State.READY, "parked; measured anew", FRONT)


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (State.ENROLLED, TrainingBegan("4c")),
        (State.PROFILING, TrainingBegan("4c")),
        (State.TRAINING, TrainingBegan("4c")),
        (State.READY, TrainingEnded()),
        (State.TRAINING, ModeMeasured("measured 4c")),
        (State.ENROLLED, DeviceFailed("no permission")),
        (State.TRAINING, BegunAnew("another reference")),
    ],
)
def test_what_cannot_happen_is_a_mistake_that_is_named(state, event):
    with pytest.raises(ImpossibleEventError, match=state.name.lower()):
        decide(state, event)


@given(st.lists(EVENTS, max_size=30))
def test_whatever_happens_a_device_is_only_ready_when_parked_and_only_out_of_the_rounds_while_looked_after(events):
    state, unfinished = State.ENROLLED, False
    for event in events:
        try:
            decision = decide(state, event, unfinished)
        except ImpossibleEventError:
            continue
        assert decision.detail is None or decision.detail
        assert (decision.detail is None) <= (decision.state is state), "a new state is always reported"
        assert (Action.RECOVER in decision.actions) == isinstance(event, DeviceFailed)
        assert (Action.REPORT_FRONT in decision.actions) <= (decision.state is State.READY)
        if decision.state is State.READY and decision.detail is not None:
            assert decision.detail.startswith("parked")
        if decision.state is State.TRAINING:
            assert state in MAY_TRAIN or isinstance(event, DeviceRecovered)
        if isinstance(event, DeviceFailed):
            assert decision.state is State.DEGRADED
        state = decision.state
        unfinished = Action.MEASURE_ANEW in decision.actions or unfinished and not isinstance(event, ProfileEnded)
        assert not (unfinished and state is State.READY)


def test_every_state_has_its_name_on_the_wire():
    named = {session_pb2.DeviceState.Value(f"DEVICE_STATE_{state.name}") for state in State}
    assert named == set(session_pb2.DeviceState.values()) - {
        session_pb2.DEVICE_STATE_UNSPECIFIED,
        session_pb2.DEVICE_STATE_OFFLINE,
    }
