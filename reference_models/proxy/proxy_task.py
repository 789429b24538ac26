"""The task that a server trains: a model, a proxy data set and an optimizer."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor, nn

from wattfleet.common.named_functions import import_function
from wattfleet.core.choosing import scaled_learning_rate
from wattfleet.core.errors import InvalidInputError

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
        """The learning rate for a batch, see `wattfleet.core.choosing.scaled_learning_rate`.

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


# --- Torch learner ----------------------------------------------------------------------------------------------------
# Trains a task's model with PyTorch; import this module only where PyTorch is needed.

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


# --- Shipped tasks ----------------------------------------------------------------------------------------------------
# Small tasks to try `wattfleet reference proxy` with, without data files.

SHIPPED_TASKS: Mapping[str, str] = {"digits": "reference_models.proxy.proxy_task:digits"}
"""The tasks that come with Wattfleet, by name."""

_TEST_SHARE = 0.2


def digits() -> ProxyTask:
    """A perceptron of two layers on scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, trained with Adam."""
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(
        images / 16, labels, test_size=_TEST_SHARE, stratify=labels, random_state=0
    )
    return ProxyTask(
        name="digits-perceptron",
        make_model=_perceptron,
        train=(torch.tensor(x_train, dtype=torch.float32), torch.tensor(y_train)),
        test=(torch.tensor(x_test, dtype=torch.float32), torch.tensor(y_test)),
        optimizer="adam",
        base_lr=1e-3,
        base_batch=16,
    )


def _perceptron(seed: int) -> nn.Module:
    import torch
    from torch import nn

    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def load_task(spec: str) -> ProxyTask:
    """Build a task from the name of a shipped one, or from `package.module:function`.

    Raises:
        InvalidInputError: the module or function does not exist, needs arguments, or does not return a `ProxyTask`.
    """
    module_name, colon, function_name = SHIPPED_TASKS.get(spec, spec).partition(":")
    if not colon or not module_name or not function_name:
        raise InvalidInputError(
            f"unknown task {spec!r}; use one of {', '.join(SHIPPED_TASKS)}, or your own package.module:function"
        )
    function = import_function(f"task {spec}", module_name, function_name)
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise InvalidInputError(f"task {spec}: {function_name} must take no arguments: {error}") from None
    task = function()
    if not isinstance(task, ProxyTask):
        raise InvalidInputError(
            f"task {spec}: {function_name} returned a {type(task).__name__}, not a"
            " reference_models.proxy.proxy_task.ProxyTask"
        )
    return task
