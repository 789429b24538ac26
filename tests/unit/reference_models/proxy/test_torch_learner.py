"""Training a proxy task with PyTorch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from reference_models.proxy.proxy_runs import RunEnd, RunLimits, samples_to_target
from reference_models.proxy.proxy_task import OptimizerName, ProxyTask, TorchLearner
from tests.fakes.proxy_tasks import blobs

CPU = torch.device("cpu")


def accuracies(task: ProxyTask, batch: int, seed: int, scaled: bool = True) -> list[float]:
    reported: list[float] = []
    learner = TorchLearner(task, batch, seed, scaled, CPU)
    samples_to_target(learner, batch, RunLimits(1.0, 32, 320), lambda samples, mean: reported.append(mean))
    return reported


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_training_reaches_an_accuracy_that_the_data_allows(optimizer: OptimizerName) -> None:
    end = samples_to_target(TorchLearner(blobs(optimizer), 8, 0, device=CPU), 8, RunLimits(0.9, 32, 9600))
    assert end.samples is not None
    assert end.accuracy is not None and end.accuracy >= 0.9


def test_the_same_seed_gives_the_same_training_whatever_ran_before() -> None:
    first = accuracies(blobs(), 8, seed=1)
    accuracies(blobs(), 16, seed=2)
    assert accuracies(blobs(), 8, seed=1) == first
    assert accuracies(blobs(), 8, seed=2) != first


def test_a_model_that_does_not_seed_itself_also_trains_the_same() -> None:
    unseeded = replace(blobs(), make_model=lambda seed: nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.2)))
    assert accuracies(unseeded, 8, seed=1) == accuracies(unseeded, 8, seed=1)


def test_dropout_does_not_disturb_the_accuracy() -> None:
    learner = TorchLearner(replace(blobs(), make_model=lambda seed: Dropping()), 8, 0, device=CPU)
    learner.train_minibatch()
    assert learner.accuracy() == 1


class Dropping(nn.Module):
    """A model that classifies a point by the sum of its coordinates; dropout would often change the result."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.dropout = nn.Dropout(0.9)

    def forward(self, x: Tensor) -> Tensor:
        total = self.dropout(x).sum(1)
        return self.scale * torch.stack([-total, total], 1)


def test_scaling_changes_the_training_of_batches_other_than_the_base_batch() -> None:
    assert accuracies(blobs("sgd"), 8, 0, scaled=True) == accuracies(blobs("sgd"), 8, 0, scaled=False)
    assert accuracies(blobs("sgd"), 32, 0, scaled=True) != accuracies(blobs("sgd"), 32, 0, scaled=False)


class Recorder(nn.Module):
    """A model that returns constant logits and records its training inputs."""

    def __init__(self, seen: list[Tensor]) -> None:
        super().__init__()
        self.seen = seen
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.append(x[:, 0].clone())
        return self.bias.expand(len(x), 2)


def samples_seen(batch: int, minibatches: int) -> list[float]:
    seen: list[Tensor] = []
    numbered = (torch.arange(12.0).unsqueeze(1), torch.arange(12) % 2)
    task = ProxyTask("numbered", lambda seed: Recorder(seen), numbered, numbered, "sgd", 0.1, 4)
    learner = TorchLearner(task, batch, 3, device=CPU)
    for _ in range(minibatches):
        learner.train_minibatch()
    assert {len(minibatch) for minibatch in seen} == {batch}
    return torch.cat(seen).tolist()


def test_all_batches_see_the_same_samples_in_the_same_order() -> None:
    by_twos = samples_seen(2, 20)
    # 8 does not divide the 12 samples of a pass, and all samples are used.
    assert samples_seen(8, 5) == by_twos
    assert sorted(by_twos[:12]) == sorted(by_twos[12:24]) == list(range(12))
    assert by_twos[:12] != by_twos[12:24]


def test_the_accuracy_is_the_share_of_right_labels_over_all_parts_of_the_test_data() -> None:
    # The model predicts class 0 for everything; the 2,500 samples are tested in three parts.
    labels = (torch.arange(2500) >= 1000).long()
    data = (torch.zeros(2500, 1), labels)
    task = ProxyTask("constant", lambda seed: Recorder([]), data, data, "sgd", 0.1, 4)
    assert TorchLearner(task, 4, 0, device=CPU).accuracy() == pytest.approx(0.4)


def test_a_sequence_is_scored_at_each_position() -> None:
    tokens = torch.tensor([[0, 1, 2], [2, 1, 0]])
    following = torch.tensor([[0, 1, 2], [2, 1, 1]])

    def echo(seed: int) -> nn.Module:
        return nn.Embedding.from_pretrained(10 * torch.eye(3), freeze=False)

    task = ProxyTask("echo", echo, (tokens, following), (tokens, following), "adam", 0.1, 2)
    learner = TorchLearner(task, 2, 0, device=CPU)
    learner.train_minibatch()
    assert learner.accuracy() == pytest.approx(5 / 6)


def test_a_training_that_diverges_is_noticed() -> None:
    # The product of two layers overflows once their weights are large.
    task = replace(blobs("sgd"), make_model=lambda seed: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), base_lr=1e30)
    learner = TorchLearner(task, 8, 0, device=CPU)
    assert samples_to_target(learner, 8, RunLimits(0.9, 8, 8000)) == RunEnd(None, None)
