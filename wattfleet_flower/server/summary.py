"""The summary of a strategy in Flower's log at the start: which options have an effect when rounds are planned."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from flwr.common.logger import log
from flwr.serverapp.strategy import Strategy

from wattfleet_flower.server.away import OnCoordinatorAway
from wattfleet_flower.server.fedbuff import FedBuff
from wattfleet_flower.server.sampling import attribute, trains_nothing

_USED = {
    "min_available_nodes": "nodes to wait for before a plan",
    "fraction_evaluate": "share of the nodes that evaluate",
    "min_evaluate_nodes": "nodes that evaluate at least",
}
_IGNORED = ("fraction_train", "min_train_nodes")

# FedAvg's log lines about sampling, without the tree characters before them.
_SAMPLING_LINES = ("Sampling:", "Fraction: train", "Minimum nodes: train", "Minimum available nodes:")


def log_summary(strategy: Strategy, coordinator: str, on_coordinator_away: OnCoordinatorAway) -> None:
    """Log who chooses the nodes, which options of a strategy have an effect, and the rest of its own summary.

    Args:
        strategy: the wrapped strategy.
        coordinator: its address, as logs name it.
        on_coordinator_away: what a run does while the coordinator does not answer.
    """
    name = type(strategy).__name__
    _log("\t├──> PowerAware around %s: the coordinator at %s plans each training", name, coordinator)
    _log("\t│\t├── The coordinator's policy chooses the nodes that train, and their power modes")
    if isinstance(strategy, FedBuff):
        _log("\t│\t└── The options of FedBuff below are used")
        strategy.summary()
        return
    if trains_nothing(strategy):
        _log("\t│\t└── %s has fraction_train=0: nothing is trained, so nothing is planned", name)
        strategy.summary()
        return
    used = [f"{option}={value} ({meaning})" for option, meaning in _USED.items() if (value := _of(strategy, option))]
    _log("\t│\t├── Used of %s's options on nodes: %s", name, ", ".join(used) or "none")
    ignored = [f"{option}={value}" for option in _IGNORED if (value := _of(strategy, option))]
    meanwhile = "; used while the coordinator is away" if ignored and on_coordinator_away == "unplanned" else ""
    _log("\t│\t└── Ignored: %s%s", ", ".join(ignored) or "none", meanwhile)
    with _without_sampling():
        strategy.summary()


def _log(text: str, *values: object) -> None:
    log(logging.INFO, text, *values)


def _of(strategy: Strategy, option: str) -> str | None:
    """The value of an option as text; None if the strategy does not have it."""
    value = attribute(strategy, option, None)
    return f"{value:g}" if isinstance(value, (int, float)) else None


@contextmanager
def _without_sampling() -> Iterator[None]:
    """Leave out the lines in which FedAvg states how it would sample nodes."""

    def is_other(record: logging.LogRecord) -> bool:
        return not str(record.msg).lstrip("\t│├└─> ").startswith(_SAMPLING_LINES)

    logger = logging.getLogger("flwr")
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)
