"""The model, the data and the training, without any federated code."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier
from sklearn.metrics import log_loss

from wattfleet.flower import profiled, until_deadline

DIGITS = np.arange(10)
PIXELS = 64
TEST_IMAGES = 360

Data = tuple[np.ndarray, np.ndarray]


class Batches:
    """The minibatches of a data set, in a new order in every epoch."""

    def __init__(self, data: Data, batch_size: int) -> None:
        self.images, self.labels = data
        self.batch_size = batch_size
        self._rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return -(-len(self.labels) // self.batch_size)

    def __iter__(self) -> Iterator[Data]:
        order = self._rng.permutation(len(self.labels))
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            yield self.images[batch], self.labels[batch]


def new_model(learning_rate: float = 0.01) -> SGDClassifier:
    """Logistic regression of `[n, 64]` images, with all weights zero."""
    model = SGDClassifier(loss="log_loss", learning_rate="constant", eta0=learning_rate, random_state=0)
    model.classes_ = DIGITS
    set_weights(model, [np.zeros((len(DIGITS), PIXELS)), np.zeros(len(DIGITS))])
    return model


def weights_of(model: SGDClassifier) -> list[np.ndarray]:
    """Coefficients `[10, 64]` and intercepts `[10]`."""
    return [model.coef_, model.intercept_]


def set_weights(model: SGDClassifier, weights: list[np.ndarray]) -> None:
    """Set coefficients `[10, 64]` and intercepts `[10]`."""
    model.coef_, model.intercept_ = (np.array(each) for each in weights)


@cache
def digits() -> tuple[Data, Data]:
    """Training and test images; every process makes the same split."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images, labels = data.data[order] / 16.0, data.target[order]
    return (images[TEST_IMAGES:], labels[TEST_IMAGES:]), (images[:TEST_IMAGES], labels[:TEST_IMAGES])


def load_data(partition_id: int, num_partitions: int, batch_size: int) -> Batches:
    """One node's share of the training images."""
    images, labels = digits()[0]
    return Batches((images[partition_id::num_partitions], labels[partition_id::num_partitions]), batch_size)


def train(model: SGDClassifier, batches: Batches, epochs: int) -> float:
    """Train in place, and return the loss after the last epoch."""
    for _ in range(epochs):
        for images, labels in until_deadline(profiled(batches)):
            model.partial_fit(images, labels, classes=DIGITS)
    return float(log_loss(batches.labels, model.predict_proba(batches.images), labels=DIGITS))


def test(model: SGDClassifier) -> tuple[float, float, int]:
    """Loss and accuracy on the held-out test images, and their number."""
    images, labels = digits()[1]
    loss = log_loss(labels, model.predict_proba(images), labels=DIGITS)
    return float(loss), float(model.score(images, labels)), len(labels)
