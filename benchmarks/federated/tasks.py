"""The learning tasks: data, unevenness of the split, network, and target accuracies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.images import read_images
from wattfleet.simulation.digits_app.task import digits as digits_data

Parameters = Mapping[str, Tensor]

CLASSES = 10

DATA = Path(__file__).parents[2].parent / "shared" / "data"
"""The folder of the data sets, beside the repository."""

_HIDDEN = 64
_FASHION_TRAIN, _FASHION_TEST = 6_000, 2_000


@dataclass(frozen=True)
class LearningTask:
    """The task that the devices learn.

    Attributes:
        name: the name on command lines.
        train: `[n, ...]` inputs of the network and `[n]` labels.
        test: the same, for measuring the accuracy.
        start: returns the network's initial parameters for a seed.
        logits: returns `[d, b, CLASSES]` logits of `d` networks, each for its own part of the `[d, b, ...]` inputs.
            Parameters have `d` as their first dimension.
        concentration: parameter of the Dirichlet draw that splits each class over the devices.
        targets: two accuracies on the test data, the first of which ranks the methods.
        learning_rate: learning rate of SGD with momentum and a batch size of 16.
    """

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    start: Callable[[int], Parameters]
    logits: Callable[[Parameters, Tensor], Tensor]
    concentration: float
    targets: tuple[float, float]
    learning_rate: float

    def accuracy(self, parameters: Parameters) -> float:
        """Return the share of the test data that a network classifies correctly."""
        inputs, labels = self.test
        with torch.no_grad():
            logits = self.logits({name: value[None] for name, value in parameters.items()}, inputs[None])
        return float((logits[0].argmax(dim=1) == labels).float().mean())


@cache
def digits() -> LearningTask:
    """scikit-learn's digits and a perceptron with one hidden layer."""
    (images, labels), (test_images, test_labels) = digits_data()
    return LearningTask(
        name="digits",
        train=(images.flatten(1), labels),
        test=(test_images.flatten(1), test_labels),
        start=_start({"hidden": lambda: nn.Linear(64, _HIDDEN), "output": lambda: nn.Linear(_HIDDEN, CLASSES)}),
        logits=_perceptron,
        concentration=0.5,
        targets=(0.90, 0.93),
        learning_rate=0.05,
    )


@cache
def fashion() -> LearningTask:
    """A subset of Fashion-MNIST, averaged to 14 x 14 pixels, and a small convolutional network."""
    return _small_images("fashion", "fashion_mnist", (0.70, 0.75))


@cache
def digits_proxy() -> LearningTask:
    """Half of the digits, as proxy data on which a server measures the efficiency of batch sizes."""
    whole = digits()
    return replace(whole, name="half of the digits", train=(whole.train[0][::2], whole.train[1][::2]))


@cache
def fashion_proxy() -> LearningTask:
    """MNIST with the network of `fashion`."""
    return _small_images("MNIST", "mnist", (0.85, 0.90))


TASKS: Mapping[str, Callable[[], LearningTask]] = {"digits": digits, "fashion": fashion}
"""The tasks by name."""

PROXIES: Mapping[str, Callable[[], LearningTask]] = {"digits": digits_proxy, "fashion": fashion_proxy}
"""The proxy tasks on which a server measures the efficiency of batch sizes, by the name of the task."""


def _small_images(name: str, stem: str, targets: tuple[float, float]) -> LearningTask:
    train, test = read_images(
        DATA / f"{stem}.npz",
        f"shared/data/{stem}.npz is missing beside the repository: put the data set there, or use --task digits",
    )
    chosen = np.random.default_rng(0).permutation(len(train.x))[:_FASHION_TRAIN]
    return LearningTask(
        name=name,
        train=(patches(_unit(train.x[chosen])), torch.from_numpy(train.y[chosen])),
        test=(patches(_unit(test.x[:_FASHION_TEST])), torch.from_numpy(test.y[:_FASHION_TEST])),
        start=_start(
            {
                "first": lambda: nn.Linear(16, 8),
                "second": lambda: nn.Linear(4 * 8, 16),
                "output": lambda: nn.Linear(16 * 16, CLASSES),
            }
        ),
        logits=convolutional,
        concentration=0.3,
        targets=targets,
        learning_rate=0.05,
    )


def _unit(images: NDArray[np.uint8]) -> np.ndarray:
    """Scale grey values to 0 to 1."""
    return images.astype(np.float32) / 255


def patches(images: np.ndarray) -> Tensor:
    """Return `[n, 64, 16]` patches of 4 x 4 pixels at stride 2, of `[n, 28, 28]` images averaged to 14 x 14.

    With them the first convolution is a matrix product.
    """
    small = nn.functional.avg_pool2d(torch.from_numpy(images)[:, None], 2)
    return nn.functional.unfold(small, kernel_size=4, stride=2, padding=2).mT.contiguous()


def _start(layers: Mapping[str, Callable[[], nn.Module]]) -> Callable[[int], Parameters]:
    def start(seed: int) -> Parameters:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            network = nn.ModuleDict({name: layer() for name, layer in layers.items()})
        return {name: value.detach() for name, value in network.named_parameters()}

    return start


def _linear(parameters: Parameters, layer: str, inputs: Tensor) -> Tensor:
    return torch.baddbmm(parameters[f"{layer}.bias"].unsqueeze(1), inputs, parameters[f"{layer}.weight"].mT)


def _perceptron(parameters: Parameters, images: Tensor) -> Tensor:
    return _linear(parameters, "output", _linear(parameters, "hidden", images).relu())


def convolutional(parameters: Parameters, inputs: Tensor) -> Tensor:
    """Two convolutions of stride 2, of 4 x 4 and 2 x 2 pixels, and a linear layer; `inputs` is `[d, b, 64, 16]`."""
    d, b = inputs.shape[:2]
    first = _linear(parameters, "first", inputs.reshape(d, b * 64, 16)).relu()
    # [d, b, 4, 2, 4, 2, 8]: each 2 x 2 block of the 8 x 8 positions is one input of the second convolution.
    blocks = first.view(d, b, 4, 2, 4, 2, 8).transpose(3, 4).reshape(d, b * 16, 32)
    second = _linear(parameters, "second", blocks).relu()
    return _linear(parameters, "output", second.view(d, b, 16 * 16))
