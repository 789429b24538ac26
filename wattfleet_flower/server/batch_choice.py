"""The batch sizes that an app lets the plan choose for each device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from logging import INFO

from flwr.common.logger import log

from wattfleet.choosing import BatchEfficiency, scaled_learning_rate
from wattfleet.errors import InvalidInputError
from wattfleet.modes import BatchOptions, Workload
from wattfleet_proto.assignment import AssignedWork
from wattfleet_proto.v1 import planning_pb2


@dataclass(frozen=True)
class BatchChoice:
    """Batch sizes that a plan may choose for each device, for an app that trains with `planned_loader`.

    Attributes:
        batches: the batch sizes, in any order.
        base_batch: the batch size that the app's learning rate was tuned for; one of `batches`.
        efficiency: samples needed for the same accuracy with each batch size, as measured by `wattfleet reference
            proxy`. None assumes the same number for all, which favours large batches.
        optimizer: `sgd` scales the learning rate in proportion to the batch, `adam` and `adamw` by its square root,
            `none` keeps it.
        options: the batch sizes and the samples that each needs, as sent to the devices.

    Raises:
        InvalidInputError: a batch size or the optimizer is not valid, `base_batch` is not among the batches, or the
            efficiency of a batch size is not known.
    """

    batches: Iterable[int]
    base_batch: int
    efficiency: BatchEfficiency | None = None
    optimizer: str = "sgd"
    options: BatchOptions = field(init=False)

    def __post_init__(self) -> None:
        batches = tuple(sorted(self.batches))
        object.__setattr__(self, "batches", batches)
        if self.base_batch not in batches:
            raise InvalidInputError(
                f"base_batch: {self.base_batch} is not among the batches {batches}: add the batch size that the app's"
                " learning rate was tuned for"
            )
        known = self.efficiency
        if len(set(batches)) < len(batches):
            raise InvalidInputError(f"batches: state each batch size once, not {batches}")
        options = BatchOptions.of({batch: 1.0 if known is None else known.of(batch) for batch in batches})
        object.__setattr__(self, "options", options)
        self.lr_scale(self.base_batch)  # raises if the optimizer is unknown

    def lr_scale(self, batch: int) -> float:
        """The factor by which the app's learning rate is scaled for a batch size."""
        return scaled_learning_rate(1.0, self.base_batch, batch, self.optimizer)

    def of_workload(self, workload: Workload) -> Workload:
        """The workload of a run whose plans choose the batch.

        Raises:
            InvalidInputError: the workload states another batch size.
        """
        stated = workload.facts.batch
        if stated not in (None, self.base_batch):
            raise InvalidInputError(
                f"the workload states batches of {stated} samples, but base_batch is {self.base_batch}: state only one"
                " of them"
            )
        return replace(workload, facts=replace(workload.facts, batch=self.base_batch), batches=self.options)

    def work_of(self, assignment: planning_pb2.Assignment) -> AssignedWork:
        """The work of a device; without a batch size, which lets the app use its own, if the plan has chosen none."""
        batch, options = assignment.batch, self.options
        if batch not in options:
            if batch:
                log(
                    INFO,
                    "the plan has chosen no batch size for %s, which trains with the app's own",
                    assignment.device_id,
                )
            return AssignedWork()
        return AssignedWork(batch, self.lr_scale(batch), options.relative_to(self.base_batch, batch))
