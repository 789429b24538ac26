"""Small tasks to try `wattfleet reference proxy` with, without data files."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING

from reference_models.proxy.proxy_task import ProxyTask
from wattfleet.errors import InvalidInputError
from wattfleet_io.named_functions import import_function

if TYPE_CHECKING:
    from torch import nn

SHIPPED_TASKS: Mapping[str, str] = {"digits": "reference_models.proxy.shipped_tasks:digits"}
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
