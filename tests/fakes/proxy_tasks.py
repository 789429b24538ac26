"""Small proxy tasks, and a learner with given accuracies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from reference_models.proxy.proxy_task import OptimizerName, ProxyTask


def blobs(optimizer: OptimizerName = "adam") -> ProxyTask:
    """Two well separated clouds of 96 points, which a linear layer can separate."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(128) % 2
    points = torch.randn(128, 4, generator=generator) * 0.5 + (2 * labels - 1).unsqueeze(1)
    return ProxyTask(
        "blobs", linear, (points[:96], labels[:96]), (points[96:], labels[96:]), optimizer, base_lr=0.01, base_batch=8
    )


def linear(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.2))


def shuffled_labels() -> ProxyTask:
    """Labels that are unrelated to their points."""
    task = blobs()
    labels = torch.randint(2, (32,), generator=torch.Generator().manual_seed(1))
    return replace(task, name="shuffled labels", test=(torch.zeros(32, 4), labels))


class BeyondMemory(nn.Module):
    """Fails for minibatches of more than 16 samples, as a model does on a GPU with too little memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, points: Tensor) -> Tensor:
        if self.training and len(points) > 16:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        logits: Tensor = self.layer(points)
        return logits


def beyond_memory() -> ProxyTask:
    return replace(blobs(), name="beyond memory", make_model=lambda seed: BeyondMemory())


def with_argument(size: int) -> ProxyTask:
    raise AssertionError("it must not be called")


def no_task() -> str:
    return "blobs"


class ScriptedLearner:
    """Returns the next of the given accuracies for each test.

    Attributes:
        minibatches: number of minibatches that were trained.
        tested_after: number of trained minibatches at each test.
    """

    def __init__(self, accuracies: Sequence[float]) -> None:
        self._accuracies: Iterator[float] = iter(accuracies)
        self.minibatches = 0
        self.tested_after: list[int] = []

    def train_minibatch(self) -> None:
        self.minibatches += 1

    def accuracy(self) -> float:
        self.tested_after.append(self.minibatches)
        return next(self._accuracies)
