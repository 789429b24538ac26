"""Federated averaging of the digits app in this process, without Flower, for runs in virtual time.

A round's model depends only on the devices chosen so far, so runs that make the same choices share the training.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import tomllib
import torch
from torch import Tensor, nn

from wattfleet_simulation.digits_app.task import (
    NETWORKS,
    Minibatches,
    device_data,
    evaluate,
    scaled_learning_rate,
    train,
)
from wattfleet_simulation.flower import APP_DIRECTORY
from wattfleet_simulation.settings import SimulatedApp

Parameters = Mapping[str, Tensor]


class StoppedError(Exception):
    """The training was stopped from outside."""


@dataclass(frozen=True)
class Model:
    """A state of the global model.

    Attributes:
        parameters: the network's parameters.
        accuracy: accuracy on held-out digits.
        server_round: the rounds that led to it.
        followers: the models after one more round, by the devices that train in it.
    """

    parameters: Parameters
    accuracy: float
    server_round: int = 0
    followers: dict[tuple[int, ...], Model] = field(default_factory=dict, repr=False, compare=False)


class Federation:
    """Devices that train the digits app, each on its own part of the data.

    Args:
        app: the app.
        devices: number of devices.
        seed: seed of the data split, the initial parameters and the order of minibatches, as in the app.
        data_file: the data set; see `digits`.
        stopped: ends a training once it is set.
    """

    def __init__(
        self, app: SimulatedApp, devices: int, seed: int, data_file: str = "", stopped: threading.Event | None = None
    ) -> None:
        self._app, self._devices, self._seed, self._data_file = app, devices, seed, data_file
        self._stopped = stopped or threading.Event()
        content = tomllib.loads((APP_DIRECTORY / "pyproject.toml").read_text(encoding="utf-8"))
        learning_rate = float(content["tool"]["flwr"]["app"]["config"]["learning-rate"])
        self._learning_rate = scaled_learning_rate(learning_rate, app.batch_size)

    def start(self) -> Model:
        """Return the model before the first round."""
        with torch.random.fork_rng():
            torch.manual_seed(self._seed)
            network = NETWORKS[self._app.network]()
        return self._model(network, 0)

    def after(self, model: Model, partitions: Sequence[int]) -> Model:
        """Return the model after one more round: the devices' models, weighted by their samples.

        Args:
            model: the model before.
            partitions: the devices that train, by the index of their part of the data.

        Raises:
            StoppedError: it was stopped meanwhile.
        """
        chosen = tuple(sorted(partitions))
        if chosen not in model.followers:
            model.followers[chosen] = self._trained(model, chosen)
        return model.followers[chosen]

    def _trained(self, model: Model, partitions: Sequence[int]) -> Model:
        merged = {name: torch.zeros_like(value) for name, value in model.parameters.items()}
        data = [device_data(each, self._devices, self._seed, self._data_file) for each in partitions]
        samples = [len(labels) for _, labels in data]
        network = NETWORKS[self._app.network]()
        for own, count in zip(data, samples, strict=True):
            network.load_state_dict(model.parameters)
            loader = Minibatches(own, self._app.batch_size, self._seed + model.server_round + 1)
            epochs = [self._until_stopped(loader) for _ in range(self._app.local_epochs[0])]
            train(network, epochs, self._learning_rate)
            for name, value in network.state_dict().items():
                merged[name] += count / sum(samples) * value
        network.load_state_dict(merged)
        return self._model(network, model.server_round + 1)

    def _until_stopped(self, loader: Minibatches) -> Iterator[tuple[Tensor, Tensor]]:
        for minibatch in loader:
            if self._stopped.is_set():
                raise StoppedError
            yield minibatch

    def _model(self, network: nn.Module, server_round: int) -> Model:
        parameters = {name: value.clone() for name, value in network.state_dict().items()}
        return Model(parameters, evaluate(network, self._data_file)[1], server_round)
