"""The arithmetic of buffered asynchronous aggregation (Nguyen et al. 2022, arXiv 2106.06639)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[np.generic]]


@dataclass(frozen=True)
class Update:
    """The result of one training.

    Attributes:
        base: the arrays that it started from.
        trained: the arrays after training.
        staleness: server steps between its start and its arrival.
    """

    base: Arrays
    trained: Arrays
    staleness: int

    @property
    def weight(self) -> float:
        """The update's weight in a server step."""
        return staleness_weight(self.staleness)


def staleness_weight(staleness: int) -> float:
    """The paper's weight of an update, `1 / sqrt(1 + staleness)`.

    Args:
        staleness: server steps between its start and its arrival.
    """
    return 1.0 / math.sqrt(1.0 + staleness)


def with_dtype(values: NDArray[np.float64], dtype: np.dtype[Any]) -> NDArray[np.generic]:
    """Convert values to the dtype of their array; integers are rounded."""
    # NumPy returns a scalar for arrays without dimensions, such as the counters of batch norm.
    return np.asarray(np.rint(values) if np.issubdtype(dtype, np.integer) else values).astype(dtype)


def not_below_the_lowest(values: NDArray[np.float64], arrays: Sequence[NDArray[np.generic]]) -> NDArray[np.float64]:
    """Values at or above the lowest of the arrays that they come from, if none of these has a negative value.

    A sum of differences could otherwise make a variance of batch norm negative.
    """
    lowest = np.min([array.astype(np.float64) for array in arrays], axis=0)
    return np.maximum(values, lowest) if (lowest >= 0).all() else values


def step(current: Arrays, updates: Sequence[Update], learning_rate: float) -> Arrays:
    """Compute the server's step: `current + learning_rate * mean(weight * (trained - base))`.

    Each array keeps its dtype; integers, such as the counters of batch norm, are rounded. Where no array has a negative
    value, each value stays at or above the lowest of its arrays.

    Args:
        current: the arrays before the step.
        updates: the buffered updates, at least one.
        learning_rate: the server's learning rate.

    Returns:
        The arrays after the step.
    """
    after: Arrays = {}
    for key, array in current.items():
        moved: NDArray[np.float64] = np.asarray(
            sum(
                update.weight * (update.trained[key].astype(np.float64) - update.base[key].astype(np.float64))
                for update in updates
            )
        )
        value = array.astype(np.float64) + learning_rate * moved / len(updates)
        sources = [array, *(each[key] for update in updates for each in (update.base, update.trained))]
        after[key] = with_dtype(not_below_the_lowest(value, sources), array.dtype)
    return after
