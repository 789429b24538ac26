"""Trains a task's model with PyTorch; import this module only where PyTorch is needed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from reference_models.proxy.proxy_task import ProxyTask

_TEST_CHUNK = 1024
"""Number of samples that are tested at a time, so that the test data does not determine the peak memory."""


class TorchLearner:
    """A task's model with its optimizer; the same arguments give the same training on a CPU.

    All batches of a seed see the same sequence of samples: one shuffled pass over the data after the other. A minibatch
    may span two passes.

    Args:
        task: the model, data and optimizer.
        batch: samples in a minibatch.
        seed: of the initial model, the order of samples, and the model's own randomness such as dropout.
        scaled: whether the learning rate is scaled with the batch.
        device: where to train; by default a CUDA GPU if there is one, otherwise the CPU.
    """

    def __init__(
        self, task: ProxyTask, batch: int, seed: int, scaled: bool = True, device: torch.device | None = None
    ) -> None:
        self._device = device or default_device()
        torch.manual_seed(seed)
        self._model = task.make_model(seed).to(self._device)
        self._optimizer = _optimizer(task, self._model, task.learning_rate(batch, scaled))
        self._x, self._y = (part.to(self._device) for part in task.train)
        self._test = [part.to(self._device) for part in task.test]
        self._minibatches = _minibatches(len(self._x), batch, seed)

    def train_minibatch(self) -> None:
        """Train one minibatch with the cross-entropy loss."""
        chosen = next(self._minibatches).to(self._device)
        self._model.train()
        self._optimizer.zero_grad()
        logits = self._model(self._x[chosen])
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), self._y[chosen].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    @torch.no_grad()
    def accuracy(self) -> float:
        """The share of correct labels in the test data; NaN if a logit is not finite."""
        self._model.eval()
        right = torch.zeros((), dtype=torch.float64, device=self._device)
        tested_x, tested_y = self._test
        for first in range(0, len(tested_x), _TEST_CHUNK):
            y = tested_y[first : first + _TEST_CHUNK]
            logits = self._model(tested_x[first : first + _TEST_CHUNK])
            right += (logits.argmax(-1) == y).sum() if logits.isfinite().all() else torch.nan
        return right.item() / tested_y.numel()


def default_device() -> torch.device:
    """A CUDA GPU if there is one, otherwise the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _optimizer(task: ProxyTask, model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    optimizer: torch.optim.Optimizer = kinds[task.optimizer](model.parameters(), lr=learning_rate)
    return optimizer


def _minibatches(samples: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Yield the indices of each minibatch, without end."""
    order = torch.Generator().manual_seed(seed)
    waiting = torch.empty(0, dtype=torch.int64)
    while True:
        while len(waiting) < batch:
            waiting = torch.cat([waiting, torch.randperm(samples, generator=order)])
        yield waiting[:batch]
        waiting = waiting[batch:]
