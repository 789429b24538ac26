"""Measures how efficient batch sizes are and how much progress local epochs make, on a server's proxy data.

The server splits its own data over imagined devices, and counts the rounds to an accuracy. This shows the effect of
local training on the average, which centralised training does not show.
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
from benchmarks.federated.jobs import FIXED_EPOCHS, LOCAL_EPOCHS
from benchmarks.federated.learning import Federation, LocalWork
from benchmarks.federated.tasks import PROXIES, TASKS, LearningTask
from wattfleet.core.choosing import BatchEfficiency
from wattfleet.core.planning import EpochChoice

EPOCHS = (2, 4, 6, 8)
"""The numbers of local epochs to choose from if they are tuned."""

_DEVICES = 50
_COUNTS = 5, 20
"""The number of devices in a round: few and many."""
_LEAST_HALF, _MOST_HALF = 1.0, 20.0
_SEEDS = range(100, 106)
_ROUNDS = 100


@dataclass(frozen=True)
class Measured:
    """The measurements on the proxy.

    Attributes:
        batches: samples needed with each batch size.
        epochs: the numbers of local epochs to choose from, and the progress of a round with each of them.
    """

    batches: BatchEfficiency
    epochs: EpochChoice


def measured(task: str, folder: Path) -> Measured:
    """Return the measurements on a task's proxy from the folder; if they are missing, measure and store them."""
    kept = folder / f"proxy-{task}.json"
    if not kept.exists():
        proxy, whole = PROXIES[task](), TASKS[task]()
        devices = max(max(_COUNTS), round(_DEVICES * len(proxy.train[1]) / len(whole.train[1])))
        few, many = _COUNTS
        rounds = {
            "devices": devices,
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
        epoch_choice_of(
            {int(epochs): (_mean(few), _mean(many)) for epochs, (few, many) in found["epochs"].items()},
            found["devices"],
        ),
    )


def epoch_choice_of(rounds: Mapping[int, tuple[float, float]], devices: int) -> EpochChoice:
    """Return the choice of epochs that explains the rounds to a target with few and with many devices.

    With `k` of `n` devices, the rounds are `c * (1 + h / k * (n - k) / (n - 1))`, as in `Progress`. Two numbers of
    devices determine `c` and `h`. Numbers of epochs that make no more progress than a smaller number are left out.

    Args:
        rounds: rounds by local epochs, for each of the two numbers of devices.
        devices: number of devices that these were drawn from.
    """
    few, many = _COUNTS
    progress, half = dict[int, float](), dict[int, float]()
    for epochs, (with_few, with_many) in sorted(rounds.items()):
        per_device = max(0.0, (with_few - with_many) / (1 / few - 1 / many))  # c * h * n / (n - 1)
        all_devices = max(with_many - per_device * (1 / many - 1 / devices), 1e-9)
        own_half = min(max(per_device * (devices - 1) / devices / all_devices, _LEAST_HALF), _MOST_HALF)
        more = [1 + own_half / count * (devices - count) / (devices - 1) for count in _COUNTS]
        brings = 1 / statistics.geometric_mean((with_few / more[0], with_many / more[1]))
        if not progress or brings > max(progress.values()):
            progress[epochs], half[epochs] = brings, own_half
    return EpochChoice.of({epochs: each / progress[min(progress)] for epochs, each in progress.items()}, half)


def rounds_to_target(proxy: LearningTask, devices: int, count: int, work: LocalWork) -> list[int | None]:
    """Return the rounds to the first target with uniformly drawn devices, by seed; None if there are too many."""
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
    """Return placeholder measurements for methods that tune nothing."""
    return Measured(BatchEfficiency("none", (BASE_BATCH,), (1.0,), (0.0,), "nothing"), FIXED_EPOCHS)
