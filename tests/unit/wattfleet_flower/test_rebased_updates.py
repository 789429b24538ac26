"""An update that is applied to other arrays, compared with simple arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.fakes.flower_in_process import SUPERLINK
from wattfleet_flower.server.errors import MismatchedArraysError
from wattfleet_flower.server.replies import Update, rebased, replace_arrays, step
from wattfleet_simulation.flower_task import be_task

numbers = arrays.arrays(np.float32, (2, 3), elements=st.floats(-1e3, 1e3, width=32))


def record(**values: np.ndarray) -> ArrayRecord:
    return ArrayRecord({key: Array(value) for key, value in values.items()})


def reply_of(*records: ArrayRecord) -> Message:
    be_task(7, SUPERLINK)
    return Message(RecordDict({f"arrays-{k}": each for k, each in enumerate(records)}), 1, "train")


@given(trained=numbers, base=numbers, current=numbers, scale=st.floats(0, 2))
def test_the_update_is_added_to_the_current_arrays(
    trained: np.ndarray, base: np.ndarray, current: np.ndarray, scale: float
) -> None:
    after = rebased(reply_of(record(w=trained)), record(w=base), record(w=current), scale)["w"].numpy()
    lowest = 0.0 if min(trained.min(), base.min(), current.min()) >= 0 else -np.inf
    expected = [
        [
            max(float(c) + scale * (float(t) - float(b)), min(float(t), float(b), float(c)) if lowest == 0 else lowest)
            for t, b, c in zip(*rows, strict=True)
        ]
        for rows in zip(trained, base, current, strict=True)
    ]
    assert after.dtype == np.float32
    np.testing.assert_allclose(after, expected, rtol=1e-6, atol=1e-3)


@given(trained=numbers, base=numbers)
def test_an_update_stays_as_it_is_about_its_own_base(trained: np.ndarray, base: np.ndarray) -> None:
    after = rebased(reply_of(record(w=trained)), record(w=base), record(w=base))["w"].numpy()
    np.testing.assert_allclose(after, trained, atol=1e-9)


def test_each_array_keeps_its_dtype_and_integers_are_rounded() -> None:
    trained = record(count=np.array([10, 11]), half=np.array([1.5], np.float16), scalar=np.array(4.0))
    base = record(count=np.array([7, 7]), half=np.array([1.0], np.float16), scalar=np.array(1.0))
    current = record(count=np.array([100, 100]), half=np.array([2.0], np.float16), scalar=np.array(2.0))
    after = rebased(reply_of(trained), base, current, scale=0.5)
    assert {key: array.numpy().dtype for key, array in after.items()} == {
        "count": np.dtype(np.int64),
        "half": np.dtype(np.float16),
        "scalar": np.dtype(np.float64),
    }
    assert after["count"].numpy().tolist() == [102, 102], "101.5 and 102 are rounded to even"
    assert (after["half"].numpy().tolist(), float(after["scalar"].numpy())) == ([2.25], 3.5)


W, WIDER = np.zeros(2), np.zeros(3)


@pytest.mark.parametrize(
    ("trained", "base", "current"),
    [
        (record(w=W), record(v=W), record(w=W)),
        (record(w=W), record(w=WIDER), record(w=W)),
        (record(w=W), record(w=W), record(w=WIDER)),
        (record(w=W), record(w=W), record(w=W, v=W)),
        (record(w=W, v=W), record(w=W), record(w=W)),
    ],
)
def test_arrays_that_do_not_match_are_refused(trained: ArrayRecord, base: ArrayRecord, current: ArrayRecord) -> None:
    with pytest.raises(MismatchedArraysError, match="differ in keys or shapes"):
        rebased(reply_of(trained), base, current)


@pytest.mark.parametrize("count", [0, 2])
def test_a_reply_without_one_record_of_arrays_is_refused(count: int) -> None:
    with pytest.raises(MismatchedArraysError, match=f"one record of arrays, not {count}"):
        rebased(reply_of(*[record(w=W)] * count), record(w=W), record(w=W))


def test_the_arrays_of_a_reply_are_replaced_under_their_own_name() -> None:
    reply = reply_of(record(w=W))
    replace_arrays(reply, record(w=W + 1))
    assert {name: each["w"].numpy().tolist() for name, each in reply.content.array_records.items()} == {
        "arrays-0": [1.0, 1.0]
    }


@pytest.mark.parametrize(("current", "scale"), [(1.0, 4.5), (0.05, 1.0)], ids=["scaled", "late"])
def test_a_variance_never_becomes_negative(current: float, scale: float) -> None:
    trained, base = record(running_var=np.array([0.05, 2.0])), record(running_var=np.array([1.0, 1.0]))
    after = rebased(reply_of(trained), base, record(running_var=np.array([current, 1.0])), scale)["running_var"].numpy()
    assert after[0] == pytest.approx(0.05), "no lower than the lowest of the three"
    assert after[1] == pytest.approx(1.0 + scale), "upwards nothing limits it"


def test_a_step_of_fedbuff_keeps_variances_positive() -> None:
    update = Update({"running_var": np.array([1.0, 1.0])}, {"running_var": np.array([0.05, 2.0])}, staleness=0)
    after = step({"running_var": np.array([0.05, 1.0])}, [update], learning_rate=1.0)["running_var"]
    assert after.tolist() == pytest.approx([0.05, 2.0])
