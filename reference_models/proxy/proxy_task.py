"""The task that a server trains: a model, a proxy data set and an optimizer."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from wattfleet.choosing import scaled_learning_rate
from wattfleet.errors import InvalidInputError

if TYPE_CHECKING:
    from torch import Tensor, nn

OptimizerName = Literal["sgd", "adam", "adamw"]
"""The optimizers that a task can be trained with; `sgd` is without momentum."""


@dataclass(frozen=True)
class ProxyTask:
    """A classification task. Each sample has one label, or one label for each position of a sequence.

    Attributes:
        name: names the model and the data in results.
        make_model: returns the initial model for a seed, freshly initialised or pretrained. It maps a minibatch of `x`
            to logits, `[n, classes]` or `[n, length, classes]`.
        train: the proxy training data: `x`, whose first dimension counts samples, and the labels, `[n]` or
            `[n, length]`, integers.
        test: the data that the accuracy is measured on, in the same form.
        optimizer: the optimizer that devices use.
        base_lr: the learning rate that was chosen for `base_batch`.
        base_batch: the batch that `base_lr` was chosen for.

    Raises:
        InvalidInputError: the data is empty or does not match its labels, the optimizer is unknown, or the learning
            rate or the batch is not positive.
    """

    name: str
    make_model: Callable[[int], nn.Module]
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    optimizer: OptimizerName
    base_lr: float
    base_batch: int

    def __post_init__(self) -> None:
        for kind, (x, y) in (("train", self.train), ("test", self.test)):
            if len(x) == 0 or len(x) != len(y):
                raise InvalidInputError(
                    f"task {self.name}: {kind} has {len(x)} samples and {len(y)} labels: give one label for each"
                    " sample, and at least one sample"
                )
        if self.optimizer not in get_args(OptimizerName):
            raise InvalidInputError(
                f"task {self.name}: unknown optimizer {self.optimizer!r}: use one of"
                f" {', '.join(get_args(OptimizerName))}"
            )
        if not (math.isfinite(self.base_lr) and self.base_lr > 0):
            raise InvalidInputError(f"task {self.name}: base_lr must be above 0, not {self.base_lr}")
        if self.base_batch < 1:
            raise InvalidInputError(f"task {self.name}: base_batch must be at least 1, not {self.base_batch}")

    def learning_rate(self, batch: int, scaled: bool) -> float:
        """The learning rate for a batch, see `wattfleet.choosing.scaled_learning_rate`.

        Args:
            batch: samples in a minibatch.
            scaled: False gives `base_lr` for every batch.
        """
        return scaled_learning_rate(self.base_lr, self.base_batch, batch, self.optimizer if scaled else "none")

    def data_sha256(self) -> str:
        """A digest of the training and the test data, in hexadecimal digits."""
        digest = hashlib.sha256()
        for tensor in (*self.train, *self.test):
            values = tensor.numpy(force=True)
            digest.update(f"{values.dtype} {values.shape}".encode())
            digest.update(values.tobytes())
        return digest.hexdigest()

    def model_sha256(self) -> str:
        """A digest of the names and shapes of the model's parameters and buffers, in hexadecimal digits."""
        shapes = [f"{name} {tuple(tensor.shape)}" for name, tensor in self.make_model(0).state_dict().items()]
        return hashlib.sha256("\n".join(shapes).encode()).hexdigest()
