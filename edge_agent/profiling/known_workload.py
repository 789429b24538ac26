"""What an agent knows of one workload, and how that is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from wattfleet.errors import InvalidInputError
from wattfleet.modes import (
    ASSUMED_MINIBATCHES_PER_EPOCH,
    BatchOptions,
    Processor,
    Task,
    Workload,
    WorkloadFacts,
)
from wattfleet_proto.loader_limits import MAX_MINIBATCHES_PER_EPOCH

UNNAMED = "unnamed"
"""The workload of a run that names none, as apps before protocol 2.1."""

BUILT_IN = "built-in"
"""The workload that a virtual board stands for if a run names none."""


@dataclass(frozen=True)
class KnownWorkload:
    """A workload on this device.

    Attributes:
        workload: its name and facts. The facts are those of its latest training.
        minibatches_per_epoch: minibatches of one pass over the device's own data, with the batch size of its latest
            training; None if nobody has said so yet.
        too_large_batch: the smallest batch size that did not fit into the device's memory; None if none is known.

    Raises:
        InvalidInputError: the number of minibatches is out of range.
    """

    workload: Workload
    minibatches_per_epoch: int | None = None
    too_large_batch: int | None = None

    def __post_init__(self) -> None:
        count = self.minibatches_per_epoch
        if count is not None and not 1 <= count <= MAX_MINIBATCHES_PER_EPOCH:
            raise InvalidInputError(
                f"minibatches_per_epoch must be 1 to {MAX_MINIBATCHES_PER_EPOCH:,}, not {count:,}: correct it, or leave"
                " it out if it is unknown"
            )

    @property
    def counted_minibatches(self) -> int:
        """Minibatches that an epoch counts: the device's own, or the assumed number."""
        if self.minibatches_per_epoch is None:
            return max(1, round(self._largest_to_own(ASSUMED_MINIBATCHES_PER_EPOCH)))
        return self.minibatches_per_epoch

    @property
    def reported_minibatches(self) -> int | None:
        """Minibatches of an epoch as the coordinator counts them: with the largest batch that a plan may choose."""
        length, options, own = self.minibatches_per_epoch, self.workload.batches, self.workload.facts.batch
        if length is None or options is None or own is None or not self.workload.chooses_batch:
            return length
        return max(1, round(options.scaled_minibatches(length, own, options.batches[-1])))

    def minibatches_of(self, batch: int) -> float:
        """Minibatches of an epoch with a batch size that a plan may choose."""
        options, own = self.workload.batches, self.workload.facts.batch
        assert options is not None and own is not None, "a plan may choose the batch"
        if self.minibatches_per_epoch is None:
            return options.scaled_minibatches(ASSUMED_MINIBATCHES_PER_EPOCH, options.batches[-1], batch)
        return options.scaled_minibatches(self.minibatches_per_epoch, own, batch)

    def with_batch(self, batch: int) -> KnownWorkload:
        """The same, trained with another of the batch sizes that a plan may choose."""
        length = self.minibatches_per_epoch
        if length is not None:
            length = min(max(1, round(self.minibatches_of(batch))), MAX_MINIBATCHES_PER_EPOCH)
        return replace(self, workload=self.workload.with_batch(batch), minibatches_per_epoch=length)

    def with_batches(self, options: BatchOptions | None) -> KnownWorkload:
        """The same, with the batch sizes that its app can train with, as far as they fit into the device's memory."""
        return replace(self, workload=replace(self.workload, batches=options and options.below(self.too_large_batch)))

    def out_of_memory(self) -> KnownWorkload:
        """The same, once a batch of the current size did not fit into the device's memory."""
        options, batch = self.workload.batches, self.workload.facts.batch
        if options is None or batch is None or not self.workload.chooses_batch:
            return self
        known = replace(self, too_large_batch=batch)
        left = options.below(batch)
        return (known if left is None else known.with_batch(left.batches[-1])).with_batches(options)

    def _largest_to_own(self, minibatches: float) -> float:
        """Minibatches of an epoch with the own batch size, from those with the largest that a plan may choose."""
        options, own = self.workload.batches, self.workload.facts.batch
        if options is None or own is None or not self.workload.chooses_batch:
            return minibatches
        return options.scaled_minibatches(minibatches, options.batches[-1], own)

    def completed(self, facts: WorkloadFacts, minibatches_per_epoch: int | None = None) -> KnownWorkload:
        """The same with newer knowledge; what it leaves open stays as it is known.

        Raises:
            InvalidInputError: the facts are of another task, or a number is out of range.
        """
        return replace(
            self,
            workload=self.workload.completed(facts),
            minibatches_per_epoch=minibatches_per_epoch or self.minibatches_per_epoch,
        )

    def content(self) -> dict[str, Any]:
        """As JSON; `from_content` reads it."""
        facts = {name: value for name, value in asdict(self.workload.facts).items() if value is not None}
        return {
            "name": self.workload.name,
            "facts": {**facts, "task": str(facts["task"]), "processor": str(facts["processor"])},
            "minibatches_per_epoch": self.minibatches_per_epoch,
            "too_large_batch": self.too_large_batch,
        }

    @classmethod
    def from_content(cls, content: Mapping[str, Any]) -> KnownWorkload:
        """Read what `content` gave.

        Raises:
            ValueError, KeyError, TypeError, InvalidInputError: it is damaged.
        """
        facts = dict(content["facts"])
        length, too_large = content["minibatches_per_epoch"], content.get("too_large_batch")  # absent before 2.3
        if any(number is not None and type(number) is not int for number in (length, too_large)):
            raise TypeError("minibatches_per_epoch or too_large_batch is not a whole number")
        facts = {**facts, "task": Task(facts["task"]), "processor": Processor(facts["processor"])}
        return cls(Workload(content["name"], WorkloadFacts(**facts)), length, too_large)
