"""Workloads: valid names and facts, and the facts that a device adds to the app's own."""

from __future__ import annotations

import pytest

from wattfleet.errors import InvalidInputError
from wattfleet.modes import MAX_WORKLOAD_NAME_CHARACTERS, Processor, Task, Workload, WorkloadFacts


def test_another_batch_is_another_point_of_the_same_workload() -> None:
    told = Workload("resnet18", WorkloadFacts(batch=16, parameters=11.7e6, step_flops=1.7e11))
    seen = told.completed(WorkloadFacts(batch=32, loader_workers=4))
    assert seen == Workload("resnet18", WorkloadFacts(Task.TRAINING, 32, 4, Processor.GPU, 11.7e6, 1.7e11))
    assert seen.name == told.name


def test_a_workload_of_inference_does_not_become_training() -> None:
    with pytest.raises(InvalidInputError, match="is inference, not training: give the other task its own name"):
        Workload("resnet18", WorkloadFacts(Task.INFERENCE)).completed(WorkloadFacts(batch=8))


@pytest.mark.parametrize("name", ["", "  ", "line\nbreak", "bell\x07", "\u202eevil"])
def test_a_name_that_cannot_be_shown_is_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match=r"a workload's name must have 1 to 200 printable characters, not '"):
        Workload(name)


def test_a_name_of_ten_thousand_characters_is_refused_without_repeating_it() -> None:
    with pytest.raises(InvalidInputError) as refused:
        Workload("x" * 10_000)
    assert "one of 10,000 characters" in str(refused.value)
    assert Workload("x" * MAX_WORKLOAD_NAME_CHARACTERS)


def test_a_precision_is_a_short_word() -> None:
    assert WorkloadFacts(precision="bfloat16").precision == "bfloat16"
    for precision in ("", "x" * 41, "float\n32"):
        with pytest.raises(InvalidInputError, match="precision must have 1 to 40 printable characters"):
            WorkloadFacts(precision=precision)
