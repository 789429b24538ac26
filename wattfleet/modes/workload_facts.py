"""Facts of a workload that are known before anything is measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

from wattfleet.errors import InvalidInputError

LARGEST_COUNT = 1_000_000
"""Maximum number of samples in a batch, or of processes."""


class Task(str, Enum):
    """Whether a step trains the network on its batch, or only infers."""

    TRAINING = "training"
    INFERENCE = "inference"

    def __str__(self) -> str:
        return self.value


class Processor(str, Enum):
    """The processor that computes the steps."""

    GPU = "gpu"
    CPU = "cpu"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class WorkloadFacts:
    """Facts about a workload's step that are known before anything is measured; None means unknown.

    Attributes:
        task: training or inference.
        batch: samples in a batch.
        loader_workers: processes that load data; with 0, the training process loads and computes in turn.
        processor: the processor that computes the steps.
        parameters: number of parameters of the network.
        step_flops: floating-point operations of one step, with the backward pass if the task is training.
        precision: number format of the computation, such as `float32` or `bfloat16`.

    Raises:
        InvalidInputError: a number is out of range.
    """

    task: Task = Task.TRAINING
    batch: int | None = None
    loader_workers: int | None = None
    processor: Processor = Processor.GPU
    parameters: float | None = None
    step_flops: float | None = None
    precision: str | None = None

    def __post_init__(self) -> None:
        _require(self, "task", Task)
        _require(self, "processor", Processor)
        for name, least, unit in (("batch", 1, "samples"), ("loader_workers", 0, "processes")):
            count = getattr(self, name)
            if count is not None and (type(count) is not int or not least <= count <= LARGEST_COUNT):
                raise InvalidInputError(
                    f"{name} must be a whole number of {unit}, from {least} to {LARGEST_COUNT:,}, not {count!r}:"
                    " correct it, or leave it out if it is unknown"
                )
        if self.precision is not None and not (0 < len(self.precision) <= 40 and self.precision.isprintable()):
            raise InvalidInputError(
                "precision must have 1 to 40 printable characters, such as 'float32': correct it, or leave it out if it"
                " is unknown"
            )
        for name in ("parameters", "step_flops"):
            amount = getattr(self, name)
            if amount is None:
                continue
            if type(amount) not in (int, float) or not 0 < amount < math.inf:
                raise InvalidInputError(
                    f"{name} must be a finite number above 0, not {amount!r}: correct it, or leave it out if it is"
                    " unknown"
                )


def _require(facts: WorkloadFacts, name: str, kind: type[Enum]) -> None:
    """Convert a field to a member of an enumeration; manifests store members as text.

    Raises:
        InvalidInputError: the enumeration has no such member.
    """
    given: Any = getattr(facts, name)
    try:
        object.__setattr__(facts, name, kind(given))
    except ValueError:
        words = " or ".join(str(member) for member in kind)
        raise InvalidInputError(f"{name} is {given!r}: give {words}") from None
