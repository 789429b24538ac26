"""The counted parameters and operations of a step, compared with counts by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from wattfleet.errors import InvalidInputError
from wattfleet.modes import WorkloadFacts
from wattfleet_flower import StepCount, count_step

# A matrix product of [m, k] and [k, n] needs 2 m k n operations.
FIRST, SECOND = 2 * 8 * 10 * 20, 2 * 8 * 20 * 5


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))


def total(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.sum()


def test_inference_of_a_perceptron() -> None:
    found = count_step(perceptron(), (torch.ones(8, 10),))
    assert found == StepCount(10 * 20 + 20 + 20 * 5 + 5, FIRST + SECOND)


def test_training_of_a_perceptron() -> None:
    # Backward pass: one product for the gradient of each weight matrix, and one for that of the hidden layer.
    found = count_step(perceptron(), (torch.ones(8, 10),), total)
    assert found.step_flops == 2 * (FIRST + SECOND) + SECOND


def test_a_convolution() -> None:
    layer = nn.Conv2d(3, 4, kernel_size=3, padding=1)
    forward = 2 * (2 * 4 * 8 * 8) * (3 * 3 * 3)  # each output sums 27 products
    images = torch.ones(2, 3, 8, 8)
    assert count_step(layer, (images,)) == StepCount(4 * 27 + 4, forward)
    # Backward pass: only the gradient of the weights, since the images need none.
    assert count_step(layer, (images,), total).step_flops == 2 * forward


def test_counting_changes_neither_the_network_nor_random_numbers() -> None:
    network = nn.Sequential(nn.Linear(10, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in network.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    count_step(network, (torch.rand(8, 10, generator=torch.Generator().manual_seed(0)),), total)
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters())


def test_a_network_that_cannot_be_trained_is_refused() -> None:
    frozen = perceptron().requires_grad_(False)
    with pytest.raises(InvalidInputError, match="set requires_grad, or leave the loss out to count inference"):
        count_step(frozen, (torch.ones(8, 10),), total)
    assert count_step(frozen, (torch.ones(8, 10),)).step_flops == FIRST + SECOND


def test_the_counts_are_facts_of_a_workload() -> None:
    found = count_step(perceptron(), (torch.ones(8, 10),), total)
    facts = WorkloadFacts(batch=8, parameters=found.parameters, step_flops=found.step_flops)
    assert facts.step_flops == 2 * (FIRST + SECOND) + SECOND
