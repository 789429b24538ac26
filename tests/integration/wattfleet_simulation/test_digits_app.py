"""The demo's app learns with each of its networks and with any minibatch size."""

from __future__ import annotations

import pytest
import torch

from wattfleet_simulation.digits_app.task import (
    NETWORKS,
    Minibatches,
    device_data,
    evaluate,
    scaled_learning_rate,
    train,
)

RATE = 0.05  # the app's own rate, for minibatches of 16


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("batch_size", [4, 16])
def test_a_network_learns_with_small_and_large_minibatches(network: str, batch_size: int) -> None:
    torch.manual_seed(0)
    module = NETWORKS[network]()
    loader = Minibatches(device_data(0, 16, 0), batch_size, 0)
    train(module, [loader], scaled_learning_rate(RATE, batch_size))
    _, accuracy = evaluate(module)
    assert accuracy > 0.4


def test_an_epoch_shows_all_digits_equally_often_and_has_the_length_it_states() -> None:
    images, labels = device_data(0, 16, 0)
    loader = Minibatches((images, labels), 7, 0)
    batches = list(loader)
    assert len(batches) == len(loader)
    shown = torch.cat([labels for _, labels in batches]).bincount(minlength=10)
    own = labels.bincount(minlength=10)
    assert torch.equal(shown, own * (shown.sum() // own.sum()))
    assert all(shifted.shape[1:] == images.shape[1:] for shifted, _ in batches)


@pytest.mark.parametrize(("batch_size", "passes"), [(7, 0.5), (16, 1.25), (32, 2.0)])
def test_an_epoch_of_a_planned_batch_has_as_many_more_samples(batch_size: int, passes: float) -> None:
    data = device_data(0, 16, 0)
    samples = sum(len(labels) for _, labels in Minibatches(data, 16, 0))
    loader = Minibatches(data, batch_size, 0, passes)
    sizes = [len(labels) for _, labels in loader]
    assert sum(sizes) == round(passes * samples)
    assert len(loader) == len(sizes)
    assert set(sizes[:-1]) <= {batch_size}
