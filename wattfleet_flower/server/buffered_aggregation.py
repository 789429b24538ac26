"""The arithmetic of buffered asynchronous aggregation (Nguyen et al. 2022, arXiv 2106.06639)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
        """Its weight in a step: the paper's `1 / sqrt(1 + staleness)`."""
        return 1.0 / math.sqrt(1.0 + self.staleness)


def step(current: Arrays, updates: Sequence[Update], learning_rate: float) -> Arrays:
    """Compute the server's step: `current + learning_rate * mean(weight * (trained - base))`.

    Each array keeps its dtype; integers, such as the counters of batch norm, are rounded.

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
        is_whole = np.issubdtype(array.dtype, np.integer)
        after[key] = (np.rint(value) if is_whole else value).astype(array.dtype)
    return after
