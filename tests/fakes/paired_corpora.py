"""Small corpora of a training and an inference in the same modes, and a predictor that knows their formula."""

from __future__ import annotations

import numpy as np

from wattfleet.core.choosing import ServiceLimits
from wattfleet.core.modes import BatchArray, ModeArray, Profile, Task, board_named
from wattfleet.core.prediction import Prediction
from wattfleet.evaluation.methods import PairCorpora

SPACE = board_named("agx-orin").space.array()
BATCHES = (1, 4, 16, 32)


def truth(task: Task, modes: ModeArray, batch: BatchArray | None) -> tuple[np.ndarray, np.ndarray]:
    """Times and powers of a mode's training, or of its inference with a batch size."""
    _, cpu, gpu, mem = (modes / [1.0, 1e6, 1e9, 1e9]).T
    if task is Task.TRAINING or batch is None:
        return 20 / cpu + 18 / gpu + 6 / mem, 6e3 + 3e3 * cpu + 2e4 * gpu
    return 3 / cpu + (1.2 / gpu + 0.4 / mem) * batch, 5e3 + 2e3 * cpu + 1.2e4 * gpu * batch / (batch + 2)


def corpora(count: int = 40) -> PairCorpora:
    """Measurements of training in `count` modes, and of inference in each of them with every batch size."""
    modes = SPACE[np.random.default_rng(0).choice(len(SPACE), count, replace=False)]
    training = Profile(modes, *truth(Task.TRAINING, modes, None))
    repeated, batch = np.tile(modes, (len(BATCHES), 1)), np.repeat(BATCHES, count)
    return PairCorpora.of(training, Profile(repeated, *truth(Task.INFERENCE, repeated, batch), batch, Task.INFERENCE))


PROBLEMS = [
    ServiceLimits(latency_ms, arrival, 1e3 * watts)
    for latency_ms in (150.0, 1000.0)
    for arrival in (30.0, 120.0)
    for watts in range(6, 36, 4)
]


class Formula:
    """Predicts by the corpora's own formula, with stated errors.

    Args:
        task: what it predicts.
        sd: log standard deviation of the errors of time and of power.
        biased: factor for all powers that the stated errors do not include.
    """

    def __init__(self, task: Task, sd: float = 1e-6, biased: float = 1.0) -> None:
        self.task, self.sd, self.biased = task, sd, biased

    def predict(self, modes: ModeArray, batch: BatchArray | None) -> Prediction:
        """The prediction of each row."""
        time, power = truth(self.task, modes, batch)
        errors = np.exp(np.random.default_rng(1).normal(0, self.sd, (2, len(modes))))
        all_ = np.full(len(modes), self.sd)
        return Prediction(time * errors[0], self.biased * power * errors[1], all_, all_)
