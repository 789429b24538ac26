"""The demo's app learns with each of its networks, whatever the size of the minibatches."""

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

RATE = 0.05  # the app's own, for minibatches of 16


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
