"""What the benchmark of federated rounds tunes besides modes: batches, shares of work, and local epochs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.federated import tasks
from benchmarks.federated.boards import BASE_BATCH, open_board, truth, units
from benchmarks.federated.efficiency import efforts_of
from benchmarks.federated.learning import MOMENTUM, Federation, LocalWork
from benchmarks.federated.work import SHARES, ChosenEpochs, Effort, most_progress
from wattfleet.choosing import BatchEfficiency
from wattfleet.errors import InvalidInputError
from wattfleet.planning import History, Offer

EQUAL = BatchEfficiency("all alike", (8, 16, 32, 64), (1.0,) * 4, (0.0,) * 4, "assumed")


def distance(steps: int) -> float:
    """How far momentum carries along a gradient of 1, step by step."""
    velocity = position = 0.0
    for _ in range(steps):
        velocity = MOMENTUM * velocity + 1
        position += velocity
    return position


def test_normalised_average_weighs_mean_steps() -> None:
    federation = Federation(tasks.digits(), devices=20, seed=3)
    work = {1: LocalWork(1, 8), 4: LocalWork(4, 16), 7: LocalWork(2, 32)}
    start = federation.start.parameters
    after = federation.after(federation.start, work, normalised=True).parameters

    share = np.array([federation.samples[device] for device in work], dtype=float)
    share /= share.sum()
    rate = tasks.digits().learning_rate
    moved = np.array(
        [rate * each.batch / 16 * distance(each.steps(federation.samples[device])) for device, each in work.items()]
    )
    alone = [federation.after(federation.start, {device: each}).parameters for device, each in work.items()]
    for name, value in after.items():
        steps: list[Tensor] = [(own[name] - start[name]) / float(far) for own, far in zip(alone, moved, strict=True)]
        mean = sum(float(part) * step for part, step in zip(share, steps, strict=True))
        torch.testing.assert_close(value, start[name] + float(share @ moved) * mean, rtol=1e-4, atol=1e-6)


def test_part_of_an_epoch_is_fewer_minibatches() -> None:
    assert LocalWork(2, 16).steps(40) == 6
    assert LocalWork(0.5, 16).steps(40) == 2
    assert LocalWork(0.01, 16).steps(40) == 1


@pytest.mark.parametrize("seed", range(6))
def test_shares_of_work_are_close_to_the_best_of_all(seed: int) -> None:
    draw = np.random.default_rng(seed)
    devices, half, spare_w = 4, 3.0, 30.0
    extra_w = np.sort(draw.uniform(2, 20, (len(SHARES), devices)), axis=0)
    worth = draw.uniform(0.5, 1.5, devices)
    value = np.array(SHARES)[:, None] ** 1.5 * np.ones(devices)
    level, progress = most_progress(extra_w, value, worth, spare_w, half)

    def progress_of(levels: tuple[int, ...]) -> float:
        chosen = [k for k in range(devices) if levels[k] >= 0]
        if not chosen or sum(extra_w[levels[k], k] for k in chosen) > spare_w:
            return 0.0
        total = float(worth[chosen].sum())
        scale = min(1.0, len(chosen) / total)
        return float(scale * sum(worth[k] * value[levels[k], k] for k in chosen) / (scale * total + half))

    best = max(map(progress_of, product(range(-1, len(SHARES)), repeat=devices)))
    assert progress == pytest.approx(progress_of(tuple(level.tolist())))
    assert progress >= 0.85 * best


def test_a_proxy_shows_how_many_devices_a_round_needs() -> None:
    def rounds(progress: float, half: float) -> tuple[float, float]:
        return 100 / progress * (1 + half / 5), 100 / progress * (1 + half / 20)

    found = efforts_of({2.0: rounds(1, 3), 8.0: rounds(4, 9)})
    assert found[2.0].half_devices == pytest.approx(3)
    assert found[8.0].half_devices == pytest.approx(9)
    assert found[8.0].progress == pytest.approx(4)


def test_batches_on_the_front_never_exceed_what_the_data_allow() -> None:
    (unit,) = units({"orin-nano": 1}, modes=6)
    device = open_board(unit)
    known = truth(device, device.modes[::20])
    wide, narrow = known.batch_front(1600, 64, EQUAL), known.batch_front(1600, 20, EQUAL)
    assert wide.batch is not None and narrow.batch is not None
    assert wide.batch.max() == 64
    assert set(narrow.batch.tolist()) <= {8, BASE_BATCH}
    base = known.front(100)
    for epoch_s, planned_w in zip(base.one_epoch_s, base.planned_w, strict=True):
        # Fronts are thinned to 64 points.
        assert wide.one_epoch_s[wide.planned_w <= planned_w * 1.02].min() <= epoch_s


def test_more_epochs_are_chosen_where_rounds_have_a_high_overhead() -> None:
    (unit,) = units({"orin-nano": 1}, modes=6)
    device = open_board(unit)
    offers = [Offer("a", truth(device, device.modes[::20]).front(20), 5.0)]
    planner = ChosenEpochs(offers, 40.0, {2.0: Effort(), 8.0: Effort(progress=2.0)}, overhead_s=0.0)
    (job,) = planner.plan(1, History())
    (long,) = replace(planner, overhead_s=1000.0).plan(1, History())
    assert (job.epochs, long.epochs) == (2.0, 8.0)


def test_networks_side_by_side_compute_what_convolutions_do() -> None:
    torch.manual_seed(0)
    first, second, output = nn.Conv2d(1, 8, 4, 2, padding=2), nn.Conv2d(8, 16, 2, 2), nn.Linear(256, 10)
    images = torch.rand(3, 28, 28)
    small = nn.functional.avg_pool2d(images[:, None], 2)
    found = second(first(small).relu()).relu()
    expected = output(found.permute(0, 2, 3, 1).flatten(1))
    assert first.bias is not None and second.bias is not None
    parameters = {
        "first.weight": first.weight.flatten(1),
        "first.bias": first.bias,
        "second.weight": second.weight.permute(0, 2, 3, 1).flatten(1),
        "second.bias": second.bias,
        "output.weight": output.weight,
        "output.bias": output.bias,
    }
    stacked = {name: value[None] for name, value in parameters.items()}
    patches = tasks.patches(images.numpy())
    torch.testing.assert_close(tasks.convolutional(stacked, patches[None])[0], expected)


def test_a_missing_data_set_is_told_with_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tasks, "DATA", tmp_path)
    tasks.fashion.cache_clear()
    with pytest.raises(InvalidInputError, match=r"fashion_mnist.npz is missing .* --task digits"):
        tasks.fashion()
