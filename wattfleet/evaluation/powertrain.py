"""PowerTrain, the published baseline: its networks, their training and its predictors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import BatchArray, Hardware, ModeArray, Profile, WorkloadFacts
from wattfleet.core.prediction import (
    MIN_CORPUS_MODES,
    MIN_MODES,
    Prediction,
    Tensors,
    batch_array,
    only_batch,
    read_array,
    read_batch,
    read_tensors,
    require_fitted_batch,
    tensor_size,
    write_tensors,
)

if TYPE_CHECKING:
    import torch


# --- Networks ---------------------------------------------------------------------------------------------------------
# The dense network of PowerTrain and its training (doi:10.1016/j.future.2024.07.001, section 3.1 and table 4).
#
# Only training needs torch. Predicting with a trained network, storing and reading it do not.


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


# --- Corpus -----------------------------------------------------------------------------------------------------------
# Predictions of a whole corpus by the published networks, trained on some of its rows.


def predicted_corpus(corpus: Profile, rows: NDArray[np.intp], schedule: Schedule) -> Prediction:
    """Train a network for time and one for power, and predict all rows without uncertainty.

    Args:
        corpus: modes, or modes with batches, which are then a fifth input of the networks.
        rows: `[k]` measured rows to train on, 2 or more.
        schedule: the hyperparameters.

    Raises:
        InvalidInputError: there are too few rows, or torch is not installed.
    """
    if len(rows) < 2:
        raise InvalidInputError(f"a network is trained on 2 or more measurements, not {len(rows)}: allow more of them")
    inputs = corpus.modes if corpus.batch is None else np.column_stack([corpus.modes, corpus.batch])
    columns = corpus.minibatch_ms, corpus.power_mw
    trained = train(
        np.stack([inputs[rows]] * 2), np.stack([each[rows] for each in columns]), [None, None], "mse", schedule
    )
    time, power = (
        np.maximum(network(inputs), FLOOR * each[rows].min())
        for (network, _), each in zip(trained, columns, strict=True)
    )
    return Prediction(time, power, np.zeros(len(corpus)), np.zeros(len(corpus)))


# --- Predictors -------------------------------------------------------------------------------------------------------
# The published baselines: PowerTrain's transfer, and its network trained on the measured modes alone.
#
# PowerTrain, doi:10.1016/j.future.2024.07.001, sections 3.1 and 3.2. The paper gives no uncertainty, and its network
# may predict negative values. We add one standard deviation for all modes, and a floor.

# Prior of the errors: the paper's own at 50 modes, about 15 and 5.5 %, as standard deviations of normal errors. It has
# the weight of four held-out modes. With ten measured modes, only one is held out.
_TIME_LOG_SD, _POWER_LOG_SD, _WEIGHT = 0.19, 0.07, 4

FLOOR = 0.1
"""No prediction is below this share of the lowest measured value: a network may predict a negative one."""


@dataclass(frozen=True)
class NetworkQuantity:
    """One predicted quantity.

    Attributes:
        network: predicts the quantity in its own unit.
        floor: lower bound of the predictions.
        log_sd: standard deviation of the logarithm of the error, the same at all modes.
    """

    network: DenseNetwork
    floor: float
    log_sd: float

    @classmethod
    def of(cls, network: DenseNetwork, errors: Values, observed: Values, usual: float) -> NetworkQuantity:
        """A trained network with its deviation and floor.

        The standard deviation is the root mean square over the held-out modes, shrunk towards `usual`. It tends to be
        too small, because the same modes chose the best epoch.

        Args:
            network: the trained network.
            errors: `[h]` logarithms of observed over predicted values at the held-out modes.
            observed: `[n]` values at all measured modes.
            usual: standard deviation that the held-out modes are shrunk towards.
        """
        variance = (_WEIGHT * usual**2 + float((errors**2).sum())) / (_WEIGHT + len(errors))
        return cls(network, FLOOR * float(observed.min()), float(np.sqrt(variance)))

    def predict(self, modes: ModeArray) -> tuple[Values, Values]:
        """The `[n]` values at `[n, 4]` modes, and the `[n]` standard deviations of their logarithms."""
        return np.maximum(self.network(modes), self.floor), np.full(len(modes), self.log_sd)

    def tensors(self, prefix: str) -> Tensors:
        """The quantity as named arrays."""
        return self.network.tensors(prefix) | {f"{prefix}.floor_and_log_sd": np.array([self.floor, self.log_sd])}

    @classmethod
    def read(cls, tensors: Tensors, prefix: str) -> NetworkQuantity:
        """Read what `tensors` wrote.

        Raises:
            CorruptReferenceError: an array is missing or has another shape, or the floor or deviation is not positive.
        """
        floor, log_sd = read_array(tensors, f"{prefix}.floor_and_log_sd", 2, positive=True).tolist()
        return cls(DenseNetwork.read(tensors, prefix), floor, log_sd)


@dataclass(frozen=True)
class PowerTrainPredictor:
    """A network for time and one for power, fine-tuned from those of a reference.

    Attributes:
        time: milliseconds per minibatch.
        power: milliwatts.
        gpu_hz: `[k]` GPU frequencies of the fitted modes. They differ between kinds of boards.
        batch: samples in the fitted batch; None if it is unknown.
    """

    name: ClassVar[str] = "powertrain"
    transfers: ClassVar[bool] = True

    time: NetworkQuantity
    power: NetworkQuantity
    gpu_hz: Values
    batch: int | None = None

    @classmethod
    def fit(
        cls,
        profile: Profile,
        reference: PowerTrainPredictor | None = None,
        facts: WorkloadFacts = WorkloadFacts(),
        schedule: Schedule | None = None,
    ) -> PowerTrainPredictor:
        """Train a reference on a corpus, or fine-tune a reference to measured modes.

        The loss is the squared error. If the profile has a GPU frequency that the reference has not, the loss is the
        percentage error: the paper changed it by hand for "very different device types" (section 4.3.4).

        Args:
            profile: at least `MIN_MODES` modes; their order does not matter.
            reference: the predictor of another workload or device; None trains from scratch.
            facts: its batch size, if the profile does not state one. The rest is ignored.
            schedule: the hyperparameters; None for the paper's table 4.

        Raises:
            InvalidInputError: too few modes, several batch sizes, or torch is not installed.
        """
        return cls.fit_all([profile], reference, facts, schedule)[0]

    @classmethod
    def fit_all(
        cls,
        profiles: Sequence[Profile],
        reference: PowerTrainPredictor | None = None,
        facts: WorkloadFacts = WorkloadFacts(),
        schedule: Schedule | None = None,
    ) -> list[PowerTrainPredictor]:
        """`fit` for several profiles of one board with equally many modes, in a fraction of the time.

        Raises:
            InvalidInputError: too few modes, a profile has several batch sizes, or torch is not installed.
        """
        far = reference is not None and not all(
            np.isin(profile.modes[:, 2], reference.gpu_hz).all() for profile in profiles
        )
        starts = (None, None) if reference is None else (reference.time.network, reference.power.network)
        batches = [only_batch(cls.name, profile, facts) for profile in profiles]
        found = _fit_all(profiles, starts, "mape" if far else "mse", schedule)
        return [
            cls(time, power, np.unique(profile.modes[:, 2]), batch)
            for (time, power), profile, batch in zip(found, profiles, batches, strict=True)
        ]

    def adapted(self, of: Hardware, to: Hardware) -> PowerTrainPredictor:
        """Return itself: the networks do not depend on hardware data."""
        return self

    def predict(self, modes: ModeArray, batch: BatchArray | None = None) -> Prediction:
        """Predict `[n, 4]` modes, measured or not.

        Raises:
            InvalidInputError: `[n]` batch sizes that differ from each other, or from the fitted one.
        """
        require_fitted_batch(self.name, self.batch, batch)
        return _predict(self.time, self.power, modes)

    def save(self) -> bytes:
        """The predictor in safetensors format; the same predictor gives the same bytes."""
        networks = self.time.tensors("time") | self.power.tensors("power")
        return write_tensors(networks | {"gpu_hz": self.gpu_hz, "batch": batch_array(self.batch)})

    @classmethod
    def load(cls, weights: bytes) -> PowerTrainPredictor:
        """Read what `save` wrote.

        Raises:
            CorruptReferenceError: these bytes hold no such predictor.
        """
        tensors = read_tensors(weights)
        gpu_hz = read_array(tensors, "gpu_hz", tensor_size(tensors, "gpu_hz"), positive=True)
        time, power = (NetworkQuantity.read(tensors, name) for name in ("time", "power"))
        return cls(time, power, gpu_hz, read_batch(tensors))


@dataclass(frozen=True)
class ScratchPredictor:
    """The same networks, trained only on the measured modes (the paper's baseline "NN").

    Attributes:
        time: milliseconds per minibatch.
        power: milliwatts.
        batch: samples in the fitted batch; None if it is unknown.
    """

    name: ClassVar[str] = "scratch"
    transfers: ClassVar[bool] = False

    time: NetworkQuantity
    power: NetworkQuantity
    batch: int | None = None

    @classmethod
    def fit(
        cls,
        profile: Profile,
        reference: ScratchPredictor | None = None,
        facts: WorkloadFacts = WorkloadFacts(),
        schedule: Schedule | None = None,
    ) -> ScratchPredictor:
        """Train on measured modes.

        Args:
            profile: at least `MIN_MODES` modes; their order does not matter.
            reference: ignored, since nothing is transferred.
            facts: its batch size, if the profile does not state one. The rest is ignored.
            schedule: the hyperparameters; None for the paper's table 4.

        Raises:
            InvalidInputError: too few modes, several batch sizes, or torch is not installed.
        """
        return cls.fit_all([profile], reference, facts, schedule)[0]

    @classmethod
    def fit_all(
        cls,
        profiles: Sequence[Profile],
        reference: ScratchPredictor | None = None,
        facts: WorkloadFacts = WorkloadFacts(),
        schedule: Schedule | None = None,
    ) -> list[ScratchPredictor]:
        """`fit` for several profiles with equally many modes, in a fraction of the time.

        Raises:
            InvalidInputError: too few modes, a profile has several batch sizes, or torch is not installed.
        """
        batches = [only_batch(cls.name, profile, facts) for profile in profiles]
        found = _fit_all(profiles, (None, None), "mse", schedule)
        return [cls(time, power, batch) for (time, power), batch in zip(found, batches, strict=True)]

    def adapted(self, of: Hardware, to: Hardware) -> ScratchPredictor:
        """Return itself: the networks do not depend on hardware data."""
        return self

    def predict(self, modes: ModeArray, batch: BatchArray | None = None) -> Prediction:
        """Predict `[n, 4]` modes, measured or not.

        Raises:
            InvalidInputError: `[n]` batch sizes that differ from each other, or from the fitted one.
        """
        require_fitted_batch(self.name, self.batch, batch)
        return _predict(self.time, self.power, modes)

    def save(self) -> bytes:
        """The predictor in safetensors format; the same predictor gives the same bytes."""
        return write_tensors(
            self.time.tensors("time") | self.power.tensors("power") | {"batch": batch_array(self.batch)}
        )

    @classmethod
    def load(cls, weights: bytes) -> ScratchPredictor:
        """Read what `save` wrote.

        Raises:
            CorruptReferenceError: these bytes hold no such predictor.
        """
        tensors = read_tensors(weights)
        return cls(NetworkQuantity.read(tensors, "time"), NetworkQuantity.read(tensors, "power"), read_batch(tensors))


def _fit_all(
    profiles: Sequence[Profile],
    starts: tuple[DenseNetwork | None, DenseNetwork | None],
    loss: Loss,
    schedule: Schedule | None,
) -> list[tuple[NetworkQuantity, NetworkQuantity]]:
    """Train the networks for time and power on each of `r` profiles with equally many modes, all of them together."""
    count = len(profiles[0])
    if count < MIN_MODES:
        raise InvalidInputError(f"{count} measured modes are too few to fit a predictor: measure at least {MIN_MODES}")
    if schedule is None:
        schedule = Schedule()
    if count >= MIN_CORPUS_MODES:
        # A profile has one median per mode. With thousands of modes there is no need to repeat them.
        schedule = replace(schedule, entries=1)
    profiles = [profile.rows(np.lexsort(profile.modes.T)) for profile in profiles]
    modes = np.stack([profile.modes for profile in profiles for _ in starts])
    observed = np.stack([values for profile in profiles for values in (profile.minibatch_ms, profile.power_mw)])
    trained = train(modes, observed, starts * len(profiles), loss, schedule)
    quantities = [
        NetworkQuantity.of(network, errors, values, usual)
        for (network, errors), values, usual in zip(
            trained, observed, (_TIME_LOG_SD, _POWER_LOG_SD) * len(profiles), strict=True
        )
    ]
    return list(zip(quantities[::2], quantities[1::2], strict=True))


def _predict(time: NetworkQuantity, power: NetworkQuantity, modes: ModeArray) -> Prediction:
    minibatch_ms, time_log_sd = time.predict(modes)
    power_mw, power_log_sd = power.predict(modes)
    return Prediction(minibatch_ms, power_mw, time_log_sd, power_log_sd)
