"""The fleet's learning task: real federated averaging of a small network on scikit-learn's digits.

The devices of a round are trained side by side in one batch. What a round gives depends on nothing but the sets of
devices that were chosen so far, so that methods which choose alike share their training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from wattfleet_simulation.digits_app.task import MINIBATCH, digits, partitions

Parameters = Mapping[str, Tensor]

LEARNING_RATE = 0.05
MOMENTUM = 0.9
"""Both as in the app that `wattfleet simulate` runs."""

_HIDDEN = 64


@dataclass
class Model:
    """A state of the global model.

    Attributes:
        parameters: of the network.
        accuracy: on the test images.
        losses: of the devices that trained last, by number.
        server_round: rounds that led to it.
        followers: the models that came of it so far, by the devices that trained.
    """

    parameters: Parameters
    accuracy: float
    losses: Mapping[int, float] = field(default_factory=dict)
    server_round: int = 0
    followers: dict[tuple[int, ...], Model] = field(default_factory=dict, repr=False)


class Federation:
    """Devices that hold the digits, split unevenly, and train one network.

    Args:
        devices: number of devices.
        epochs: passes over its own data that a device makes in a round.
        seed: of the split, of the first parameters and of the order of minibatches.
    """

    def __init__(self, devices: int, epochs: int, seed: int) -> None:
        (images, self._labels), (test_images, self._test_labels) = digits()
        self._images, self._test_images = images.flatten(1), test_images.flatten(1)
        self._parts = [torch.from_numpy(part) for part in partitions(self._labels.numpy(), devices, seed)]
        self._epochs, self._seed = epochs, seed
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            layers = nn.ModuleDict(
                {
                    "hidden": nn.Linear(self._images.shape[1], _HIDDEN),
                    "output": nn.Linear(_HIDDEN, int(self._labels.max()) + 1),
                }
            )
        parameters = {name: value.detach() for name, value in layers.named_parameters()}
        self.start = Model(parameters, self._accuracy(parameters))

    @property
    def samples(self) -> list[int]:
        """How many training samples each device holds."""
        return [len(part) for part in self._parts]

    def after(self, model: Model, chosen: Sequence[int]) -> Model:
        """The model after one more round, in which these devices trained; averaged by their samples."""
        key = tuple(sorted(chosen))
        if key not in model.followers:
            trained, losses = self._trained(model, key)
            share = torch.tensor([float(len(self._parts[device])) for device in key])
            share /= share.sum()
            merged = {name: torch.tensordot(share, values, 1) for name, values in trained.items()}
            model.followers[key] = Model(
                merged, self._accuracy(merged), dict(zip(key, losses, strict=True)), model.server_round + 1
            )
        return model.followers[key]

    def _trained(self, model: Model, devices: Sequence[int]) -> tuple[Parameters, list[float]]:
        """`[d, ...]` parameters of `d` devices after local training, and their mean losses in its last epoch.

        Every device takes its own minibatches, as many as it has; those that are done wait for the others.
        """
        rows, weight, last = self._minibatches(devices, model.server_round)
        parameters = {
            name: value.expand(len(devices), *value.shape).clone().requires_grad_()
            for name, value in model.parameters.items()
        }
        velocity = {name: torch.zeros_like(value) for name, value in parameters.items()}
        losses = torch.zeros(len(devices))
        for step in range(len(rows)):
            loss = self._losses(parameters, rows[step], weight[step])
            # No device's loss depends on another's parameters, so that the sum's gradient is that of each.
            gradients = torch.autograd.grad(loss.sum(), list(parameters.values()))
            active = (weight[step].sum(dim=1) > 0).float()
            losses += loss.detach() * last[step]
            with torch.no_grad():
                for (name, value), gradient in zip(parameters.items(), gradients, strict=True):
                    now = active.view(-1, *[1] * (value.dim() - 1))
                    velocity[name] = MOMENTUM * velocity[name] + gradient
                    value -= LEARNING_RATE * now * velocity[name]
        return {name: value.detach() for name, value in parameters.items()}, losses.tolist()

    def _minibatches(self, devices: Sequence[int], server_round: int) -> tuple[Tensor, Tensor, Tensor]:
        """Samples and their weights, `[s, d, MINIBATCH]`, and the share of the last epoch of each, `[s, d]`."""
        batches: list[list[Tensor]] = []
        for device in devices:
            part = self._parts[device]
            order = torch.Generator().manual_seed((self._seed * 10_007 + server_round) * 1_009 + device)
            batches.append(
                [
                    part[some]
                    for _ in range(self._epochs)
                    for some in torch.split(torch.randperm(len(part), generator=order), MINIBATCH)
                ]
            )
        shape = (max(map(len, batches)), len(devices))
        rows, weight = torch.zeros((*shape, MINIBATCH), dtype=torch.long), torch.zeros((*shape, MINIBATCH))
        last = torch.zeros(shape)
        for column, own in enumerate(batches):
            for step, batch in enumerate(own):
                rows[step, column, : len(batch)] = batch
                weight[step, column, : len(batch)] = 1 / len(batch)
                if step >= len(own) - len(own) // self._epochs:
                    last[step, column] = len(batch) / len(self._parts[devices[column]])
        return rows, weight, last

    def _losses(self, parameters: Parameters, rows: Tensor, weight: Tensor) -> Tensor:
        """`[d]` losses of `d` devices, each of its own network on its own minibatch."""
        logits = _logits(parameters, self._images[rows])
        each = nn.functional.cross_entropy(logits.flatten(0, 1), self._labels[rows].flatten(), reduction="none")
        return (each.view_as(weight) * weight).sum(dim=1)

    def _accuracy(self, parameters: Parameters) -> float:
        with torch.no_grad():
            one = {name: value.unsqueeze(0) for name, value in parameters.items()}
            logits = _logits(one, self._test_images.unsqueeze(0))
        return float((logits[0].argmax(dim=1) == self._test_labels).float().mean())


def _logits(parameters: Parameters, images: Tensor) -> Tensor:
    """`[d, b, classes]` of `d` networks, each for its own `[d, b, pixels]`."""
    hidden = torch.baddbmm(parameters["hidden.bias"].unsqueeze(1), images, parameters["hidden.weight"].mT)
    return torch.baddbmm(parameters["output.bias"].unsqueeze(1), hidden.relu(), parameters["output.weight"].mT)
