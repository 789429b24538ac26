"""The dense network of PowerTrain and its training (doi:10.1016/j.future.2024.07.001, section 3.1 and table 4).

Only training needs torch. Predicting with a trained network, storing and reading it do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from wattfleet.errors import InvalidInputError
from wattfleet.modes import ModeArray
from wattfleet.prediction import Tensors, read_array

if TYPE_CHECKING:
    import torch

Values = NDArray[np.float64]
Loss = Literal["mse", "mape"]

NEURONS = (256, 128, 64, 1)
_INPUTS = 4


@dataclass(frozen=True)
class Schedule:
    """Hyperparameters of a network's training. The defaults are from table 4 of the paper, unless marked.

    Attributes:
        epochs: passes over the entries.
        learning_rate: learning rate of Adam.
        batch: entries in a step (not stated in the paper).
        dropout: dropout rate after the first and the second layer (not stated in the paper).
        entries: number of entries per measured mode, one for each profiled minibatch (section 4).
        held_out: share of the modes that is held out to choose the best epoch.
        seed: seed of the split, the initial weights and the order.
    """

    epochs: int = 100
    learning_rate: float = 1e-3
    batch: int = 32
    dropout: float = 0.2
    entries: int = 40
    held_out: float = 0.1
    seed: int = 0


@dataclass(frozen=True)
class DenseNetwork:
    """Four dense layers, ReLU after the first three, over standardised power modes.

    Attributes:
        centre: `[4]` mean of each knob over the modes of the first training.
        scale: `[4]` standard deviation of each knob over these modes; 1 for a knob that never changed.
        weights: four arrays `[neurons, inputs]`.
        biases: four arrays `[neurons]`.
    """

    centre: Values
    scale: Values
    weights: tuple[Values, ...]
    biases: tuple[Values, ...]

    def __call__(self, modes: ModeArray) -> Values:
        """The `[n]` outputs at `[n, 4]` modes, in the unit of the training values; may be negative."""
        signal = (modes - self.centre) / self.scale
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            signal = signal @ weight.T + bias
            if layer < len(NEURONS) - 1:
                signal = np.maximum(signal, 0.0)
        return np.asarray(signal[:, 0])

    def tensors(self, prefix: str) -> Tensors:
        """The network as named arrays."""
        tensors: Tensors = {f"{prefix}.centre": self.centre, f"{prefix}.scale": self.scale}
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            tensors |= {f"{prefix}.weight.{layer}": weight, f"{prefix}.bias.{layer}": bias}
        return tensors

    @classmethod
    def read(cls, tensors: Tensors, prefix: str) -> DenseNetwork:
        """Read what `tensors` wrote.

        Raises:
            CorruptReferenceError: an array is missing or of another shape, or a scale is not positive.
        """
        return cls(
            read_array(tensors, f"{prefix}.centre", _INPUTS),
            read_array(tensors, f"{prefix}.scale", _INPUTS, positive=True),
            tuple(read_array(tensors, f"{prefix}.weight.{k}", *shape) for k, shape in _shapes()),
            tuple(read_array(tensors, f"{prefix}.bias.{k}", shape[0]) for k, shape in _shapes()),
        )


def _shapes() -> Iterator[tuple[int, tuple[int, int]]]:
    return enumerate(zip(NEURONS, (_INPUTS, *NEURONS[:-1]), strict=True))


def train(
    modes: ModeArray, observed: Values, start: DenseNetwork | None, loss: Loss, schedule: Schedule
) -> tuple[DenseNetwork, Values]:
    """Train a network. The same rows in the same order give the same network on the same machine.

    Args:
        modes: `[n, 4]` measured modes, n at least 2.
        observed: `[n]` values measured at these modes, positive, in the unit to predict.
        start: the network to fine-tune, after its last layer is replaced by a new one (section 3.2). None initialises
            all layers.
        loss: mean squared error, or mean absolute percentage error (section 4.3.4).
        schedule: the hyperparameters.

    Returns:
        The network of the epoch with the least loss on the held-out modes, and the `[k]` logarithms of observed over
        predicted values at these modes. A predicted value below a hundredth of the observed one counts as a hundredth.

    Raises:
        InvalidInputError: torch is not installed.
    """
    try:
        import torch
    except ModuleNotFoundError:
        raise InvalidInputError(
            "this predictor needs torch: install it with pip install 'wattfleet[simulation]', or use roofline"
        ) from None
    centre, scale = (modes.mean(axis=0), modes.std(axis=0)) if start is None else (start.centre, start.scale)
    scale = np.where(scale > 0, scale, 1.0)
    inputs = torch.tensor((modes - centre) / scale, dtype=torch.float32)
    targets = torch.tensor(observed, dtype=torch.float32)
    order = np.random.default_rng(schedule.seed).permutation(len(modes))
    held = max(1, round(schedule.held_out * len(modes)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(schedule.seed)
        layers = _fresh(start, schedule.dropout)
        # Denormal activations would make every step several times slower.
        torch.set_flush_denormal(True)
        try:
            _descend(layers, inputs, targets, order[held:], order[:held], loss, schedule)
        finally:
            torch.set_flush_denormal(False)
    dense = [layer for layer in layers if isinstance(layer, torch.nn.Linear)]
    network = DenseNetwork(
        np.asarray(centre),
        np.asarray(scale),
        tuple(layer.weight.detach().numpy().astype(np.float64) for layer in dense),
        tuple(layer.bias.detach().numpy().astype(np.float64) for layer in dense),
    )
    unseen = order[:held]
    ratio = observed[unseen] / np.maximum(network(modes[unseen]), observed[unseen] / 100)
    return network, np.asarray(np.log(ratio))


def _fresh(start: DenseNetwork | None, dropout: float) -> torch.nn.Sequential:
    """Layers to train: all new, or those of a network with a new last one."""
    import torch
    from torch.nn import Dropout, Linear, Module, ReLU

    layers: list[Module] = []
    for k, (neurons, inputs) in _shapes():
        layer = Linear(inputs, neurons)
        if start is not None and k < len(NEURONS) - 1:
            with torch.no_grad():
                layer.weight.copy_(torch.tensor(start.weights[k], dtype=torch.float32))
                layer.bias.copy_(torch.tensor(start.biases[k], dtype=torch.float32))
        layers.append(layer)
        if k < len(NEURONS) - 1:
            layers.append(ReLU())
        if k < 2:
            layers.append(Dropout(dropout))
    return torch.nn.Sequential(*layers)


def _descend(
    layers: torch.nn.Sequential,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    fitted: NDArray[np.int_],
    held_out: NDArray[np.int_],
    loss: Loss,
    schedule: Schedule,
) -> None:
    """Train the layers in place, and leave them with the weights of the best epoch."""
    import torch

    def lost(rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = layers(inputs[rows])
        error = output[:, 0] - targets[rows]
        return (error**2).mean() if loss == "mse" else (error / targets[rows]).abs().mean()

    optimiser = torch.optim.Adam(layers.parameters(), lr=schedule.learning_rate, fused=True)
    entries = torch.tensor(np.repeat(fitted, schedule.entries))
    unseen = torch.tensor(held_out)
    least, best = float("inf"), {name: value.clone() for name, value in layers.state_dict().items()}
    for _ in range(schedule.epochs):
        layers.train()
        for rows in torch.split(entries[torch.randperm(len(entries))], schedule.batch):
            optimiser.zero_grad()
            lost(rows).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        layers.eval()
        with torch.no_grad():
            now = float(lost(unseen))
        if now < least:
            least, best = now, {name: value.clone() for name, value in layers.state_dict().items()}
    layers.load_state_dict(best)
