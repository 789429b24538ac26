"""What a server measures on a proxy: the efficiency of batches, and the progress of a round by its local epochs.

The server divides data of its own over imagined devices, and counts the rounds to an accuracy. So it learns what local
training does to an average, which training in one place does not show.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.federated.boards import BASE_BATCH, BATCHES
from benchmarks.federated.figures import reached
from benchmarks.federated.jobs import LOCAL_EPOCHS
from benchmarks.federated.learning import Federation, LocalWork
from benchmarks.federated.tasks import PROXIES, TASKS, LearningTask
from benchmarks.federated.work import FIXED_EFFORT, Effort, Efforts
from wattfleet.choosing import BatchEfficiency

EPOCHS = (2.0, 4.0, 6.0, 8.0)
"""Local epochs among which a tuned round chooses."""

_DEVICES = 50
_COUNTS = 5, 20
"""Devices of a round, few and many."""
_LEAST_HALF, _MOST_HALF = 1.0, 20.0
_SEEDS = range(100, 102)
_ROUNDS = 100


@dataclass(frozen=True)
class Measured:
    """What the proxy has shown.

    Attributes:
        batches: samples needed with each batch.
        efforts: what a round brings by its local epochs.
    """

    batches: BatchEfficiency
    efforts: Efforts


def measured(task: str, folder: Path) -> Measured:
    """What the proxy of a task shows: from the folder, or found now and kept there."""
    kept = folder / f"proxy-{task}.json"
    if not kept.exists():
        proxy, whole = PROXIES[task](), TASKS[task]()
        devices = max(max(_COUNTS), round(_DEVICES * len(proxy.train[1]) / len(whole.train[1])))
        few, many = _COUNTS
        rounds = {
            "batches": {
                batch: rounds_to_target(proxy, devices, few, LocalWork(LOCAL_EPOCHS, batch)) for batch in BATCHES
            },
            "epochs": {
                epochs: [rounds_to_target(proxy, devices, count, LocalWork(epochs)) for count in (few, many)]
                for epochs in EPOCHS
            },
        }
        folder.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(rounds) + "\n", encoding="utf-8")
    found = json.loads(kept.read_text(encoding="utf-8"))
    by_batch = {int(batch): runs for batch, runs in found["batches"].items()}
    return Measured(
        BatchEfficiency.from_runs(task, by_batch, "federated rounds on a proxy"),
        efforts_of({float(epochs): (_mean(few), _mean(many)) for epochs, (few, many) in found["epochs"].items()}),
    )


def efforts_of(rounds: Mapping[float, tuple[float, float]]) -> Efforts:
    """The efforts behind rounds to a target with a few and with many devices.

    With `k` devices, the rounds are `c * (1 + h / k)`, as `Progress` has it. Two numbers of devices give `c` and `h`.

    Args:
        rounds: by the local epochs, with each of the two numbers of devices.
    """
    few, many = _COUNTS
    all_devices, half = {}, {}
    for epochs, (with_few, with_many) in rounds.items():
        per_device = max(0.0, (with_few - with_many) / (1 / few - 1 / many))  # c * h
        all_devices[epochs] = max(with_many - per_device / many, 1e-9)
        half[epochs] = min(max(per_device / all_devices[epochs], _LEAST_HALF), _MOST_HALF)
        all_devices[epochs] = statistics.geometric_mean(
            (with_few / (1 + half[epochs] / few), with_many / (1 + half[epochs] / many))
        )
    base = all_devices[float(LOCAL_EPOCHS)]
    return {epochs: Effort(base / all_devices[epochs], half[epochs]) for epochs in rounds}


def rounds_to_target(proxy: LearningTask, devices: int, count: int, work: LocalWork) -> list[int | None]:
    """Rounds of a uniform draw to the first target, for each of a few seeds; None if they are too many."""
    found = []
    for seed in _SEEDS:
        federation, draw = Federation(proxy, devices, seed), np.random.default_rng(seed)
        model, accuracy, rounds = federation.start, list[float](), None
        while rounds is None and len(accuracy) < _ROUNDS:
            drawn = draw.permutation(devices)[:count]
            model = federation.after(model, {int(device): work for device in drawn})
            accuracy.append(model.accuracy)
            at = reached(accuracy, proxy.targets[0])
            rounds = None if at is None else at + 1
        found.append(rounds)
    return found


def _mean(rounds: Sequence[int | None]) -> float:
    return statistics.geometric_mean(_ROUNDS if each is None else each for each in rounds)


def no_measurement() -> Measured:
    """Where nothing is tuned."""
    return Measured(BatchEfficiency("none", (BASE_BATCH,), (1.0,), (0.0,), "nothing"), FIXED_EFFORT)
