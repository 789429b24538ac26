"""Selection of nodes by the app, from their predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from logging import INFO
from typing import Any

import grpc
from flwr.common.logger import log
from flwr.serverapp.strategy import FedXgbBagging, FedXgbCyclic, Strategy

from wattfleet.core.choosing import BatchEfficiency, scaled_learning_rate
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import BatchOptions, Workload
from wattfleet.flower.server.errors import CoordinatorRefusedError
from wattfleet.flower.server.predictions import NodePrediction
from wattfleet_proto.assignment import AssignedWork
from wattfleet_proto.v1 import planning_pb2

# --- Sampling ---------------------------------------------------------------------------------------------------------
# Temporarily changes how many nodes a strategy samples, through the strategy's own attributes.
#
# All of Flower's sampling strategies derive from FedAvg and have its attributes. Strategies for differential privacy
# wrap such a strategy.


_MINIMUM_ATTRIBUTES = ("min_available_nodes", "min_train_nodes", "min_evaluate_nodes")


def layers(strategy: Strategy) -> Iterator[Strategy]:
    """Yield a strategy, then the strategy that it wraps, and so on."""
    seen: list[Strategy] = []
    layer: Any = strategy
    while isinstance(layer, Strategy) and not any(layer is each for each in seen):
        seen.append(layer)
        yield layer
        layer = getattr(layer, "strategy", None)


def attribute(strategy: Strategy, name: str, default: Any) -> Any:
    """Return an attribute of a strategy or of the one that it wraps."""
    return next((getattr(layer, name) for layer in layers(strategy) if hasattr(layer, name)), default)


def trains_nothing(strategy: Strategy) -> bool:
    """Whether the strategy only evaluates. Then Flower sends no training, and nothing is planned."""
    return bool(attribute(strategy, "fraction_train", 1.0) == 0)


def needs_all(strategy: Strategy) -> bool:
    """Whether the strategy needs the update of every device: trees of XGBoost add up, and are not averaged."""
    return any(isinstance(layer, FedXgbBagging) for layer in layers(strategy))


def takes_turns(strategy: Strategy) -> bool:
    """Whether the strategy trains on one node in each round, whose turn it chooses itself."""
    return any(isinstance(layer, FedXgbCyclic) for layer in layers(strategy))


def sampling_all(strategy: Strategy) -> Any:
    """Make the strategy train on all nodes of its grid within this context, since the plan has selected them."""
    return _overridden(
        strategy,
        {
            "fraction_train": lambda own: 1.0,
            **{name: lambda own: 1 for name in _MINIMUM_ATTRIBUTES if name != "min_evaluate_nodes"},
        },
    )


def sampling_at_most(strategy: Strategy, nodes: int) -> Any:
    """Keep the strategy from waiting for more nodes than there are within this context; it samples as usual."""
    return _overridden(strategy, {name: lambda own: min(own, nodes) for name in _MINIMUM_ATTRIBUTES})


@contextmanager
def _overridden(strategy: Strategy, changes: Mapping[str, Callable[[Any], Any]]) -> Iterator[None]:
    own = [
        (layer, name, getattr(layer, name)) for layer in layers(strategy) for name in changes if hasattr(layer, name)
    ]
    for layer, name, value in own:
        setattr(layer, name, changes[name](value))
    try:
        yield
    finally:
        for layer, name, value in own:
            setattr(layer, name, value)


# --- Selection --------------------------------------------------------------------------------------------------------

Select = Callable[[int, Sequence[NodePrediction]], Iterable[int]]
"""Maps a round's number and the predictions of the connected nodes to the ids of the nodes that a plan may use."""


def selected_nodes(select: Select, number: int, predictions: Sequence[NodePrediction]) -> list[int]:
    """Return the nodes that the app selects for a round, each once.

    Args:
        select: the app's selection.
        number: the round's number, from 1.
        predictions: of the connected nodes.

    Raises:
        CoordinatorRefusedError: it selects none; it may select some once more devices are ready.
        InvalidInputError: it selects something that is not the id of a predicted node.
    """
    selected = list(dict.fromkeys(select(number, predictions)))
    known = {prediction.node_id for prediction in predictions}
    for node_id in selected:
        if node_id not in known:
            raise InvalidInputError(
                f"select chose {node_id!r} in round {number}, which is not the id of a predicted node: return the"
                " node_id of predictions"
            )
    if not selected:
        reasons = {prediction.reason for prediction in predictions if prediction.reason}
        raise CoordinatorRefusedError(
            f"select chose none of {len(predictions)} nodes in round {number}"
            + (f" ({'; '.join(sorted(reasons)[:3])})" if reasons else "")
            + ": let it choose at least one",
            grpc.StatusCode.UNAVAILABLE,
        )
    return selected


# --- Batch choice -----------------------------------------------------------------------------------------------------
# The batch sizes that an app lets the plan choose for each device.


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
