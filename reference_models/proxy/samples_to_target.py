"""Counts the samples that one training run needs to a target accuracy."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from wattfleet.errors import InvalidInputError

ACCURACY_WINDOW = 3
"""A run has reached the target once the mean of this many consecutive accuracies has; a single one is too noisy."""


class Learner(Protocol):
    """A model in training with a fixed batch size."""

    def train_minibatch(self) -> None:
        """Train one minibatch."""

    def accuracy(self) -> float:
        """The share of correct answers on the test data; NaN if the model's output is not finite."""


@dataclass(frozen=True)
class RunLimits:
    """The limits of a run: when it is evaluated, and when it ends.

    Attributes:
        target_accuracy: the accuracy to be reached, a share above 0 and up to 1.
        evaluate_every: trained samples between two evaluations, for all batches alike. A batch that does not divide it
            is evaluated after the first minibatch that reaches the count.
        max_samples: a run ends without the target before it would train more samples.

    Raises:
        InvalidInputError: a value is out of range, or the limit ends a run before it can reach the target.
    """

    target_accuracy: float
    evaluate_every: int
    max_samples: int

    def __post_init__(self) -> None:
        if not 0 < self.target_accuracy <= 1:
            raise InvalidInputError(
                f"the target accuracy must be above 0 and at most 1, not {self.target_accuracy:g}: give 85 % as 0.85"
            )
        if self.evaluate_every < 1:
            raise InvalidInputError(f"--evaluate-every must be at least 1, not {self.evaluate_every}")
        if self.max_samples < ACCURACY_WINDOW * self.evaluate_every:
            raise InvalidInputError(
                f"with --max-samples {self.max_samples}, a run ends before its first {ACCURACY_WINDOW} evaluations, one"
                f" every {self.evaluate_every} samples: give --max-samples at least"
                f" {ACCURACY_WINDOW * self.evaluate_every}, or a smaller --evaluate-every"
            )


@dataclass(frozen=True)
class RunEnd:
    """The outcome of a run.

    Attributes:
        samples: samples trained until the target was reached; None if it was not.
        accuracy: mean of the last accuracies; None if the model's output was no longer finite, or nothing was
            evaluated.
    """

    samples: int | None
    accuracy: float | None


def samples_to_target(
    learner: Learner, batch: int, limits: RunLimits, report: Callable[[int, float], None] = lambda samples, mean: None
) -> RunEnd:
    """Train until the mean of the last `ACCURACY_WINDOW` accuracies reaches the target.

    The count includes the samples of these last evaluations.

    Args:
        learner: the model to train.
        batch: samples in a minibatch of the learner.
        limits: when to evaluate and when to end.
        report: called after each evaluation with the trained samples and the mean of the last accuracies.
    """
    latest: deque[float] = deque(maxlen=ACCURACY_WINDOW)
    samples = 0
    next_evaluation = limits.evaluate_every
    while samples + batch <= limits.max_samples:
        learner.train_minibatch()
        samples += batch
        if samples < next_evaluation:
            continue
        next_evaluation += limits.evaluate_every
        accuracy = learner.accuracy()
        if math.isnan(accuracy):
            return RunEnd(None, None)
        latest.append(accuracy)
        mean = math.fsum(latest) / len(latest)
        report(samples, mean)
        if len(latest) == ACCURACY_WINDOW and mean >= limits.target_accuracy:
            return RunEnd(samples, mean)
    return RunEnd(None, math.fsum(latest) / len(latest) if latest else None)
