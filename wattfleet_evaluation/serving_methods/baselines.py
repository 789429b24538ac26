"""Serving methods without a predictor: they choose among what they measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wattfleet.choosing import Objective, ServiceLimits
from wattfleet.errors import InvalidInputError
from wattfleet_evaluation.serving_methods.serving_method import Choose, best_measured
from wattfleet_evaluation.serving_methods.serving_session import ServingSession


@dataclass(frozen=True)
class RandomSettings:
    """Measures settings drawn at random up to the limit."""

    name: str = "random"

    def profile(
        self, session: ServingSession, problems: Sequence[ServiceLimits], objective: Objective, seed: int
    ) -> Choose:
        """Measure random settings up to the session's limit."""
        session.measure_random(np.arange(len(session.batch)), seed)
        return best_measured(session.profile(), objective)


@dataclass(frozen=True)
class SingleSamples:
    """Does not batch: measures modes drawn at random with the smallest batch size, 1 in most corpora."""

    name: str = "batch-1"

    def profile(
        self, session: ServingSession, problems: Sequence[ServiceLimits], objective: Objective, seed: int
    ) -> Choose:
        """Measure random modes with the smallest batch, up to the session's limit."""
        session.measure_random(np.flatnonzero(session.batch == session.batch.min()), seed)
        return best_measured(session.profile(), objective)


@dataclass(frozen=True)
class LargestBatch:
    """Measures modes drawn at random with the largest batch size that can be collected within the latency."""

    name: str = "largest-batch"

    def profile(
        self, session: ServingSession, problems: Sequence[ServiceLimits], objective: Objective, seed: int
    ) -> Choose:
        """Measure random modes with the largest batch that is possible, up to the session's limit."""
        possible = session.batch[problems[0].longest_ms(session.batch) > 0]
        session.measure_random(np.flatnonzero(session.batch == possible.max(initial=0)), seed)
        return best_measured(session.profile(), objective)


@dataclass(frozen=True)
class EverySetting:
    """Measures every setting, which gives the best possible choice. All other methods are compared with it."""

    name: str = "brute-force"

    def profile(
        self, session: ServingSession, problems: Sequence[ServiceLimits], objective: Objective, seed: int
    ) -> Choose:
        """Measure all settings.

        Raises:
            InvalidInputError: the session's limit is below the number of settings.
        """
        if session.limit < len(session.batch):
            raise InvalidInputError(
                f"brute force measures all {len(session.batch)} settings, but the limit is {session.limit}: allow"
                f" {len(session.batch)}"
            )
        session.measure_random(np.arange(len(session.batch)), seed)
        return best_measured(session.profile(), objective)
