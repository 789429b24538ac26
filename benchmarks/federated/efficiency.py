"""What a server measures on a proxy: the efficiency of batches, and the progress of a round by its local epochs.

The server divides data of its own over imagined devices, and counts the rounds to an accuracy. So it learns what local
training does to an average, which training in one place does not show.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.federated.boards import BASE_BATCH, BATCHES
from benchmarks.federated.figures import reached
from benchmarks.federated.jobs import LOCAL_EPOCHS
from benchmarks.federated.learning import Federation, LocalWork
from benchmarks.federated.tasks import PROXIES, TASKS, LearningTask
from benchmarks.federated.work import Efforts
from wattfleet.choosing import BatchEfficiency

EPOCHS = (2.0, 3.0, 4.0, 6.0, 8.0)
"""Local epochs among which a tuned round chooses."""

_DEVICES = 50
_COUNT = 10
_SEEDS = range(100, 103)
_ROUNDS = 150


@dataclass(frozen=True)
class Measured:
    """What the proxy has shown.

    Attributes:
        batches: samples needed with each batch.
        efforts: progress of a round by its local epochs.
    """

    batches: BatchEfficiency
    efforts: Efforts


def measured(task: str, folder: Path) -> Measured:
    """What the proxy of a task shows: from the folder, or found now and kept there."""
    kept = folder / f"proxy-{task}.json"
    if not kept.exists():
        proxy, whole = PROXIES[task](), TASKS[task]()
        devices = max(_COUNT, round(_DEVICES * len(proxy.train[1]) / len(whole.train[1])))
        rounds = {
            "batches": {batch: rounds_to_target(proxy, devices, LocalWork(LOCAL_EPOCHS, batch)) for batch in BATCHES},
            "epochs": {epochs: rounds_to_target(proxy, devices, LocalWork(epochs)) for epochs in EPOCHS},
        }
        folder.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(rounds) + "\n", encoding="utf-8")
    found = json.loads(kept.read_text(encoding="utf-8"))
    by_batch = {int(batch): runs for batch, runs in found["batches"].items()}
    mean = {float(epochs): _mean(runs) for epochs, runs in found["epochs"].items()}
    return Measured(
        BatchEfficiency.from_runs(task, by_batch, "federated rounds on a proxy"),
        {epochs: mean[float(LOCAL_EPOCHS)] / rounds for epochs, rounds in mean.items()},
    )


def rounds_to_target(proxy: LearningTask, devices: int, work: LocalWork) -> list[int | None]:
    """Rounds of a uniform draw to the first target, for each of a few seeds; None if they are too many."""
    found = []
    for seed in _SEEDS:
        federation, draw = Federation(proxy, devices, seed), np.random.default_rng(seed)
        model, accuracy, rounds = federation.start, list[float](), None
        while rounds is None and len(accuracy) < _ROUNDS:
            drawn = draw.permutation(devices)[:_COUNT]
            model = federation.after(model, {int(device): work for device in drawn}, normalised=True)
            accuracy.append(model.accuracy)
            at = reached(accuracy, proxy.targets[0])
            rounds = None if at is None else at + 1
        found.append(rounds)
    return found


def _mean(rounds: Sequence[int | None]) -> float:
    return statistics.geometric_mean(_ROUNDS if each is None else each for each in rounds)


def no_measurement() -> Measured:
    """Where nothing is tuned."""
    return Measured(BatchEfficiency("none", (BASE_BATCH,), (1.0,), (0.0,), "nothing"), {float(LOCAL_EPOCHS): 1.0})
