"""The published baselines: PowerTrain's transfer, and its network trained on the measured modes alone.

PowerTrain, doi:10.1016/j.future.2024.07.001, sections 3.1 and 3.2. The paper gives no uncertainty, and its network may
predict negative values. We add one standard deviation for all modes, and a floor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from wattfleet.errors import InvalidInputError
from wattfleet.modes import BatchArray, Hardware, ModeArray, Profile, WorkloadFacts
from wattfleet.prediction import (
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
from wattfleet_evaluation.powertrain.networks import DenseNetwork, Loss, Schedule, train

Values = NDArray[np.float64]

# Prior of the errors: the paper's own at 50 modes, about 15 and 5.5 %, as standard deviations of normal errors. It has
# the weight of four held-out modes. With ten measured modes, only one is held out.
_TIME_LOG_SD, _POWER_LOG_SD, _WEIGHT = 0.19, 0.07, 4

FLOOR = 0.1
"""No prediction is below this share of the lowest measured value: a network may predict a negative one."""


@dataclass(frozen=True)
class Quantity:
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
    def of(cls, network: DenseNetwork, errors: Values, observed: Values, usual: float) -> Quantity:
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
    def read(cls, tensors: Tensors, prefix: str) -> Quantity:
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

    time: Quantity
    power: Quantity
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
        time, power = (Quantity.read(tensors, name) for name in ("time", "power"))
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

    time: Quantity
    power: Quantity
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
        return cls(Quantity.read(tensors, "time"), Quantity.read(tensors, "power"), read_batch(tensors))


def _fit_all(
    profiles: Sequence[Profile],
    starts: tuple[DenseNetwork | None, DenseNetwork | None],
    loss: Loss,
    schedule: Schedule | None,
) -> list[tuple[Quantity, Quantity]]:
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
        Quantity.of(network, errors, values, usual)
        for (network, errors), values, usual in zip(
            trained, observed, (_TIME_LOG_SD, _POWER_LOG_SD) * len(profiles), strict=True
        )
    ]
    return list(zip(quantities[::2], quantities[1::2], strict=True))


def _predict(time: Quantity, power: Quantity, modes: ModeArray) -> Prediction:
    minibatch_ms, time_log_sd = time.predict(modes)
    power_mw, power_log_sd = power.predict(modes)
    return Prediction(minibatch_ms, power_mw, time_log_sd, power_log_sd)
