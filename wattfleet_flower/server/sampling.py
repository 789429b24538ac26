"""How many nodes a strategy takes: its own attributes, lent for as long as it writes its messages.

Every sampling strategy of Flower derives from FedAvg and has FedAvg's attributes; those for differential privacy wrap
one that has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flwr.serverapp.strategy import Strategy

_LEAST = ("min_available_nodes", "min_train_nodes", "min_evaluate_nodes")


def layers(strategy: Strategy) -> Iterator[Strategy]:
    """A strategy, the one that it wraps, and so on."""
    seen: list[Strategy] = []
    layer: Any = strategy
    while isinstance(layer, Strategy) and not any(layer is one for one in seen):
        seen.append(layer)
        yield layer
        layer = getattr(layer, "strategy", None)


def attribute(strategy: Strategy, name: str, default: Any) -> Any:
    """An attribute of a strategy, or of the one that it wraps."""
    return next((getattr(layer, name) for layer in layers(strategy) if hasattr(layer, name)), default)


def takes_all(strategy: Strategy) -> Any:
    """While this lasts, the strategy trains on all nodes that it is shown: the plan has chosen them."""
    return _lent(
        strategy,
        {
            "fraction_train": lambda own: 1.0,
            **{name: lambda own: 1 for name in _LEAST if name != "min_evaluate_nodes"},
        },
    )


def takes_at_most(strategy: Strategy, nodes: int) -> Any:
    """While this lasts, the strategy samples as ever, but does not wait for more nodes than there are."""
    return _lent(strategy, {name: lambda own: min(own, nodes) for name in _LEAST})


@contextmanager
def _lent(strategy: Strategy, changes: Mapping[str, Callable[[Any], Any]]) -> Iterator[None]:
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
