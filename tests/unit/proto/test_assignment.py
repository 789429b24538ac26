"""A device's assignment inside Flower's messages, with and without batch size and epochs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from flwr.app import ConfigRecord
from hypothesis import given
from hypothesis import strategies as st

from wattfleet.core.errors import InvalidInputError
from wattfleet.core.planning import EpochChoice, EpochOption
from wattfleet_proto.assignment import DEVICE_ID_KEY, IDENTIFY_KEY, AssignedWork, RoundAssignment
from wattfleet_proto.convert import (
    assignment_from_start,
    assignment_to_start,
    assignments_from_plan,
    epoch_choice_to_message,
    epochs_of_request,
)
from wattfleet_proto.limits import LARGEST_COUNT
from wattfleet_proto.v1 import local_pb2, planning_pb2

# --- Assignment -------------------------------------------------------------------------------------------------------
# A device's assignment inside Flower's messages.


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
    part = planning_pb2.Assignment(node_id=7, device_id="orin-0", epochs=1.0, power_limit_w=41.25)
    plan = planning_pb2.PlanRoundResponse(plan_id="7/1", assignments=[part])
    assert assignments_from_plan(plan) == {7: ASSIGNMENT}
    plan.deadline_s = 30.0
    assert assignments_from_plan(plan) == {7: replace(ASSIGNMENT, deadline_s=30.0)}


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


# --- Assigned work ----------------------------------------------------------------------------------------------------
# The work that a plan chose for a device, with and without batch size and epochs, inside Flower's messages.

BATCHES = st.builds(AssignedWork, st.integers(1, LARGEST_COUNT), st.floats(1e-9, 1e9), st.floats(1e-9, 1e9))
COUNTS = st.integers(1, LARGEST_COUNT)
WITH_EPOCHS = st.builds(AssignedWork, epochs=COUNTS) | st.builds(
    lambda work, epochs: AssignedWork(work.batch, work.lr_scale, work.passes, epochs), BATCHES, COUNTS
)
BOTH = AssignedWork(64, lr_scale=4.0, passes=1.25, epochs=3)


@given(BATCHES | WITH_EPOCHS)
def test_work_survives_flowers_own_record(work: AssignedWork) -> None:
    assert AssignedWork.from_record(ConfigRecord(work.to_record())) == work


def test_what_was_not_chosen_is_not_in_the_record() -> None:
    assert AssignedWork(epochs=3).to_record() == {"epochs": 3}
    assert set(AssignedWork(64, 4.0, 1.25).to_record()) == {"batch", "lr-scale", "passes"}
    assert BOTH.to_record() == {"batch": 64, "lr-scale": 4.0, "passes": 1.25, "epochs": 3}
    assert AssignedWork().to_record() == {}


def test_a_record_without_any_work_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"states no work \('batch'\): run the same version"):
        AssignedWork.from_record({})


@pytest.mark.parametrize("key", ["lr-scale", "passes"])
def test_a_batch_needs_its_scale_and_passes_with_epochs_too(key: str) -> None:
    record = BOTH.to_record()
    del record[key]
    with pytest.raises(InvalidInputError, match=rf"states no work \('{key}'\)"):
        AssignedWork.from_record(record)


@pytest.mark.parametrize("others", [{}, {"batch": 64, "lr-scale": 4.0, "passes": 1.25}], ids=["alone", "with a batch"])
@pytest.mark.parametrize("epochs", [0, -3, 10**30, 2.5, 1.0, "many", "", b"\x01", float("nan"), True, None])
def test_epochs_that_nobody_can_train_are_refused(others: Mapping[str, object], epochs: object) -> None:
    with pytest.raises(InvalidInputError):
        AssignedWork.from_record({**others, "epochs": epochs})


def test_the_error_states_the_epochs_and_their_range() -> None:
    with pytest.raises(InvalidInputError, match=f"a device trains 1 to {LARGEST_COUNT:,} local epochs, not 0"):
        AssignedWork(epochs=0)


# --- a choice as a message ------------------------------------------------------------------------------------------


@st.composite
def choices(draw: st.DrawFn) -> EpochChoice:
    numbers = sorted(draw(st.sets(st.integers(1, 10**6), min_size=1, max_size=16)))
    progress = sorted(draw(st.sets(st.floats(1e-6, 1e6), min_size=len(numbers), max_size=len(numbers))))
    half = draw(st.lists(st.none() | st.floats(1e-3, 1e6), min_size=len(numbers), max_size=len(numbers)))
    options = [EpochOption(*each) for each in zip(numbers, progress, half, strict=True)]
    return EpochChoice(options, draw(st.booleans()))


def asked(**fields: object) -> planning_pb2.PlanRoundRequest:
    """A parsed copy of the request, as the coordinator receives it."""
    request = planning_pb2.PlanRoundRequest(run_id="7", round=1, **fields)  # type: ignore[arg-type]
    return planning_pb2.PlanRoundRequest.FromString(request.SerializeToString())


@given(choices())
def test_a_choice_of_whole_numbers_survives_its_message(choice: EpochChoice) -> None:
    assert epochs_of_request(asked(epochs=choice.fewest, epoch_choice=epoch_choice_to_message(choice))) == choice


@given(st.floats(1e-6, 1e6))
def test_a_request_without_a_choice_states_one_number(epochs: float) -> None:
    assert epochs_of_request(asked(epochs=epochs)) == epochs


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ([], "give 1 to 16 numbers of local epochs"),
        ([(0, 1.0, 0.0)], "above 0 and at most 1,000,000, not 0"),
        ([(10**9, 1.0, 0.0)], "above 0 and at most 1,000,000"),
        ([(1, 0.0, 0.0)], "the progress of a round with 1 epochs"),
        ([(1, float("nan"), 0.0)], "the progress of a round with 1 epochs"),
        ([(1, 1.0, -1.0)], "half the progress of a round with 1 epochs"),
        ([(1, 1.0, float("inf"))], "half the progress of a round with 1 epochs"),
        ([(1, 2.0, 0.0), (2, 1.0, 0.0)], "by ascending epochs and progress"),
        ([(2, 1.0, 0.0), (1, 2.0, 0.0)], "by ascending epochs and progress"),
        ([(k, float(k), 0.0) for k in range(1, 18)], "not 17"),
    ],
)
def test_a_message_of_a_choice_that_cannot_be_is_refused(options: list[tuple[int, float, float]], error: str) -> None:
    stated = [planning_pb2.EpochOption(epochs=e, progress=p, half_devices=h) for e, p, h in options]
    with pytest.raises(InvalidInputError, match=error):
        epochs_of_request(asked(epochs=1.0, epoch_choice=planning_pb2.EpochChoice(options=stated)))
