"""Workloads: what devices train or serve, described by the facts that affect time and power."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from wattfleet.errors import InvalidInputError
from wattfleet.modes.batch_options import BatchOptions
from wattfleet.modes.workload_facts import WorkloadFacts

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
