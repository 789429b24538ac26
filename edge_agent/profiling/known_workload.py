"""What an agent knows of one workload, and how that is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from wattfleet.errors import InvalidInputError
from wattfleet.modes import ASSUMED_MINIBATCHES_PER_EPOCH, Processor, Task, Workload, WorkloadFacts
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
        minibatches_per_epoch: minibatches of one pass over the device's own data; None if nobody has said so yet.

    Raises:
        InvalidInputError: the number of minibatches is out of range.
    """

    workload: Workload
    minibatches_per_epoch: int | None = None

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
        return self.minibatches_per_epoch or ASSUMED_MINIBATCHES_PER_EPOCH

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
        }

    @classmethod
    def from_content(cls, content: Mapping[str, Any]) -> KnownWorkload:
        """Read what `content` gave.

        Raises:
            ValueError, KeyError, TypeError, InvalidInputError: it is damaged.
        """
        facts = dict(content["facts"])
        length = content["minibatches_per_epoch"]
        if length is not None and type(length) is not int:
            raise TypeError("minibatches_per_epoch is no whole number")
        facts = {**facts, "task": Task(facts["task"]), "processor": Processor(facts["processor"])}
        return cls(Workload(content["name"], WorkloadFacts(**facts)), length)
