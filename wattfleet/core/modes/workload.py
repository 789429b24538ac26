"""Workloads: what devices train or serve, described by the facts that affect time and power."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

from wattfleet.core.errors import InvalidInputError

# --- Workload facts ---------------------------------------------------------------------------------------------------
# Facts of a workload that are known before anything is measured.


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
    """Convert a field to a member of an enumeration; manifests store members as text."""
    given: Any = getattr(facts, name)
    try:
        object.__setattr__(facts, name, kind(given))
    except ValueError:
        words = " or ".join(str(member) for member in kind)
        raise InvalidInputError(f"{name} is {given!r}: give {words}") from None


# --- Batch options ----------------------------------------------------------------------------------------------------
# The batch sizes that an app can train with, so that a plan chooses one for each device.

MAX_BATCH_OPTIONS = 16
"""Maximum number of batch sizes that an app can train with."""

_MAX_RATIO = 1000.0
"""Maximum ratio of the samples that two batch sizes need."""


@dataclass(frozen=True)
class BatchOptions:
    """The batch sizes that an app can train with, and the samples that each needs for the same progress.

    An epoch with a batch size makes the same progress as one pass over the data with the batch size that the app was
    written for. With a batch that needs a tenth more samples, it is a tenth longer than a pass.

    Attributes:
        batches: distinct batch sizes, ascending, samples.
        relative_samples: samples to the same accuracy with each of them, relative to any of them (R_b of
            arXiv:2502.18323).

    Raises:
        InvalidInputError: there are no batch sizes or too many; they are not distinct, ascending and whole; the
            lengths differ; or the samples are not finite and above 0.
    """

    batches: tuple[int, ...]
    relative_samples: tuple[float, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.batches) <= MAX_BATCH_OPTIONS:
            raise InvalidInputError(f"batches: state 1 to {MAX_BATCH_OPTIONS} batch sizes, not {len(self.batches)}")
        if any(type(batch) is not int or not 1 <= batch <= LARGEST_COUNT for batch in self.batches):
            raise InvalidInputError(
                f"batches: each must be a whole number of samples, from 1 to {LARGEST_COUNT:,}, not {self.batches}"
            )
        if any(left >= right for left, right in zip(self.batches, self.batches[1:], strict=False)):
            raise InvalidInputError(f"batches: must be distinct and ascending, not {self.batches}")
        if len(self.relative_samples) != len(self.batches):
            raise InvalidInputError(
                f"batches: {len(self.batches)} batch sizes need as many relative samples, not"
                f" {len(self.relative_samples)}"
            )
        if not all(0 < samples < math.inf for samples in self.relative_samples):
            raise InvalidInputError(f"relative samples: must be finite and above 0, not {self.relative_samples}")
        if max(self.relative_samples) > _MAX_RATIO * min(self.relative_samples):
            raise InvalidInputError(
                f"relative samples: one batch size must not need more than {_MAX_RATIO:,.0f} times the samples of"
                f" another, not {self.relative_samples}: leave out batch sizes that hardly train"
            )

    @classmethod
    def of(cls, relative_samples: Mapping[int, float]) -> BatchOptions:
        """Create the options from the relative samples of each batch size, in any order.

        Raises:
            InvalidInputError: as for the class.
        """
        batches = tuple(sorted(relative_samples))
        return cls(batches, tuple(relative_samples[batch] for batch in batches))

    def __contains__(self, batch: int) -> bool:
        return batch in self.batches

    def relative_to(self, base: int, batch: int) -> float:
        """Samples needed for the same progress with a batch size, relative to those with another; both are options."""
        return self._of(batch) / self._of(base)

    def scaled_minibatches(self, minibatches: float, base: int, batch: int) -> float:
        """Convert the minibatches of an epoch from one batch size to another. Both must be options.

        Args:
            minibatches: number of minibatches of an epoch with `base`.
            base: batch size that they are known for.
            batch: batch size to convert them to.
        """
        return minibatches * self.relative_to(base, batch) * base / batch

    def _of(self, batch: int) -> float:
        return self.relative_samples[self.batches.index(batch)]


# --- Workload ---------------------------------------------------------------------------------------------------------

MAX_WORKLOAD_NAME_CHARACTERS = 200
"""Maximum length of a workload's name, characters."""

ASSUMED_MINIBATCHES_PER_EPOCH = 100
"""Assumed number of minibatches in an epoch while it is unknown."""


@dataclass(frozen=True)
class Workload:
    """One workload: plans, fronts, journals and predictors are kept by its name.

    Another batch size or another number of loader workers is another point of the same workload. Another network is
    another workload.

    Attributes:
        name: names the network and its data, such as `resnet18-imagenet`.
        facts: the current knowledge about its step; its task never changes.
        batches: the batch sizes that its app can train with; None if the app always trains with its own.

    Raises:
        InvalidInputError: the name is empty, too long, or has characters that are not printable.
    """

    name: str
    facts: WorkloadFacts = WorkloadFacts()
    batches: BatchOptions | None = None

    def __post_init__(self) -> None:
        require_workload_name(self.name)

    @property
    def choice(self) -> BatchOptions | None:
        """The batch sizes that a plan may choose; None unless the app trains with one of them now."""
        if self.batches is None or self.facts.batch is None or self.facts.batch not in self.batches:
            return None
        return self.batches

    def with_batch(self, batch: int) -> Workload:
        """The same workload, trained with another batch size."""
        flops, before = self.facts.step_flops, self.facts.batch
        if flops is not None and before is not None:
            flops = flops * batch / before
        return replace(self, facts=replace(self.facts, batch=batch, step_flops=flops))

    def completed(self, facts: WorkloadFacts) -> Workload:
        """The same workload with newer facts. Facts that are None there keep their current value.

        Args:
            facts: the newer facts, for example from the data loader of a training.

        Raises:
            InvalidInputError: they are for another task.
        """
        if facts.task is not self.facts.task:
            raise InvalidInputError(
                f"the workload {self.name!r} is {self.facts.task}, not {facts.task}: give the other task its own name"
            )
        newer = {each.name: getattr(facts, each.name) for each in fields(facts)}
        return replace(self, facts=replace(self.facts, **{name: to for name, to in newer.items() if to is not None}))


def require_workload_name(name: str) -> None:
    """Check the name of a workload.

    Raises:
        InvalidInputError: it is empty, too long, or has characters that are not printable.
    """
    if name.strip() and len(name) <= MAX_WORKLOAD_NAME_CHARACTERS and name.isprintable():
        return
    shown = repr(name) if len(name) <= MAX_WORKLOAD_NAME_CHARACTERS else f"one of {len(name):,} characters"
    raise InvalidInputError(
        f"a workload's name must have 1 to {MAX_WORKLOAD_NAME_CHARACTERS} printable characters, not {shown}: give it a"
        " shorter or plainer name"
    )


# --- Fitted workload --------------------------------------------------------------------------------------------------
# The workload that a stored predictor was fitted to: a network, its data and one minibatch size.


@dataclass(frozen=True)
class FittedWorkload:
    """The training workload of a stored predictor; the paper counts another minibatch size as another workload.

    Source: PowerTrain, section 4.3.5.

    Attributes:
        name: network and data, such as `resnet18-imagenet`.
        minibatch: samples in a minibatch.
        minibatches_per_epoch: minibatches in one pass over the device's own data.

    Raises:
        InvalidInputError: the name is empty, or a number is not whole or out of range.
    """

    name: str
    minibatch: int
    minibatches_per_epoch: int

    def __post_init__(self) -> None:
        is_whole = type(self.minibatch) is int and type(self.minibatches_per_epoch) is int
        if (
            not (isinstance(self.name, str) and self.name and is_whole)
            or not 1 <= self.minibatch <= LARGEST_COUNT
            or self.minibatches_per_epoch < 1
        ):
            raise InvalidInputError(
                f"workload {self.name!r} needs a name, 1 to {LARGEST_COUNT:,} samples per minibatch and at least 1"
                f" minibatch per epoch, not {self.minibatch!r} and {self.minibatches_per_epoch!r}"
            )
