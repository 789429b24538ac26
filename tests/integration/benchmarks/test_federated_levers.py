"""The parameters that the benchmark of federated rounds tunes besides modes: batch sizes and local epochs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.federated import tasks
from benchmarks.federated.boards import BASE_BATCH, open_board, truth, units
from benchmarks.federated.efficiency import epoch_choice_of
from benchmarks.federated.learning import Federation, LocalWork
from benchmarks.federated.methods import Planned
from benchmarks.federated.tuning import TUNES
from wattfleet.choosing import BatchEfficiency
from wattfleet.errors import InvalidInputError
from wattfleet.planning import EpochChoice, History, Offer
from wattfleet.planning.policies import Progress

EQUAL = BatchEfficiency("all alike", (8, 16, 32, 64), (1.0,) * 4, (0.0,) * 4, "assumed")


def test_normalised_average_weighs_updates_per_epoch() -> None:
    federation = Federation(tasks.digits(), devices=20, seed=3)
    work = {1: LocalWork(1, 8), 4: LocalWork(4, 16), 7: LocalWork(2, 32)}
    start = federation.start.parameters
    after = federation.after(federation.start, work, normalised=True).parameters

    samples = {device: federation.samples[device] for device in work}
    mean_epochs = (1 + 4 + 2) / 3
    alone = {device: federation.after(federation.start, {device: each}).parameters for device, each in work.items()}
    for name, value in after.items():
        per_epoch = sum(
            samples[k] / sum(samples.values()) * (alone[k][name] - start[name]) / work[k].epochs for k in work
        )
        torch.testing.assert_close(value, start[name] + mean_epochs * per_epoch, rtol=1e-4, atol=1e-6)


def test_part_of_an_epoch_is_fewer_minibatches() -> None:
    assert LocalWork(2, 16).steps(40) == 6
    assert LocalWork(0.5, 16).steps(40) == 2
    assert LocalWork(0.01, 16).steps(40) == 1


def test_a_proxy_shows_how_many_devices_a_round_needs() -> None:
    def rounds(progress: float, half: float) -> tuple[float, float]:
        return 100 / progress * (1 + half / 5 * 45 / 49), 100 / progress * (1 + half / 20 * 30 / 49)

    fewest, most = epoch_choice_of({2: rounds(1, 3), 4: rounds(0.9, 3), 8: rounds(4, 9)}, 50).options
    assert (fewest.epochs, fewest.progress, fewest.half_devices) == (2, 1.0, pytest.approx(3))
    assert (most.epochs, most.progress, most.half_devices) == (8, pytest.approx(4), pytest.approx(9))


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
    choice = EpochChoice.of({2: 1.0, 8: 2.0})
    chosen = [
        Planned(offers, Progress(overhead_s=overhead_s), 40.0, choice).plan(1, History()) for overhead_s in (0, 1000)
    ]
    assert [[job.epochs for job in jobs] for jobs in chosen] == [[2.0], [8.0]]


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


@pytest.mark.parametrize("tune", TUNES)
def test_every_tuning_is_compared_with_presets(tune: str) -> None:
    assert {"presets", "presets-equal"} <= set(TUNES[tune])
    assert {"fedbuff", "quorum", "oracle-fedbuff", "oracle-quorum"} <= set(TUNES[tune]) or tune not in {"async", "all"}
