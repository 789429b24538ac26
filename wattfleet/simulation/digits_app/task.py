"""The learning task: scikit-learn's digits, split unevenly over the devices, and two small networks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

MINIBATCH = 16
_CLASSES = 10
_TEST_SHARE = 0.2
# Lower is more uneven: at 0.5 and with six devices, typically half of a device's samples are from three classes.
_CONCENTRATION = 0.5
_FEWEST_SAMPLES = 2 * MINIBATCH
_SHIFTS_PER_EPOCH = 64
_MOMENTUM = 0.9


class DigitsNet(nn.Module):
    """Two convolutions and a linear layer, for `[n, 1, 8, 8]` images of 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, _CLASSES),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits, `[n, 10]`."""
        logits: Tensor = self.layers(images)
        return logits


class DigitsPerceptron(nn.Module):
    """Two linear layers, for `[n, 1, 8, 8]` images of 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, _CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        """Logits, `[n, 10]`."""
        logits: Tensor = self.layers(images)
        return logits


NETWORKS: dict[str, type[nn.Module]] = {"convolutional": DigitsNet, "perceptron": DigitsPerceptron}
"""The networks by their names in the run config."""


@cache
def digits(file: str = "") -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return training and test images and labels; the split is the same in every process.

    Args:
        file: what `save_digits` wrote; empty to read scikit-learn's data set.
    """
    if file:
        train_x, train_y, test_x, test_y = torch.load(file, weights_only=True)
        return (train_x, train_y), (test_x, test_y)
    # Imported here because it takes seconds. Processes that handle messages read the file instead.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    images = (data.images / 16.0).astype(np.float32)[:, None]
    train_x, test_x, train_y, test_y = train_test_split(
        images, data.target, test_size=_TEST_SHARE, random_state=0, stratify=data.target
    )
    return (torch.from_numpy(train_x), torch.from_numpy(train_y)), (torch.from_numpy(test_x), torch.from_numpy(test_y))


def save_digits(file: Path) -> None:
    """Write the data set for `digits`."""
    (train_x, train_y), (test_x, test_y) = digits()
    torch.save([train_x, train_y, test_x, test_y], file)


def partitions(
    labels: NDArray[np.int_], devices: int, seed: int, concentration: float = _CONCENTRATION
) -> list[NDArray[np.intp]]:
    """Split samples over devices, with one Dirichlet draw per class (Hsu et al., arXiv 1909.06335).

    Args:
        labels: `[n]` class of each sample.
        devices: number of parts.
        seed: random seed of the draws.
        concentration: parameter of the Dirichlet draw; lower is more uneven.

    Returns:
        The indices of each device's samples. Every sample is in exactly one part, and every part is large enough to
        train.
    """
    generator = np.random.default_rng(seed)
    while True:
        parts: list[list[int]] = [[] for _ in range(devices)]
        for label in np.unique(labels):
            members = generator.permutation(np.flatnonzero(labels == label))
            shares = generator.dirichlet(np.full(devices, concentration))
            cuts = (np.cumsum(shares)[:-1] * len(members)).astype(int)
            for part, some in zip(parts, np.split(members, cuts), strict=True):
                part.extend(some.tolist())
        if min(map(len, parts)) >= min(_FEWEST_SAMPLES, len(labels) // (2 * devices)):
            return [np.array(sorted(part), dtype=np.intp) for part in parts]


def sample_counts(devices: int, seed: int) -> list[int]:
    """Return how many training samples each device holds."""
    labels = digits()[0][1].numpy()
    return [len(part) for part in partitions(labels, devices, seed)]


def device_data(partition: int, devices: int, seed: int, file: str = "") -> tuple[Tensor, Tensor]:
    """Return one device's images and labels. The file is the same as for `digits`."""
    images, labels = digits(file)[0]
    index = torch.from_numpy(partitions(labels.numpy(), devices, seed)[partition])
    return images[index], labels[index]


def minibatches_per_epoch(samples: int, batch_size: int, passes: float = 1.0) -> int:
    """Return how many minibatches an epoch of `Minibatches` has.

    Args:
        samples: digits that the device holds.
        batch_size: samples in a minibatch.
        passes: passes over the digits and their shifts in an epoch.
    """
    return -(-_shown(samples, passes) // batch_size)


def _shown(samples: int, passes: float) -> int:
    return max(1, round(passes * _SHIFTS_PER_EPOCH * samples))


class Minibatches:
    """A device's digits in minibatches, reshuffled for each epoch.

    An epoch shows each digit several times, each time shifted by up to a pixel. The boards' modes are measured during
    training, and a measurement takes hundreds of minibatches.

    Args:
        data: images and labels.
        batch_size: samples in a minibatch.
        seed: random seed of the order.
        passes: passes over the digits and their shifts in an epoch.
    """

    def __init__(self, data: tuple[Tensor, Tensor], batch_size: int, seed: int, passes: float = 1.0) -> None:
        self._images, self._labels = data
        self._samples = _shown(len(self._images), passes)
        self._length = minibatches_per_epoch(len(self._images), batch_size, passes)
        self.batch_size = batch_size
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        count = len(self._images)
        for chosen in torch.randperm(self._samples, generator=self._generator).split(self.batch_size):
            down, right = torch.randint(-1, 2, (2,), generator=self._generator).tolist()
            yield self._images[chosen % count].roll((down, right), dims=(2, 3)), self._labels[chosen % count]


def scaled_learning_rate(learning_rate: float, batch_size: int) -> float:
    """Return the learning rate for a minibatch size, in proportion to it (Goyal et al., arXiv 1706.02677, section 2.1).

    Args:
        learning_rate: learning rate for minibatches of `MINIBATCH` samples.
        batch_size: samples in a minibatch.
    """
    return learning_rate * batch_size / MINIBATCH


def train(network: nn.Module, epochs: Sequence[Iterable[tuple[Tensor, Tensor]]], learning_rate: float) -> float:
    """Train in place by gradient descent with momentum, and return the mean loss of the last epoch.

    Args:
        network: the network.
        epochs: the minibatches of each epoch.
        learning_rate: step size.
    """
    # Torch's optimizers import its compiler, which takes seconds in a new process.
    parameters = list(network.parameters())
    velocities = [torch.zeros_like(parameter) for parameter in parameters]
    network.train()
    loss_sum = samples = 0.0
    for epoch in epochs:
        loss_sum = samples = 0.0
        for images, labels in epoch:
            loss = nn.functional.cross_entropy(network(images), labels)
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for parameter, velocity, gradient in zip(parameters, velocities, gradients, strict=True):
                    velocity.mul_(_MOMENTUM).add_(gradient)
                    parameter.sub_(velocity, alpha=learning_rate)
            loss_sum += loss.item() * len(labels)
            samples += len(labels)
    return loss_sum / samples


def evaluate(network: nn.Module, file: str = "") -> tuple[float, float]:
    """Return loss and accuracy on the test images. The file is the same as for `digits`."""
    images, labels = digits(file)[1]
    network.eval()
    with torch.no_grad():
        logits = network(images)
        loss = nn.functional.cross_entropy(logits, labels).item()
    return loss, float((logits.argmax(dim=1) == labels).float().mean())
