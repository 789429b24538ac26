"""The agent's state machine, tested without a device, a network or a clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.runtime.states import (
    MAY_TRAIN,
    Action,
    Decision,
    DeviceFailed,
    DeviceRecovered,
    ImpossibleEventError,
    ModeMeasured,
    PreparationRestarted,
    ProfileEnded,
    TrainingAborted,
    TrainingBegan,
    TrainingEnded,
    TrainingParked,
    TrainingRejected,
    decide,
)
from wattfleet_proto.device_state import DeviceState

FRONT, AGAIN, RECOVER = (frozenset({action}) for action in (Action.REPORT_FRONT, Action.REPROFILE, Action.RECOVER))
NOTHING = frozenset()

TABLE = [
    (DeviceState.ENROLLED, ModeMeasured("measured 4c"), DeviceState.PROFILING, "measured 4c", NOTHING),
    (DeviceState.ENROLLED, ProfileEnded(repeated=False), DeviceState.READY, "parked", FRONT),
    (DeviceState.PROFILING, ProfileEnded(repeated=False), DeviceState.READY, "parked", FRONT),
    (DeviceState.PROFILING, ProfileEnded(repeated=True), DeviceState.READY, "parked; profiled again", FRONT),
    (DeviceState.READY, TrainingBegan("4c"), DeviceState.TRAINING, "training in 4c", NOTHING),
    (DeviceState.DEGRADED, TrainingBegan("4c"), DeviceState.TRAINING, "training in 4c", NOTHING),
    (DeviceState.TRAINING, TrainingParked("learns"), DeviceState.TRAINING, "parked; learns", NOTHING),
    (DeviceState.TRAINING, TrainingEnded(), DeviceState.READY, "parked", FRONT),
    (DeviceState.TRAINING, TrainingEnded(failed=True), DeviceState.READY, "parked", NOTHING),
    (DeviceState.TRAINING, TrainingEnded(drift="slower"), DeviceState.PROFILING, "profiling again: slower", AGAIN),
    (DeviceState.TRAINING, TrainingEnded(not_learned="disk full"), DeviceState.READY, "parked; disk full", NOTHING),
    (DeviceState.TRAINING, TrainingRejected("no epochs"), DeviceState.READY, "parked; no epochs", NOTHING),
    (DeviceState.TRAINING, TrainingAborted(), DeviceState.READY, "parked; the last training was aborted", NOTHING),
    (DeviceState.READY, TrainingAborted(), DeviceState.READY, "parked; the last training was aborted", NOTHING),
    (DeviceState.READY, DeviceFailed("no permission"), DeviceState.DEGRADED, "no permission", RECOVER),
    (DeviceState.TRAINING, DeviceFailed("no sensor"), DeviceState.DEGRADED, "no sensor", RECOVER),
    (DeviceState.PROFILING, DeviceFailed("too hot"), DeviceState.DEGRADED, "too hot", RECOVER),
    (DeviceState.DEGRADED, DeviceFailed("still"), DeviceState.DEGRADED, "still", RECOVER),
    (DeviceState.DEGRADED, DeviceRecovered(), DeviceState.READY, "parked; recovered", NOTHING),
    (DeviceState.READY, DeviceRecovered(), DeviceState.READY, None, NOTHING),
    (DeviceState.READY, PreparationRestarted("new reference"), DeviceState.PROFILING, "new reference", NOTHING),
    (
        DeviceState.DEGRADED,
        PreparationRestarted("new reference"),
        DeviceState.PROFILING,
        "new reference",
        NOTHING,
    ),
]

MEASURING_GOES_ON = [
    (DeviceState.DEGRADED, DeviceRecovered(), "parked; recovered; profiling continues"),
    (DeviceState.TRAINING, TrainingEnded(), "parked; profiling continues"),
    (DeviceState.TRAINING, TrainingAborted(), "parked; the last training was aborted; profiling continues"),
]

EVENTS = st.sampled_from([event for _, event, *_ in TABLE])


@pytest.mark.parametrize(("state", "event", "then", "detail", "actions"), TABLE)
def test_what_follows(state, event, then, detail, actions):
    assert decide(state, event) == Decision(then, detail, actions)


@pytest.mark.parametrize(("state", "event", "detail"), MEASURING_GOES_ON)
def test_a_device_that_was_to_be_measured_is_not_ready_before_it_was(state, event, detail):
    assert decide(state, event, reprofiling=True) == Decision(DeviceState.PROFILING, detail, AGAIN)
    ended = decide(DeviceState.PROFILING, ProfileEnded(repeated=True), reprofiling=True)
    assert ended == Decision(DeviceState.READY, "parked; profiled again", FRONT)


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (DeviceState.ENROLLED, TrainingBegan("4c")),
        (DeviceState.PROFILING, TrainingBegan("4c")),
        (DeviceState.TRAINING, TrainingBegan("4c")),
        (DeviceState.READY, TrainingEnded()),
        (DeviceState.READY, TrainingParked("learns")),
        (DeviceState.TRAINING, ModeMeasured("measured 4c")),
        (DeviceState.ENROLLED, DeviceFailed("no permission")),
        (DeviceState.TRAINING, PreparationRestarted("new reference")),
    ],
)
def test_what_cannot_happen_is_a_mistake_that_is_named(state, event):
    with pytest.raises(ImpossibleEventError, match=state.name.lower()):
        decide(state, event)


@given(st.lists(EVENTS, max_size=30))
def test_a_device_is_ready_only_if_parked_and_unavailable_only_during_recovery(events):
    state, reprofiling = DeviceState.ENROLLED, False
    for event in events:
        try:
            decision = decide(state, event, reprofiling)
        except ImpossibleEventError:
            continue
        assert decision.detail is None or decision.detail
        assert (decision.detail is None) <= (decision.state is state), "a new state is always reported"
        assert (Action.RECOVER in decision.actions) == isinstance(event, DeviceFailed)
        assert (Action.REPORT_FRONT in decision.actions) <= (decision.state is DeviceState.READY)
        if decision.state is DeviceState.READY and decision.detail is not None:
            assert decision.detail.startswith("parked")
        if decision.state is DeviceState.TRAINING:
            assert state in MAY_TRAIN or isinstance(event, DeviceRecovered | TrainingParked)
        if isinstance(event, DeviceFailed):
            assert decision.state is DeviceState.DEGRADED
        state = decision.state
        reprofiling = Action.REPROFILE in decision.actions or reprofiling and not isinstance(event, ProfileEnded)
        assert not (reprofiling and state is DeviceState.READY)
