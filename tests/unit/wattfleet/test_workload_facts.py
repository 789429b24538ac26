"""Facts of a workload, and errors in them."""

from __future__ import annotations

from typing import Any

import pytest

from wattfleet.errors import InvalidInputError
from wattfleet.modes import Processor, Task, WorkloadFacts


def test_nothing_is_known_by_default_of_a_training_on_a_gpu() -> None:
    facts = WorkloadFacts()
    assert (facts.task, facts.processor) == (Task.TRAINING, Processor.GPU)
    assert (facts.batch, facts.loader_workers, facts.parameters, facts.step_flops) == (None, None, None, None)


def test_words_name_task_and_processor() -> None:
    facts = WorkloadFacts(task="inference", processor="cpu")  # type: ignore[arg-type]
    assert facts == WorkloadFacts(Task.INFERENCE, processor=Processor.CPU)
    assert f"{facts.task} on {facts.processor}" == "inference on cpu"


@pytest.mark.parametrize(
    ("name", "value"), [("batch", 1), ("loader_workers", 0), ("parameters", 11_689_512), ("step_flops", 8.7e10)]
)
def test_possible_values_are_kept(name: str, value: float) -> None:
    assert getattr(WorkloadFacts(**{name: value}), name) == value  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("batch", 0, "batch must be a whole number of samples, from 1 to 1,000,000, not 0"),
        ("batch", 2.5, "batch must be a whole number"),
        ("batch", True, "batch must be a whole number"),
        ("batch", 10**30, "batch must be a whole number of samples, from 1 to 1,000,000, not 1000"),
        ("loader_workers", -1, "loader_workers must be a whole number of processes, from 0 to 1,000,000, not -1"),
        ("loader_workers", 10**8, "loader_workers must be a whole number of processes, from 0 to 1,000,000, not 1"),
        ("parameters", 0, "parameters must be a finite number above 0, not 0"),
        ("step_flops", -1e9, "step_flops must be a finite number above 0, not -1000000000.0"),
        ("step_flops", float("nan"), "step_flops must be a finite number above 0, not nan"),
        ("step_flops", float("inf"), "step_flops must be a finite number above 0, not inf"),
        ("step_flops", "many", "step_flops must be a finite number above 0, not 'many'"),
    ],
)
def test_impossible_values_are_refused_with_a_remedy(name: str, value: Any, reason: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        WorkloadFacts(**{name: value})
    assert str(caught.value).startswith(reason)
    assert str(caught.value).endswith("correct it, or leave it out if it is unknown")


@pytest.mark.parametrize(("name", "choices"), [("task", "training or inference"), ("processor", "gpu or cpu")])
def test_an_unknown_word_is_refused_with_the_known_ones(name: str, choices: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{name} is 'tpu': give {choices}"):
        WorkloadFacts(**{name: "tpu"})
