"""An agent's knowledge of one workload, and its stored form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import (
    ASSUMED_MINIBATCHES_PER_EPOCH,
    BatchOptions,
    Processor,
    Task,
    Workload,
    WorkloadFacts,
)
from wattfleet_proto.limits import MAX_MINIBATCHES_PER_EPOCH

UNNAMED = "unnamed"
"""The workload of a run that does not name one."""

BUILT_IN = "built-in"
"""The workload of a virtual board if a run does not name one."""


@dataclass(frozen=True)
class KnownWorkload:
    """What is known of a workload on this device.

    Attributes:
        workload: its name, and the facts of its latest training.
        minibatches_per_epoch: minibatches of one pass over the device's own data, with the batch size of its latest
            training; None if not reported yet.
        too_large_batch: the smallest batch size that did not fit into the device's memory; None if none is known.
        is_length_estimated: whether that number is the length of a whole training in predicted minibatches, because its
            app reports none. Only the product of both is the time of an epoch.

    Raises:
        InvalidInputError: the number of minibatches is out of range.
    """

    workload: Workload
    minibatches_per_epoch: int | None = None
    too_large_batch: int | None = None
    is_length_estimated: bool = False

    def __post_init__(self) -> None:
        count = self.minibatches_per_epoch
        if count is not None and not 1 <= count <= MAX_MINIBATCHES_PER_EPOCH:
            raise InvalidInputError(
                f"minibatches_per_epoch must be 1 to {MAX_MINIBATCHES_PER_EPOCH:,}, not {count:,}: correct it, or "
                f"omit it if it is unknown"
            )

    @property
    def counted_minibatches(self) -> int:
        """Minibatches per epoch: the device's own number, or the assumed one."""
        if self.minibatches_per_epoch is not None:
            return self.minibatches_per_epoch
        own, choice = self.workload.facts.batch, self.workload.choice
        return ASSUMED_MINIBATCHES_PER_EPOCH if own is None or choice is None else round(self.minibatches_of(own))

    @property
    def reported_minibatches(self) -> int | None:
        """Minibatches per epoch as reported to the coordinator: with the largest batch that a plan may choose."""
        choice = self.workload.choice
        if self.minibatches_per_epoch is None or choice is None:
            return self.minibatches_per_epoch
        return min(round(self.minibatches_of(choice.batches[-1])), MAX_MINIBATCHES_PER_EPOCH)

    @property
    def offered_batches(self) -> tuple[int, ...]:
        """The batch sizes that a plan may choose and that fit into the device's memory, ascending."""
        choice = self.workload.choice
        batches = () if choice is None else choice.batches
        return tuple(batch for batch in batches if self.too_large_batch is None or batch < self.too_large_batch)

    def minibatches_of(self, batch: int) -> float:
        """Return the minibatches per epoch with a batch size that a plan may choose, at least 1.

        They are scaled from the latest training, whose last minibatch may not have been full.
        """
        choice, own = self.workload.choice, self.workload.facts.batch
        assert choice is not None and own is not None, "a plan may choose the batch"
        known, base = self.minibatches_per_epoch, own
        if known is None:
            known, base = ASSUMED_MINIBATCHES_PER_EPOCH, choice.batches[-1]
        return max(1.0, choice.scaled_minibatches(known, base, batch))

    def with_batch(self, batch: int) -> KnownWorkload:
        """Return a copy with another of the batch sizes that a plan may choose."""
        length = self.minibatches_per_epoch
        if length is not None:
            length = min(round(self.minibatches_of(batch)), MAX_MINIBATCHES_PER_EPOCH)
        return replace(self, workload=self.workload.with_batch(batch), minibatches_per_epoch=length)

    def with_batches(self, options: BatchOptions | None) -> KnownWorkload:
        """Return a copy with the batch sizes that its app can train with."""
        return replace(self, workload=replace(self.workload, batches=options))

    def out_of_memory(self) -> KnownWorkload:
        """Return a copy that notes that the current batch size did not fit into the device's memory."""
        own = self.workload.facts.batch
        if own is None or self.workload.choice is None:
            return self
        known = replace(self, too_large_batch=min(own, self.too_large_batch or own))
        return known.with_batch(known.offered_batches[-1]) if known.offered_batches else known

    def completed(self, facts: WorkloadFacts, minibatches_per_epoch: int | None = None) -> KnownWorkload:
        """Return a copy updated with newer knowledge; values that this leaves open are kept.

        An estimated length stays, since measured rows are in its minibatches: see `without_estimated_length`.

        Raises:
            InvalidInputError: the facts are for another task, or a number is out of range.
        """
        return replace(
            self,
            workload=self.workload.completed(facts),
            minibatches_per_epoch=self.minibatches_per_epoch
            if self.is_length_estimated
            else minibatches_per_epoch or self.minibatches_per_epoch,
        )

    def without_estimated_length(self) -> KnownWorkload:
        """Return a copy whose length is unknown, if it is estimated."""
        return (
            replace(self, minibatches_per_epoch=None, is_length_estimated=False) if self.is_length_estimated else self
        )

    def with_estimated_length(self, epoch_s: float, minibatch_s: float) -> KnownWorkload:
        """Return a copy whose length is that of a whole epoch, in predicted minibatches.

        Args:
            epoch_s: observed seconds of an epoch.
            minibatch_s: predicted seconds of a minibatch in the same mode.
        """
        length = min(max(1, round(epoch_s / minibatch_s)), MAX_MINIBATCHES_PER_EPOCH)
        return replace(self, minibatches_per_epoch=length, is_length_estimated=True)

    def content(self) -> dict[str, Any]:
        """Return a JSON object; `from_content` reads it."""
        facts = {name: value for name, value in asdict(self.workload.facts).items() if value is not None}
        return {
            "name": self.workload.name,
            "facts": {**facts, "task": str(facts["task"]), "processor": str(facts["processor"])},
            "minibatches_per_epoch": self.minibatches_per_epoch,
            "too_large_batch": self.too_large_batch,
            "is_length_estimated": self.is_length_estimated,
        }

    @classmethod
    def from_content(cls, content: Mapping[str, Any]) -> KnownWorkload:
        """Read the result of `content`.

        Raises:
            ValueError, KeyError, TypeError, InvalidInputError: the content is damaged.
        """
        facts = dict(content["facts"])
        length, too_large = content["minibatches_per_epoch"], content["too_large_batch"]
        if any(number is not None and type(number) is not int for number in (length, too_large)):
            raise TypeError("minibatches_per_epoch or too_large_batch is not a whole number")
        facts = {**facts, "task": Task(facts["task"]), "processor": Processor(facts["processor"])}
        if type(is_estimated := content["is_length_estimated"]) is not bool:
            raise TypeError("is_length_estimated is not true or false")
        return cls(Workload(content["name"], WorkloadFacts(**facts)), length, too_large, is_estimated)
