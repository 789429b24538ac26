"""Conversion between messages and the core's types, and communication between neighbouring versions."""

from __future__ import annotations

import tracemalloc
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.fakes.fleets import columns_of, front, of_batches
from wattfleet.core.choosing import MAX_FRONT_POINTS, Front
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import MAX_BATCH_OPTIONS, BatchOptions, PowerMode, Processor, Task, Workload, WorkloadFacts
from wattfleet.core.planning import Assignment, Decision, RoundPlan
from wattfleet_proto import names
from wattfleet_proto.convert import (
    front_from_message,
    front_to_message,
    message_of,
    mode_from_message,
    mode_to_message,
    plan_from_message,
    plan_to_message,
    state_from_message,
    state_to_message,
    values_of,
    workload_from_message,
    workload_to_message,
)
from wattfleet_proto.device_state import READINGS, BoardSample, DeviceState
from wattfleet_proto.names import MAJOR, MINOR, ProtocolVersionError, common_version, own_version
from wattfleet_proto.v1 import duty_pb2, planning_pb2, power_pb2, session_pb2, view_pb2

# --- Convert ----------------------------------------------------------------------------------------------------------
# Conversion between messages and the core's types: round trips, and refusal of invalid fronts.


hertz = st.integers(1, 10**12 - 1)
modes = st.builds(PowerMode, st.integers(1, 2**32 - 1), st.integers(1, 2**32 - 1), hertz, hertz)
seconds = st.floats(1e-4, 1e7)
watts = st.floats(0.1, 1e4)
spread = st.floats(0, 2)


@st.composite
def any_front(draw: st.DrawFn) -> Front:
    """A strategy for valid fronts with any modes and numbers."""
    k = draw(st.integers(1, 12))
    one_epoch_s = sorted(draw(st.lists(seconds, min_size=k, max_size=k, unique=True)))
    power_w = sorted(draw(st.lists(watts, min_size=k, max_size=k, unique=True)), reverse=True)
    epoch_s = np.array(one_epoch_s) * [draw(st.floats(0.1, 1)) for _ in range(k)]
    warmup_s = np.array(one_epoch_s) - epoch_s
    assume((np.diff(warmup_s + epoch_s) > 0).all())  # rounding may make two values equal
    return Front(
        modes=np.array([draw(modes) for _ in range(k)], dtype=np.float64),
        epoch_s=epoch_s,
        power_w=np.array(power_w),
        epoch_log_sd=np.array([draw(spread) for _ in range(k)]),
        power_log_sd=np.zeros(k),  # other spreads could reverse the order of the planned watts
        warmup_s=warmup_s,
    )


def as_received(message: power_pb2.Front) -> power_pb2.Front:
    return power_pb2.Front.FromString(message.SerializeToString())


def assert_same(one: Front, other: Front) -> None:
    others = columns_of(other)
    for name, values in columns_of(one).items():
        assert np.array_equal(values, others[name]), name


@given(modes)
def test_a_mode_comes_back_as_it_was(mode: PowerMode) -> None:
    message = power_pb2.PowerMode.FromString(mode_to_message(mode).SerializeToString())
    assert mode_from_message(message) == mode


@pytest.mark.parametrize("knob", PowerMode._fields)
def test_a_mode_with_an_unset_knob_is_refused(knob: str) -> None:
    message = mode_to_message(PowerMode(4, 1_000_000, 600_000_000, 2_133_000_000))
    message.ClearField(knob)
    with pytest.raises(InvalidInputError, match=r"needs all four knobs, got \("):
        mode_from_message(message)


@pytest.mark.parametrize("knob", ["gpu_hz", "mem_hz"])
@pytest.mark.parametrize("value", [10**12, 2**53 + 1, 2**64 - 1])
def test_a_clock_that_no_board_has_is_refused(knob: str, value: int) -> None:
    message = mode_to_message(PowerMode(12, 2_201_600, 1_300_500_000, 3_199_000_000))
    setattr(message, knob, value)
    with pytest.raises(InvalidInputError, match="less than 1 THz"):
        mode_from_message(message)


@given(any_front())
def test_a_front_comes_back_to_the_last_bit(sent: Front) -> None:
    assert_same(front_from_message(as_received(front_to_message(sent))), sent)


def test_a_front_keeps_its_spread() -> None:
    sent = front((10, 30), (20, 20), epoch_log_sd=0.03, power_log_sd=0.05)
    received = front_from_message(as_received(front_to_message(sent)))
    assert_same(received, sent)
    assert received.planned_w.tolist() == sent.planned_w.tolist()


@given(any_front(), st.data())
def test_a_front_keeps_the_batch_of_each_point(plain: Front, data: st.DataObject) -> None:
    sent = of_batches(plain, [data.draw(st.integers(1, 10**6)) for _ in range(len(plain))])
    received = front_from_message(as_received(front_to_message(sent)))
    assert_same(received, sent)
    assert received.batch is not None and received.batch.tolist() == list(sent.batch)  # type: ignore[arg-type]
    assert received.equals(sent) and not received.equals(plain)


def test_a_front_whose_points_are_all_of_the_workloads_batch_states_none() -> None:
    assert front_from_message(as_received(front_to_message(front((10, 30), (20, 20))))).batch is None


def test_a_front_that_states_the_batch_of_some_points_only_is_refused() -> None:
    message = front_to_message(of_batches(front((10, 30), (20, 20)), [16, 64]))
    message.points[0].batch = 0
    with pytest.raises(InvalidInputError, match="a front's batches must be one for each point"):
        front_from_message(message)


def test_points_of_an_older_agent_have_no_warmup() -> None:
    sent = front_to_message(front((10, 30), (12, 20), (40, 10), warmup_s=[5, 4, 0]))
    for point in sent.points:
        point.ClearField("warmup_s")
    received = front_from_message(as_received(sent))
    assert (received.warmup_s == 0).all()
    assert received.epoch_s.tolist() == [10, 12, 40]


def test_the_largest_front_there_may_be_comes_back() -> None:
    sent = front(*((1.0 + k, 100.0 - k) for k in range(MAX_FRONT_POINTS)))
    assert_same(front_from_message(as_received(front_to_message(sent))), sent)


def test_a_front_of_a_million_points_is_refused_before_it_is_built() -> None:
    # If anything were built from a point, it would be refused as empty.
    message = power_pb2.Front.FromString(b"\x0a\x00" * 1_000_000)
    assert len(message.points) == 1_000_000
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInputError, match=f"1 to {MAX_FRONT_POINTS} points, not 1000000"):
            front_from_message(message)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 100_000


def test_no_front_is_no_front() -> None:
    with pytest.raises(InvalidInputError, match=f"1 to {MAX_FRONT_POINTS} points, not 0"):
        front_from_message(power_pb2.Front())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epoch_s", float("nan")),
        ("epoch_s", -1.0),
        ("epoch_s", 99.0),
        ("power_w", float("inf")),
        ("power_w", 0.0),
        ("power_w", 1.0),
        ("epoch_log_sd", -0.1),
        ("power_log_sd", float("nan")),
        ("warmup_s", -0.1),
        ("warmup_s", float("inf")),
        ("warmup_s", 10.0),
    ],
)
def test_a_message_that_is_no_front_is_refused(field: str, value: float) -> None:
    message = front_to_message(front((10, 30), (20, 20)))
    setattr(message.points[0], field, value)
    with pytest.raises(InvalidInputError, match=r"^a front"):
        front_from_message(message)


def test_a_front_with_an_unset_mode_is_refused() -> None:
    message = front_to_message(front((10, 30), (20, 20)))
    message.points[1].ClearField("mode")
    with pytest.raises(InvalidInputError, match="needs all four knobs"):
        front_from_message(message)


assignments = st.builds(Assignment, st.text(min_size=1), modes, seconds, watts, watts, st.floats(0, 1e9))
decisions = st.builds(Decision, st.text(), st.booleans(), st.text())


@given(
    st.builds(
        RoundPlan,
        st.lists(assignments, max_size=4, unique_by=lambda a: a.device_id).map(tuple),
        st.lists(decisions, max_size=4).map(tuple),
        seconds,
        watts,
        watts,
    ),
    st.lists(st.integers(0, 2**64 - 1), min_size=4, max_size=4),
    st.text(),
)
def test_a_plan_comes_back_with_its_nodes(plan: RoundPlan, node_ids: list[int], plan_id: str) -> None:
    nodes = {a.device_id: node_id for a, node_id in zip(plan.assignments, node_ids, strict=False)}
    message = planning_pb2.PlanRoundResponse.FromString(plan_to_message(plan_id, plan, nodes).SerializeToString())
    assert message.plan_id == plan_id
    assert {a.device_id: a.node_id for a in message.assignments} == nodes
    assert plan_from_message(message) == plan
    # A device whose training a trim stopped still has its node.
    trimmed = replace(plan, assignments=plan.assignments[1:], first_planned=replace(plan, decisions=()))
    message = planning_pb2.PlanRoundResponse.FromString(plan_to_message(plan_id, trimmed, nodes).SerializeToString())
    assert {a.device_id: a.node_id for a in message.first_planned.assignments} == nodes
    assert plan_from_message(message) == trimmed


@pytest.mark.parametrize("state", DeviceState)
def test_device_states_travel_and_come_back(state):
    assert state_from_message(state_to_message(state)) is state
    assert session_pb2.DeviceState.Name(state_to_message(state)) == f"DEVICE_STATE_{state.name}"


def test_every_state_of_the_protocol_is_known():
    unset = session_pb2.DEVICE_STATE_UNSPECIFIED
    assert {state_to_message(state) for state in DeviceState} == set(session_pb2.DeviceState.values()) - {unset}


def test_a_state_that_is_unset_is_refused():
    with pytest.raises(InvalidInputError, match="unknown device state 0: expected one of enrolled, profiling"):
        state_from_message(session_pb2.DEVICE_STATE_UNSPECIFIED)


workloads = st.builds(
    Workload,
    st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=50),
    st.builds(
        WorkloadFacts,
        st.sampled_from(Task),
        st.none() | st.integers(1, 10**6),
        st.none() | st.integers(0, 10**6),
        st.sampled_from(Processor),
        st.none() | st.floats(1, 1e12),
        st.none() | st.floats(1, 1e18),
        st.none() | st.sampled_from(["float32", "int8"]),
    ),
    st.none()
    | st.dictionaries(st.integers(1, 10**6), st.floats(0.05, 40.0), min_size=1, max_size=16).map(BatchOptions.of),
)


@given(workloads)
def test_a_workload_comes_back_as_it_was_sent(workload: Workload) -> None:
    sent = workload_to_message(workload).SerializeToString()
    assert workload_from_message(power_pb2.Workload.FromString(sent)) == workload


def test_a_workload_of_which_only_the_name_is_told_is_training_on_the_gpu() -> None:
    assert workload_from_message(power_pb2.Workload(name="w")) == Workload("w")


def with_options(*options: tuple[int, float]) -> power_pb2.Workload:
    batches = [power_pb2.BatchOption(batch=batch, relative_samples=samples) for batch, samples in options]
    return power_pb2.Workload(name="w", batches=batches)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (power_pb2.Workload(), "1 to 200 printable characters"),
        (power_pb2.Workload(name="x" * 10_000), "one of 10,000 characters"),
        (power_pb2.Workload(name="bell\x07"), "printable characters"),
        (power_pb2.Workload(name="w", batch=0), "batch must be a whole number of samples, from 1"),
        (power_pb2.Workload(name="w", step_flops=-1.0), "step_flops must be a finite number above 0"),
        (power_pb2.Workload(name="w", task=9), "unknown task 9"),  # type: ignore[arg-type]
        (with_options((0, 1.0)), "a whole number of samples, from 1"),
        (with_options((32, 1.0), (16, 1.0)), "distinct and ascending"),
        (with_options((16, 1.0), (16, 1.0)), "distinct and ascending"),
        (with_options((16, 0.0)), "finite and above 0"),
        (with_options((16, float("nan"))), "finite and above 0"),
        (with_options(*((1 + k, 1.0) for k in range(MAX_BATCH_OPTIONS + 1))), "1 to 16 batch sizes"),
    ],
)
def test_a_workload_that_cannot_be_is_refused(message: power_pb2.Workload, error: str) -> None:
    with pytest.raises(InvalidInputError, match=error):
        workload_from_message(message)


# --- By name ----------------------------------------------------------------------------------------------------------
# Messages from values whose attributes are named like their fields, and values by name from messages.


def test_a_sample_and_its_message_have_the_same_fields() -> None:
    of_message = {each.name for each in session_pb2.BoardSample.DESCRIPTOR.fields}
    assert {each.name for each in fields(BoardSample)} == of_message == {*READINGS, "mode"}


def test_a_message_is_filled_from_the_first_value_that_has_a_field() -> None:
    class Known:
        state = DeviceState.TRAINING
        provenance = "hardware"
        sample = BoardSample(12.5, mode=PowerMode(4, 1_000, 2_000, 3_000))
        left_out = None

    class Stored:
        state = DeviceState.READY
        left_out = "not asked"
        site_tags = ("lab", "roof")

    found = message_of(view_pb2.DeviceView, Known(), Stored(), device_id="orin", idle_w=None)
    assert found == view_pb2.DeviceView(
        device_id="orin",
        state=session_pb2.DEVICE_STATE_TRAINING,
        provenance=power_pb2.PROVENANCE_HARDWARE,
        sample=session_pb2.BoardSample(
            power_w=12.5, mode=power_pb2.PowerMode(cores=4, cpu_khz=1_000, gpu_hz=2_000, mem_hz=3_000)
        ),
        site_tags=["lab", "roof"],
    )
    assert not found.HasField("left_out"), "None is known not to be there"


def test_values_say_what_is_absent_and_name_what_an_enum_means() -> None:
    message = view_pb2.DeviceView(
        device_id="orin",
        state=session_pb2.DEVICE_STATE_READY,
        provenance=power_pb2.PROVENANCE_SIMULATED,
        granted_w=0.0,
        site_tags=["lab"],
        duty=duty_pb2.DutyFigures(latency_counts=[1, 2]),
    )
    found = values_of(message, leave_out=("front",))
    assert (found["state"], found["provenance"], found["site_tags"]) == ("ready", "simulated", ["lab"])
    assert (found["granted_w"], found["confirmed_w"], found["detail"]) == (0.0, None, "")
    assert found["sample"] is None and found["duty"]["latency_counts"] == [1, 2]
    assert "front" not in found
    assert list(values_of(view_pb2.RunView(labels={"b": "2", "a": "1"}))["labels"]) == ["a", "b"]


def test_values_of_a_state_that_is_unknown_here_are_refused() -> None:
    message = view_pb2.DeviceView(state=session_pb2.DEVICE_STATE_UNSPECIFIED)
    with pytest.raises(InvalidInputError, match="unknown DeviceState 0: expected one of enrolled, profiling, ready,"):
        values_of(message, leave_out=("provenance",))


# --- Neighbouring versions --------------------------------------------------------------------------------------------
# Agents and coordinators of neighbouring versions can communicate.


def version(major: int, minor: int) -> session_pb2.ProtocolVersion:
    return session_pb2.ProtocolVersion(major=major, minor=minor)


def test_sides_of_this_version_speak_it() -> None:
    assert common_version(own_version()) == own_version() == version(MAJOR, MINOR)


@pytest.mark.parametrize(("own", "theirs"), [(0, 1), (1, 0), (0, 99), (2, 1)])
def test_the_older_minor_version_is_spoken(own: int, theirs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "MINOR", own)
    assert own_version() == version(MAJOR, own)
    assert common_version(version(MAJOR, theirs)) == version(MAJOR, min(own, theirs))


@pytest.mark.parametrize(("own", "theirs"), [(1, 2), (2, 1), (1, 0)])
def test_another_major_version_is_refused_with_what_to_do(
    own: int, theirs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "MAJOR", own)
    refused = rf"^protocol {theirs}\.5 is incompatible with protocol {own}\.0: update the older of agent and coord"
    with pytest.raises(ProtocolVersionError, match=refused):
        common_version(version(theirs, 5))
