"""A device's assignment inside Flower's messages."""

from __future__ import annotations

from dataclasses import replace

import pytest
from flwr.app import ConfigRecord
from hypothesis import given
from hypothesis import strategies as st

from wattfleet.errors import InvalidInputError
from wattfleet_proto.assignment import DEVICE_ID_KEY, IDENTIFY_KEY, AssignedWork, RoundAssignment
from wattfleet_proto.convert import (
    assignment_from_start,
    assignment_to_start,
    assignments_from_plan,
)
from wattfleet_proto.v1 import local_pb2, planning_pb2

ASSIGNMENT = RoundAssignment("7/1", "orin-0", epochs=1.0)
ASSIGNMENTS = st.builds(
    RoundAssignment,
    plan_id=st.text(),
    device_id=st.text(),
    epochs=st.floats(1e-3, 1e6),
    deadline_s=st.none() | st.floats(1e-3, 1e6),
)


@given(ASSIGNMENTS)
def test_an_assignment_survives_flowers_own_record(assignment: RoundAssignment) -> None:
    assert RoundAssignment.from_record(ConfigRecord(assignment.to_record())) == assignment


def test_an_assignment_is_not_a_request_to_identify() -> None:
    record = ASSIGNMENT.to_record()
    assert IDENTIFY_KEY not in record
    assert record[DEVICE_ID_KEY] == "orin-0"


@pytest.mark.parametrize("key", ASSIGNMENT.to_record())
def test_a_missing_value_is_named_with_what_to_do(key: str) -> None:
    record = ASSIGNMENT.to_record()
    del record[key]
    with pytest.raises(InvalidInputError, match=rf"not an assignment \('{key}'\): run the same version"):
        RoundAssignment.from_record(record)


@pytest.mark.parametrize("value", ["fast", b"\x01", [1, 2], ""])
def test_a_value_of_the_wrong_kind_is_refused(value: object) -> None:
    with pytest.raises(InvalidInputError, match="not an assignment"):
        RoundAssignment.from_record({**ASSIGNMENT.to_record(), "epochs": value})


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("nan")])
def test_a_deadline_not_above_zero_is_refused(deadline_s: float) -> None:
    with pytest.raises(InvalidInputError, match="^orin-0: the deadline must be above 0 s"):
        RoundAssignment.from_record({**ASSIGNMENT.to_record(), "deadline-s": deadline_s})


@given(ASSIGNMENTS)
def test_an_assignment_survives_the_local_socket_without_its_deadline(assignment: RoundAssignment) -> None:
    message = local_pb2.StartTraining.FromString(assignment_to_start(assignment).SerializeToString())
    assert assignment_from_start(message) == replace(assignment, deadline_s=None)


def test_a_plan_gives_each_node_its_assignment() -> None:
    part = planning_pb2.Assignment(node_id=7, device_id="orin-0", power_limit_w=41.25)
    plan = planning_pb2.PlanRoundResponse(plan_id="7/1", assignments=[part])
    assert assignments_from_plan(plan, 1.0) == {7: ASSIGNMENT}
    plan.deadline_s = 30.0
    assert assignments_from_plan(plan, 2.0) == {7: replace(ASSIGNMENT, epochs=2.0, deadline_s=30.0)}


WORK = AssignedWork(batch=64, lr_scale=4.0, passes=1.25)


@given(st.builds(AssignedWork, st.integers(1, 10**6), st.floats(1e-9, 1e9), st.floats(1e-9, 1e9)))
def test_chosen_work_survives_flowers_own_record(work: AssignedWork) -> None:
    assert AssignedWork.from_record(ConfigRecord(work.to_record())) == work


@pytest.mark.parametrize("key", WORK.to_record())
def test_chosen_work_that_lacks_a_value_is_refused_with_what_to_do(key: str) -> None:
    record = WORK.to_record()
    del record[key]
    with pytest.raises(InvalidInputError, match=rf"states no work \('{key}'\): run the same version"):
        AssignedWork.from_record(record)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("batch", "many"),
        ("batch", 16.5),
        ("batch", 0),
        ("batch", -16),
        ("batch", 10**30),
        ("lr-scale", "high"),
        ("lr-scale", 0.0),
        ("lr-scale", -1.0),
        ("lr-scale", float("nan")),
        ("lr-scale", float("inf")),
        ("passes", b"\x01"),
        ("passes", 0.0),
        ("passes", float("nan")),
        ("passes", float("inf")),
    ],
)
def test_work_that_nobody_can_do_is_refused(key: str, value: object) -> None:
    with pytest.raises(InvalidInputError):
        AssignedWork.from_record({**WORK.to_record(), key: value})
