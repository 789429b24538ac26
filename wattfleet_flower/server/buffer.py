"""Buffered asynchronous aggregation (Nguyen et al. 2022, arXiv 2106.06639), without network and clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[np.generic]]


@dataclass(frozen=True)
class Update:
    """What one training changed.

    Attributes:
        base: the arrays that it began with.
        trained: the arrays that it ended with.
        staleness: server steps that were made in between.
    """

    base: Arrays
    trained: Arrays
    staleness: int

    @property
    def weight(self) -> float:
        """What it counts: the paper's `1 / sqrt(1 + staleness)`."""
        return 1.0 / math.sqrt(1.0 + self.staleness)


def step(current: Arrays, updates: Sequence[Update], learning_rate: float) -> Arrays:
    """The server's step: `current + learning_rate * mean(weight * (trained - base))`.

    Each array keeps its kind of number; counters, such as those of batch norm, are rounded.

    Args:
        current: the arrays now.
        updates: of the buffer, one or more.
        learning_rate: the server's.

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
