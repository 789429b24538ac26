"""A device's assignment inside Flower's messages."""

from __future__ import annotations

import pytest
from flwr.app import ConfigRecord
from hypothesis import given
from hypothesis import strategies as st

from wattfleet.errors import InvalidInputError
from wattfleet.modes import PowerMode
from wattfleet_proto.assignment import DEVICE_ID_KEY, IDENTIFY_KEY, RoundAssignment

knob = st.integers(1, 2**63 - 1)
ASSIGNMENT = RoundAssignment(
    "7/1", "orin-0", PowerMode(12, 2_201_600, 1_300_500_000, 3_199_000_000), epochs=1.0, power_limit_w=41.25
)


@given(
    st.builds(
        RoundAssignment,
        plan_id=st.text(),
        device_id=st.text(),
        mode=st.builds(PowerMode, knob, knob, knob, knob),
        epochs=st.floats(1e-3, 1e6),
        power_limit_w=st.floats(1e-3, 1e6),
        deadline_s=st.none() | st.floats(1e-3, 1e6),
    )
)
def test_an_assignment_comes_back_from_flowers_own_record(assignment: RoundAssignment) -> None:
    assert RoundAssignment.from_record(ConfigRecord(assignment.to_record())) == assignment


def test_an_assignment_is_no_request_to_identify() -> None:
    record = ASSIGNMENT.to_record()
    assert IDENTIFY_KEY not in record
    assert record[DEVICE_ID_KEY] == "orin-0"


@pytest.mark.parametrize("key", ASSIGNMENT.to_record())
def test_a_missing_value_is_named_with_what_to_do(key: str) -> None:
    record = ASSIGNMENT.to_record()
    del record[key]
    with pytest.raises(InvalidInputError, match=rf"no assignment \('{key}'\): run the same version"):
        RoundAssignment.from_record(record)


@pytest.mark.parametrize("key", [*PowerMode._fields, "epochs", "power-limit-w"])
@pytest.mark.parametrize("value", ["fast", b"\x01", [1, 2], ""])
def test_a_value_of_the_wrong_kind_is_refused(key: str, value: object) -> None:
    with pytest.raises(InvalidInputError, match="no assignment"):
        RoundAssignment.from_record({**ASSIGNMENT.to_record(), key: value})


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("nan")])
def test_a_deadline_that_has_passed_before_the_start_is_refused(deadline_s: float) -> None:
    with pytest.raises(InvalidInputError, match="^orin-0: a deadline is above 0 s"):
        RoundAssignment.from_record({**ASSIGNMENT.to_record(), "deadline-s": deadline_s})


def test_half_a_hertz_is_no_mode() -> None:
    with pytest.raises(InvalidInputError, match="no assignment"):
        RoundAssignment.from_record({**ASSIGNMENT.to_record(), "gpu_hz": 0.5})
