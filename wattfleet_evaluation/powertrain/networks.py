"""The dense network of PowerTrain and its training (doi:10.1016/j.future.2024.07.001, section 3.1 and table 4).

Only training needs torch. Predicting with a trained network, storing and reading it do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from wattfleet.errors import InvalidInputError
from wattfleet.prediction import Tensors, read_array

if TYPE_CHECKING:
    import torch

Values = NDArray[np.float64]
Loss = Literal["mse", "mape"]
Layer: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"

NEURONS = (256, 128, 64, 1)
_INPUTS = 4


@dataclass(frozen=True)
class Schedule:
    """Hyperparameters of a network's training. The defaults are from table 4 of the paper, unless marked.

    Attributes:
        epochs: passes over the entries.
        learning_rate: learning rate of Adam.
        batch: entries in a step (not stated in the paper).
        dropout: dropout rate after the first and the second layer. The paper does not state it. 0.5 is torch's
            default, and comes closest to the paper's choices (docs/comparison.md).
        entries: number of entries per measured mode, one for each profiled minibatch (section 4).
        held_out: share of the modes that is held out to choose the best epoch.
        seed: seed of the split, the initial weights and the order.
    """

    epochs: int = 100
    learning_rate: float = 1e-3
    batch: int = 32
    dropout: float = 0.5
    entries: int = 40
    held_out: float = 0.1
    seed: int = 0


@dataclass(frozen=True)
class DenseNetwork:
    """Four dense layers, ReLU after the first three, over standardised power modes, or modes with batch sizes.

    Attributes:
        centre: `[i]` mean of each input over the rows of the first training: of the four knobs, and of the batch size.
        scale: `[i]` standard deviation of each input over these rows; 1 for an input that never changed.
        weights: four arrays `[neurons, inputs]`.
        biases: four arrays `[neurons]`.
    """

    centre: Values
    scale: Values
    weights: tuple[Values, ...]
    biases: tuple[Values, ...]

    def __call__(self, modes: Values) -> Values:
        """The `[n]` outputs at `[n, i]` modes, in the unit of the training values; may be negative."""
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
            tuple(read_array(tensors, f"{prefix}.weight.{k}", *shape) for k, shape in _shapes(_INPUTS)),
            tuple(read_array(tensors, f"{prefix}.bias.{k}", shape[0]) for k, shape in _shapes(_INPUTS)),
        )


def _shapes(inputs: int) -> Iterator[tuple[int, tuple[int, int]]]:
    return enumerate(zip(NEURONS, (inputs, *NEURONS[:-1]), strict=True))


def train(
    modes: Values,
    observed: Values,
    starts: Sequence[DenseNetwork | None],
    loss: Loss,
    schedule: Schedule,
) -> list[tuple[DenseNetwork, Values]]:
    """Train `k` networks together, which takes far less time than training them one after the other.

    Each network sees only its own rows. All share the seed: the split, the initial weights, the order and the dropped
    neurons. The same rows in the same order give the same network on the same machine, up to rounding.

    Args:
        modes: `[k, n, i]` measured modes of each network, n at least 2: four knobs, and possibly the batch size.
        observed: `[k, n]` values measured at these modes, positive, in the unit to predict.
        starts: for each network, the one to fine-tune, after its last layer is replaced by a new one (section 3.2).
            None initialises all layers.
        loss: mean squared error, or mean absolute percentage error (section 4.3.4).
        schedule: the hyperparameters.

    Returns:
        For each network, its weights in the epoch with the least loss on the held-out modes, and the `[h]` logarithms
        of observed over predicted values at these modes. A predicted value below a hundredth of the observed one counts
        as a hundredth.

    Raises:
        InvalidInputError: torch is not installed.
    """
    try:
        import torch
    except ModuleNotFoundError:
        raise InvalidInputError(
            "this predictor needs torch: install it with pip install 'wattfleet[simulation]', or use roofline"
        ) from None
    centre = np.stack([own.mean(axis=0) if start is None else start.centre for own, start in _each(modes, starts)])
    scale = np.stack([own.std(axis=0) if start is None else start.scale for own, start in _each(modes, starts)])
    scale = np.where(scale > 0, scale, 1.0)
    inputs = torch.tensor((modes - centre[:, None]) / scale[:, None], dtype=torch.float32)
    targets = torch.tensor(observed, dtype=torch.float32)
    order = np.random.default_rng(schedule.seed).permutation(modes.shape[1])
    held = max(1, round(schedule.held_out * len(order)))
    chance = torch.Generator().manual_seed(schedule.seed)
    layers = _initial(starts, modes.shape[-1], chance)
    # Denormal activations would make every step several times slower.
    torch.set_flush_denormal(True)
    try:
        best = _descend(layers, inputs, targets, order[held:], order[:held], loss, schedule, chance)
    finally:
        torch.set_flush_denormal(False)
    unseen = order[:held]
    found = []
    for k in range(len(modes)):
        weights, biases = zip(*((weight[k].T.double(), bias[k, 0].double()) for weight, bias in best), strict=True)
        network = DenseNetwork(
            *(centre[k], scale[k]),
            tuple(np.ascontiguousarray(weight.numpy()) for weight in weights),
            tuple(bias.numpy() for bias in biases),
        )
        ratio = observed[k, unseen] / np.maximum(network(modes[k, unseen]), observed[k, unseen] / 100)
        found.append((network, np.asarray(np.log(ratio))))
    return found


def _each(modes: Values, starts: Sequence[DenseNetwork | None]) -> Iterator[tuple[Values, DenseNetwork | None]]:
    return zip(modes, starts, strict=True)


def _initial(starts: Sequence[DenseNetwork | None], inputs: int, chance: torch.Generator) -> list[Layer]:
    """Weights `[k, inputs, neurons]` and biases `[k, 1, neurons]` of every layer: new, or those of a network to tune.

    New ones are drawn as torch.nn.Linear draws them, the same for all networks.
    """
    import torch

    layers: list[Layer] = []
    for layer, (neurons, width) in _shapes(inputs):
        bound = 1 / np.sqrt(width)
        weight, bias = (bound * (2 * torch.rand(rows, neurons, generator=chance) - 1) for rows in (width, 1))
        weights, biases = [], []
        for start in starts:
            kept = start is not None and layer < len(NEURONS) - 1
            weights.append(torch.tensor(start.weights[layer].T, dtype=torch.float32) if start and kept else weight)
            biases.append(torch.tensor(start.biases[layer], dtype=torch.float32)[None] if start and kept else bias)
        layers.append((torch.stack(weights).requires_grad_(), torch.stack(biases).requires_grad_()))
    return layers


def _output(layers: Sequence[Layer], inputs: torch.Tensor, dropped: Sequence[torch.Tensor] = ()) -> torch.Tensor:
    """`[k, b]` outputs at `[k, b, i]` inputs. `dropped` scales the activations after the first layers."""
    import torch

    signal = inputs
    for layer, (weight, bias) in enumerate(layers):
        signal = torch.baddbmm(bias, signal, weight)
        if layer < len(NEURONS) - 1:
            signal = torch.relu(signal)
        if layer < len(dropped):
            signal = signal * dropped[layer]
    return signal[..., 0]


def _descend(
    layers: list[Layer],
    inputs: torch.Tensor,
    targets: torch.Tensor,
    fitted: NDArray[np.int_],
    held_out: NDArray[np.int_],
    loss: Loss,
    schedule: Schedule,
    chance: torch.Generator,
) -> list[Layer]:
    """Train the layers in place, and return each network's weights of its best epoch."""
    import torch

    def lost(rows: torch.Tensor, dropped: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        error = _output(layers, inputs[:, rows], dropped) - targets[:, rows]
        each = error**2 if loss == "mse" else (error / targets[:, rows]).abs()
        return each.mean(dim=1)

    def dropouts(count: int) -> list[torch.Tensor]:
        kept = 1 - schedule.dropout
        return [(torch.rand(count, width, generator=chance) < kept).float() / kept for width in NEURONS[:2]]

    optimiser = torch.optim.Adam([part for layer in layers for part in layer], lr=schedule.learning_rate, fused=True)
    entries = torch.tensor(np.repeat(fitted, schedule.entries))
    unseen = torch.tensor(held_out)
    least = torch.full((len(inputs),), float("inf"))
    best: list[Layer] = [(weight.detach().clone(), bias.detach().clone()) for weight, bias in layers]
    for _ in range(schedule.epochs):
        for rows in torch.split(entries[torch.randperm(len(entries), generator=chance)], schedule.batch):
            optimiser.zero_grad()
            # The networks share no weight, so that the gradient of the sum is each network's own.
            lost(rows, dropouts(len(rows))).sum().backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        with torch.no_grad():
            now = lost(unseen)
            better = now < least
            least = torch.where(better, now, least)
            for layer, kept in zip(layers, best, strict=True):
                for part, kept_part in zip(layer, kept, strict=True):
                    kept_part[better] = part[better]
    return best
