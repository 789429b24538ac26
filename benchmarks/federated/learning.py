"""Real federated averaging: the devices of a round train side by side, each with its own batch and number of steps.

What a round gives depends on nothing but the devices that were chosen so far and their work, so that methods which
choose alike share their training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.federated.boards import BASE_BATCH
from benchmarks.federated.tasks import LearningTask, Parameters
from wattfleet.choosing import scaled_learning_rate
from wattfleet_simulation.digits_app.task import partitions

MOMENTUM = 0.9
"""As in the app that `wattfleet simulate` runs."""


@dataclass(frozen=True, order=True)
class LocalWork:
    """What a device does in a round.

    Attributes:
        epochs: passes over its own data; a part of one ends after as many minibatches.
        batch: samples in a minibatch.
    """

    epochs: float
    batch: int = BASE_BATCH

    def steps(self, samples: int) -> int:
        """Minibatches that a device with so many samples trains, at least 1."""
        return max(1, round(self.epochs * -(-samples // self.batch)))


@dataclass
class Model:
    """A state of the global model.

    Attributes:
        parameters: of the network.
        accuracy: on the test data.
        losses: of the devices that trained last, by number.
        server_round: rounds that led to it.
        followers: the models that came of it so far, by the work that was done.
    """

    parameters: Parameters
    accuracy: float
    losses: Mapping[int, float] = field(default_factory=dict)
    server_round: int = 0
    followers: dict[tuple[object, ...], Model] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Trained:
    """What a device made of a model.

    Attributes:
        parameters: of its network.
        loss: its mean loss in the last epoch.
    """

    parameters: Parameters
    loss: float


class Federation:
    """Devices that hold the data of a task, split unevenly, and train one network.

    Args:
        task: what they learn.
        devices: number of devices.
        seed: of the split, of the first parameters and of the order of minibatches.
    """

    def __init__(self, task: LearningTask, devices: int, seed: int) -> None:
        self._task, self._seed = task, seed
        self._inputs, self._labels = task.train
        split = partitions(self._labels.numpy(), devices, seed, task.concentration)
        self._parts = [torch.from_numpy(part) for part in split]
        self.start = self.model(task.start(seed))

    @property
    def samples(self) -> list[int]:
        """How many training samples each device holds."""
        return [len(part) for part in self._parts]

    def model(self, parameters: Parameters, losses: Mapping[int, float] | None = None, server_round: int = 0) -> Model:
        """A model with its accuracy."""
        return Model(parameters, self._task.accuracy(parameters), losses or {}, server_round)

    def after(self, model: Model, work: Mapping[int, LocalWork], normalised: bool = False) -> Model:
        """The model after one more round; averaged by the devices' samples.

        Args:
            model: the model before.
            work: what each device that takes part does, by number.
            normalised: average the devices' updates per epoch instead of the updates, as FedNova does with steps (Wang
                et al., arXiv 2007.07481): devices that train fewer epochs then count as much as others.
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
        """What each of some devices that start together makes of a model, by number.

        Args:
            model: what they start from.
            work: what each device does, by number.
            order_seed: another number, another order of each device's minibatches.
        """
        found = {}
        for same, trained, losses in self._trained_by_batch(model, work, order_seed):
            for row, (device, loss) in enumerate(zip(same, losses, strict=True)):
                found[device] = Trained({name: values[row] for name, values in trained.items()}, loss)
        return found

    def _trained_by_batch(
        self, model: Model, work: Mapping[int, LocalWork], order_seed: int
    ) -> Iterator[tuple[Sequence[int], Parameters, Sequence[float]]]:
        """The devices with each batch, and what `_trained` gives for them."""
        for batch in sorted({each.batch for each in work.values()}):
            same = [device for device in sorted(work) if work[device].batch == batch]
            yield same, *self._trained(model, same, [work[device] for device in same], batch, order_seed)

    def _learning_rate(self, batch: int) -> float:
        return scaled_learning_rate(self._task.learning_rate, BASE_BATCH, batch, "sgd")

    def _trained(
        self, model: Model, devices: Sequence[int], work: Sequence[LocalWork], batch: int, order_seed: int
    ) -> tuple[Parameters, list[float]]:
        """`[d, ...]` parameters of `d` devices after local training, and their mean losses in its last epoch."""
        minibatches = [self._minibatches(device, each, order_seed) for device, each in zip(devices, work, strict=True)]
        steps = np.array([len(each) for each in minibatches])
        order = np.argsort(-steps, kind="stable")  # those that are done first are last, and left out then
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
            # No device's loss depends on another's parameters, so that the sum's gradient is that of each.
            gradients = torch.autograd.grad(loss.sum(), list(now.values()))
            losses[:active] += loss.detach() * last[step, :active]
            with torch.no_grad():
                for name, gradient in zip(parameters, gradients, strict=True):
                    velocity[name][:active].mul_(MOMENTUM).add_(gradient)
                    parameters[name][:active] -= learning_rate * velocity[name][:active]
        back = torch.from_numpy(np.argsort(order))
        return {name: value.detach()[back] for name, value in parameters.items()}, losses[back].tolist()

    def _minibatches(self, device: int, work: LocalWork, order_seed: int) -> list[Tensor]:
        """The samples of each minibatch of a device."""
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
        """Samples and their weights, `[s, d, batch]`, and the share of the last epoch of each, `[s, d]`."""
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
        """`[d]` losses of `d` devices, each of its own network on its own minibatch."""
        logits = self._task.logits(parameters, self._inputs[rows])
        each = nn.functional.cross_entropy(logits.flatten(0, 1), self._labels[rows].flatten(), reduction="none")
        return (each.view_as(weight) * weight).sum(dim=1)
