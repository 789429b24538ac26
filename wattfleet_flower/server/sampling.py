"""Temporarily changes how many nodes a strategy samples, through the strategy's own attributes.

All of Flower's sampling strategies derive from FedAvg and have its attributes. Strategies for differential privacy wrap
such a strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flwr.serverapp.strategy import Strategy

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
