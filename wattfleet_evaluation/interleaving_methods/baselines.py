"""Interleaving methods without a search: random measurements, and all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wattfleet.choosing import InterleavingObjective, ServiceLimits
from wattfleet_evaluation.interleaving_methods.interleaving_method import Choose, best_measured
from wattfleet_evaluation.interleaving_methods.session import InterleavingSession


@dataclass(frozen=True)
class RandomPairs:
    """Measures modes and batches drawn at random, each with the training in its mode."""

    name: str = "random"

    def profile(
        self,
        session: InterleavingSession,
        problems: Sequence[ServiceLimits],
        objective: InterleavingObjective,
        seed: int,
    ) -> Choose:
        """Measure random modes with batches, up to the session's limit."""
        for row in np.random.default_rng(seed).permutation(len(session.corpora.batch)).tolist():
            if not session.measure_pair(row):
                break
        return best_measured(session, objective)


@dataclass(frozen=True)
class EveryPair:
    """Measures all rows regardless of the limit. All other methods are compared with this best possible choice."""

    name: str = "brute-force"

    def profile(
        self,
        session: InterleavingSession,
        problems: Sequence[ServiceLimits],
        objective: InterleavingObjective,
        seed: int,
    ) -> Choose:
        """Measure everything."""
        session.measure_everything()
        return best_measured(session, objective)
