"""Federated averaging with real training; devices may differ in batch size and number of steps.

The devices of a round are trained together as one vectorised computation. A round's result depends only on the devices
chosen so far and their work, so methods that make the same choices share the computation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.federated.boards import BASE_BATCH
from benchmarks.federated.tasks import LearningTask, Parameters
from wattfleet.core.choosing import scaled_learning_rate
from wattfleet.simulation.digits_app.task import partitions

MOMENTUM = 0.9
"""Momentum of SGD, as in the app of `wattfleet simulate`."""


@dataclass(frozen=True, order=True)
class LocalWork:
    """A device's local training in a round.

    Attributes:
        epochs: passes over its own data; may be fractional.
        batch: the batch size.
    """

    epochs: float
    batch: int = BASE_BATCH

    def steps(self, samples: int) -> int:
        """Return how many minibatches a device with the given number of samples trains, at least 1."""
        return max(1, round(self.epochs * -(-samples // self.batch)))


@dataclass
class Model:
    """A state of the global model.

    Attributes:
        parameters: the network's parameters, flattened.
        accuracy: accuracy on the test data.
        losses: training loss of the devices of the last round, by device number.
        server_round: number of rounds that led to this model.
        followers: cached models after one more round, by the work of that round.
    """

    parameters: Parameters
    accuracy: float
    losses: Mapping[int, float] = field(default_factory=dict)
    server_round: int = 0
    followers: dict[tuple[object, ...], Model] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Trained:
    """The result of a device's local training.

    Attributes:
        parameters: the trained parameters, flattened.
        loss: mean training loss in the last epoch.
    """

    parameters: Parameters
    loss: float


class Federation:
    """Devices that each hold an uneven part of a task's data, and train one network.

    Args:
        task: the learning task.
        devices: number of devices.
        seed: random seed of the split, the initial parameters and the order of minibatches.
    """

    def __init__(self, task: LearningTask, devices: int, seed: int) -> None:
        self._task, self._seed = task, seed
        self._inputs, self._labels = task.train
        split = partitions(self._labels.numpy(), devices, seed, task.concentration)
        self._parts = [torch.from_numpy(part) for part in split]
        self.start = self.model(task.start(seed))

    @property
    def samples(self) -> list[int]:
        """Return how many training samples each device holds."""
        return [len(part) for part in self._parts]

    def model(self, parameters: Parameters, losses: Mapping[int, float] | None = None, server_round: int = 0) -> Model:
        """Return a model with these parameters and its accuracy."""
        return Model(parameters, self._task.accuracy(parameters), losses or {}, server_round)

    def after(self, model: Model, work: Mapping[int, LocalWork], normalised: bool = False) -> Model:
        """Return the model after one more round: the average of the devices' models, weighted by their samples.

        Args:
            model: the model before.
            work: the local training of each participating device, by device number.
            normalised: average the updates per epoch, as FedNova does per step (Wang et al., arXiv 2007.07481, section
                4). Devices that train fewer epochs then count as much as others.
        """
        key = (normalised, *sorted(work.items()))
        if key not in model.followers:
            devices = sorted(work)
            share = np.array([float(len(self._parts[device])) for device in devices])
            share /= share.sum()
            if normalised:
                epochs = np.array([work[device].epochs for device in devices])
                share = share * epochs.mean() / epochs
            merged = dict(model.parameters)
            losses: dict[int, float] = {}
            for same, trained, own in self._trained_by_batch(model, work, model.server_round):
                losses.update(zip(same, own, strict=True))
                counted = torch.tensor([share[devices.index(device)] for device in same], dtype=torch.float32)
                for name, values in trained.items():
                    merged[name] = merged[name] + torch.tensordot(counted, values - model.parameters[name], 1)
            model.followers[key] = self.model(merged, losses, model.server_round + 1)
        return model.followers[key]

    def updates(self, model: Model, work: Mapping[int, LocalWork], order_seed: int) -> dict[int, Trained]:
        """Train a model locally on several devices, and return each device's result by device number.

        Args:
            model: the model that all of them start from.
            work: the local training of each device, by device number.
            order_seed: seed of the order of each device's minibatches.
        """
        found = {}
        for same, trained, losses in self._trained_by_batch(model, work, order_seed):
            for row, (device, loss) in enumerate(zip(same, losses, strict=True)):
                found[device] = Trained({name: values[row] for name, values in trained.items()}, loss)
        return found

    def _trained_by_batch(
        self, model: Model, work: Mapping[int, LocalWork], order_seed: int
    ) -> Iterator[tuple[Sequence[int], Parameters, Sequence[float]]]:
        """Yield the devices with the same batch size, and the result of `_trained` for them."""
        for batch in sorted({each.batch for each in work.values()}):
            same = [device for device in sorted(work) if work[device].batch == batch]
            yield same, *self._trained(model, same, [work[device] for device in same], batch, order_seed)

    def _learning_rate(self, batch: int) -> float:
        return scaled_learning_rate(self._task.learning_rate, BASE_BATCH, batch, "sgd")

    def _trained(
        self, model: Model, devices: Sequence[int], work: Sequence[LocalWork], batch: int, order_seed: int
    ) -> tuple[Parameters, list[float]]:
        """Return `[d, ...]` parameters of `d` devices after local training, and their mean losses of the last epoch."""
        minibatches = [self._minibatches(device, each, order_seed) for device, each in zip(devices, work, strict=True)]
        steps = np.array([len(each) for each in minibatches])
        # Devices with fewer steps come last, and are left out once they are done.
        order = np.argsort(-steps, kind="stable")
        rows, weight, last = self._padded(
            [minibatches[k] for k in order], [work[k] for k in order], [len(self._parts[devices[k]]) for k in order]
        )
        parameters = {
            name: value.expand(len(devices), *value.shape).clone() for name, value in model.parameters.items()
        }
        velocity = {name: torch.zeros_like(value) for name, value in parameters.items()}
        learning_rate = self._learning_rate(batch)
        losses = torch.zeros(len(devices))
        for step in range(len(rows)):
            active = int((steps > step).sum())
            now = {name: value[:active].requires_grad_() for name, value in parameters.items()}
            loss = self._losses(now, rows[step, :active], weight[step, :active])
            # A device's loss does not depend on the others' parameters, so the gradient of the sum contains each one's
            # gradient.
            gradients = torch.autograd.grad(loss.sum(), list(now.values()))
            losses[:active] += loss.detach() * last[step, :active]
            with torch.no_grad():
                for name, gradient in zip(parameters, gradients, strict=True):
                    velocity[name][:active].mul_(MOMENTUM).add_(gradient)
                    parameters[name][:active] -= learning_rate * velocity[name][:active]
        back = torch.from_numpy(np.argsort(order))
        return {name: value.detach()[back] for name, value in parameters.items()}, losses[back].tolist()

    def _minibatches(self, device: int, work: LocalWork, order_seed: int) -> list[Tensor]:
        """Return the sample indices of each minibatch of a device."""
        part = self._parts[device]
        order = torch.Generator().manual_seed((self._seed * 10_007 + order_seed) * 1_009 + device)
        found: list[Tensor] = []
        steps = work.steps(len(part))
        while len(found) < steps:
            found += torch.split(part[torch.randperm(len(part), generator=order)], work.batch)
        return found[:steps]

    def _padded(
        self, minibatches: Sequence[Sequence[Tensor]], work: Sequence[LocalWork], samples: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return samples and their weights, `[s, d, batch]`, and each minibatch's share of the last epoch, `[s, d]`."""
        shape = (max(map(len, minibatches)), len(minibatches))
        rows = torch.zeros((*shape, work[0].batch), dtype=torch.long)
        weight, last = torch.zeros(rows.shape), torch.zeros(shape)
        for column, own in enumerate(minibatches):
            latest = own[-min(len(own), -(-samples[column] // work[column].batch)) :]
            for step, rows_of in enumerate(own):
                rows[step, column, : len(rows_of)] = rows_of
                weight[step, column, : len(rows_of)] = 1 / len(rows_of)
            counts = torch.tensor([float(len(rows_of)) for rows_of in latest])
            last[len(own) - len(latest) : len(own), column] = counts / counts.sum()
        return rows, weight, last

    def _losses(self, parameters: Parameters, rows: Tensor, weight: Tensor) -> Tensor:
        """Return `[d]` losses of `d` devices, each of its own network on its own minibatch."""
        logits = self._task.logits(parameters, self._inputs[rows])
        each = nn.functional.cross_entropy(logits.flatten(0, 1), self._labels[rows].flatten(), reduction="none")
        return (each.view_as(weight) * weight).sum(dim=1)
