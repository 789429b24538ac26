"""The shipped workloads: networks of the stated size that can be trained."""

from __future__ import annotations

import importlib
import itertools

import pytest

from edge_agent.workloads.loading import SHIPPED, open_workload
from wattfleet.errors import InvalidInputError

torch = pytest.importorskip("torch", reason="the shipped workloads train with torch")

PARAMETERS = {"resnet18": 11_689_512, "mobilenet": 5_483_032, "lstm": 6_238_210, "bert": 28_301_314}


def shipped(name):
    return importlib.import_module(SHIPPED[name].partition(":")[0])


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_networks_have_the_size_they_are_said_to_have(name):
    assert sum(p.numel() for p in shipped(name).network().parameters()) == pytest.approx(PARAMETERS[name], rel=0.01)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_workloads_train_and_tell_waiting_from_computing(name):
    steps = getattr(shipped(name), name)(minibatch=2, device="cpu", workers=0)
    for times in itertools.islice(steps, 2):
        assert times.fetch_stall_ms > 0 and times.compute_ms > 0
    steps.close()


def test_training_changes_the_network_with_every_minibatch():
    loop = importlib.import_module("edge_agent.workloads.loop")
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    samples = loop.SyntheticSamples(lambda generator: (torch.rand(4, generator=generator), torch.tensor(1)))
    steps = loop.train(network, samples, 8, "cpu", workers=0)
    seen = []
    for _ in itertools.islice(steps, 3):
        seen.append(network[1].weight.detach().clone())
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])


def test_a_board_without_cuda_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with open_workload("lstm", 2, "cuda") as workload, pytest.raises(InvalidInputError, match="no CUDA device"):
        workload.step()
