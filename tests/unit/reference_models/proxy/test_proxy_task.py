"""Proxy tasks: their checks, learning rates by batch size, digests, and user-defined tasks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from reference_models.proxy.proxy_task import OptimizerName, load_task
from tests.fakes.proxy_tasks import blobs
from wattfleet.errors import InvalidInputError


@pytest.mark.parametrize(
    ("optimizer", "batch", "rate"),
    [("sgd", 32, 0.04), ("sgd", 2, 0.0025), ("adam", 32, 0.02), ("adamw", 32, 0.02), ("adam", 2, 0.005)],
)
def test_the_learning_rate_grows_with_the_batch(optimizer: OptimizerName, batch: int, rate: float) -> None:
    # The task's rate is 0.01 for a batch size of 8. 32 is 4 times that, and 2 is a quarter of it.
    assert blobs(optimizer).learning_rate(batch, scaled=True) == pytest.approx(rate)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_without_scaling_every_batch_has_the_learning_rate_of_the_task(optimizer: OptimizerName) -> None:
    assert {blobs(optimizer).learning_rate(batch, scaled=False) for batch in (1, 8, 512)} == {0.01}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"train": (torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64))}, "train has 3 samples and 2 labels"),
        ({"test": (torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))}, "test has 0 samples"),
        ({"optimizer": "lamb"}, "unknown optimizer 'lamb': use one of sgd, adam, adamw"),
        ({"base_lr": 0.0}, "base_lr must be above 0"),
        ({"base_lr": float("inf")}, "base_lr must be above 0"),
        ({"base_batch": 0}, "base_batch must be at least 1"),
    ],
)
def test_a_task_that_cannot_be_trained_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        replace(blobs(), **changed)


def test_the_digest_of_the_data_changes_with_one_label() -> None:
    task = blobs()
    labels = task.test[1].clone()
    labels[5] = 1 - labels[5]
    assert blobs().data_sha256() == task.data_sha256()
    assert replace(task, test=(task.test[0], labels)).data_sha256() != task.data_sha256()


def test_the_digest_of_the_model_changes_with_a_layer_and_not_with_its_values() -> None:
    task = blobs()
    other_values = replace(task, make_model=lambda seed: task.make_model(seed + 1))
    other_layer = replace(task, make_model=lambda seed: nn.Sequential(nn.Linear(4, 3)))
    assert other_values.model_sha256() == task.model_sha256()
    assert other_layer.model_sha256() != task.model_sha256()


def test_the_shipped_task_is_loaded_by_its_name() -> None:
    task = load_task("digits")
    assert task.name == "digits-perceptron"
    assert (len(task.train[0]), len(task.test[0])) == (1437, 360)
    assert task.make_model(0)(task.test[0]).shape == (360, 10)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("digitz", "unknown task 'digitz'; use one of digits, or your own package.module:function"),
        ("nowhere.tasks:digits", "no module nowhere.tasks; add its folder to PYTHONPATH"),
        ("tests.fakes.proxy_tasks:missing", "has no missing"),
        ("tests.fakes.proxy_tasks:__name__", "is a str, not a function"),
        ("tests.fakes.proxy_tasks:with_argument", "must take no arguments"),
        ("tests.fakes.proxy_tasks:no_task", "returned a str, not a reference_models.proxy.proxy_task.ProxyTask"),
    ],
)
def test_an_unusable_task_is_refused_by_its_name(spec: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        load_task(spec)
