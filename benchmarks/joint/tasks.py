"""The training tasks: two small image networks on two data sets each, and a small transformer on two texts.

The images are Fashion-MNIST and MNIST, average-pooled to 14 x 14. The texts are Python's documentation, which is part
of CPython (`pydoc_data`), and licences, which are part of Debian (`/usr/share/common-licenses`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from benchmarks.images import read_images
from wattfleet.core.errors import InvalidInputError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from reference_models.proxy.proxy_task import ProxyTask

LICENCES = Path("/usr/share/common-licenses")
_LICENCE_NAMES = ("GPL-3", "GFDL-1.3", "LGPL-2.1", "MPL-1.1", "Apache-2.0", "Artistic")

_TRAIN_IMAGES, _TEST_IMAGES = 12_000, 1_000
_CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
_LENGTH = 32
_TRAIN_SEQUENCES, _TEST_SEQUENCES = 3_200, 200
_BASE_BATCH = 32


@dataclass(frozen=True)
class BenchmarkTask:
    """A network, its data set, and when its training ends.

    Attributes:
        network: `resnet`, `mobilenet` or `transformer`.
        data: the data set.
        target_accuracy: the accuracy that a run has to reach.
        evaluate_every: number of trained samples between two evaluations.
        max_samples: maximum number of samples that a run trains.
        base_lr: the learning rate of AdamW for a batch size of 32.
    """

    network: str
    data: str
    target_accuracy: float
    evaluate_every: int
    max_samples: int
    base_lr: float

    @property
    def name(self) -> str:
        """The name in results."""
        return f"{self.network}-{self.data}"

    @property
    def proxy(self) -> str:
        """The name of the task with the same network and another data set."""
        (other,) = (each.name for each in TASKS if each.network == self.network and each.data != self.data)
        return other

    def proxy_task(self, data: Path) -> ProxyTask:
        """Return the task in the form that can be trained.

        Args:
            data: the folder of the images.

        Raises:
            InvalidInputError: the data set is missing.
        """
        from reference_models.proxy.proxy_task import ProxyTask

        train, test = _texts(self.data) if self.network == "transformer" else _images(data / _FILES[self.data])
        return ProxyTask(self.name, _NETWORKS[self.network], train, test, "adamw", self.base_lr, _BASE_BATCH)


_FILES = {"fashion": "fashion_mnist.npz", "mnist": "mnist.npz"}

TASKS = (
    BenchmarkTask("resnet", "fashion", 0.77, 512, 48_000, 2e-3),
    BenchmarkTask("resnet", "mnist", 0.92, 512, 48_000, 2e-3),
    BenchmarkTask("mobilenet", "fashion", 0.75, 512, 48_000, 3e-3),
    BenchmarkTask("mobilenet", "mnist", 0.85, 512, 48_000, 3e-3),
    BenchmarkTask("transformer", "docs", 0.375, 512, 48_000, 4e-3),
    BenchmarkTask("transformer", "licences", 0.33, 512, 48_000, 4e-3),
)


def _resnet(seed: int) -> nn.Module:
    import torch

    from benchmarks.joint.networks import residual_network

    torch.manual_seed(seed)
    return residual_network(10)


def _mobilenet(seed: int) -> nn.Module:
    import torch

    from benchmarks.joint.networks import separable_network

    torch.manual_seed(seed)
    return separable_network(10)


def _transformer(seed: int) -> nn.Module:
    import torch

    from benchmarks.joint.networks import CausalTransformer

    torch.manual_seed(seed)
    return CausalTransformer(len(_CHARACTERS), _LENGTH)


_NETWORKS: Mapping[str, Callable[[int], nn.Module]] = {
    "resnet": _resnet,
    "mobilenet": _mobilenet,
    "transformer": _transformer,
}


def _images(path: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the first images for training and for testing, standardised, with their labels."""
    import torch

    held = read_images(path, f"{path} does not exist: give the folder of the images with --data")
    train, test = (
        (torch.tensor(pooled(images.x[:count]))[:, None], torch.tensor(images.y[:count]))
        for images, count in zip(held, (_TRAIN_IMAGES, _TEST_IMAGES), strict=True)
    )
    return train, test


def pooled(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Average `[n, 28, 28]` grey values to `[n, 14, 14]` means of 2 x 2 pixels, scaled to -1 to 1."""
    n, height, width = images.shape
    means = images.reshape(n, height // 2, 2, width // 2, 2).mean(axis=(2, 4))
    return np.asarray(means / 127.5 - 1, dtype=np.float32)


def _texts(name: str) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return sequences of the first four fifths of a text for training, and of the rest for testing."""
    import torch

    text = _docs() if name == "docs" else _licences()
    known = np.array([_CHARACTERS.index(each) for each in text if each in _CHARACTERS], dtype=np.int64)
    split = len(known) * 4 // 5
    train, test = (
        sequences(part, count, _LENGTH)
        for part, count in ((known[:split], _TRAIN_SEQUENCES), (known[split:], _TEST_SEQUENCES))
    )
    return (torch.tensor(train[0]), torch.tensor(train[1])), (torch.tensor(test[0]), torch.tensor(test[1]))


def sequences(text: NDArray[np.int64], count: int, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return `[count, length]` characters at evenly spaced positions of a text, and the next character of each."""
    starts = np.linspace(0, len(text) - length - 1, count).astype(np.int64)
    places = starts[:, None] + np.arange(length)
    return text[places], text[places + 1]


def _docs() -> str:
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    return "\n".join(topics[name] for name in sorted(topics))


def _licences() -> str:
    missing = [name for name in _LICENCE_NAMES if not (LICENCES / name).is_file()]
    if missing:
        raise InvalidInputError(f"{LICENCES} lacks {', '.join(missing)}: train this task on a Debian system")
    return "\n".join((LICENCES / name).read_text(encoding="utf-8") for name in _LICENCE_NAMES)
