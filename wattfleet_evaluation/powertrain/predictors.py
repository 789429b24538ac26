"""The published predictors: PowerTrain's transfer, and the network trained on the measured modes alone.

PowerTrain, doi:10.1016/j.future.2024.07.001, sections 3.1 and 3.2. They stand here to be compared with. The paper
says nothing of uncertainty, and its network may predict what is not positive: the two additions here are one standard
deviation for all modes, and a floor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from wattfleet.errors import InvalidInputError
from wattfleet.modes import Hardware, ModeArray, Profile
from wattfleet.prediction import (
    MIN_CORPUS_MODES,
    MIN_MODES,
    Prediction,
    Tensors,
    read_array,
    read_tensors,
    tensor_size,
    write_tensors,
)
from wattfleet_evaluation.powertrain.networks import DenseNetwork, Loss, Schedule, train

Values = NDArray[np.float64]

# What the held-out modes weigh against: the paper's own errors at 50 modes, about 15 and 5.5 %, as standard
# deviations of normal errors. With ten measured modes a single one is held out.
_TIME_LOG_SD, _POWER_LOG_SD, _WEIGHT = 0.19, 0.07, 4
# No prediction is below this share of the least that was measured.
_FLOOR = 0.1


@dataclass(frozen=True)
class Quantity:
    """One predicted quantity.

    Attributes:
        network: its network, in the unit of the quantity.
        floor: what it predicts where the network's output is lower.
        log_sd: standard deviation of the logarithm of the error, the same at all modes.
    """

    network: DenseNetwork
    floor: float
    log_sd: float

    @classmethod
    def fit(
        cls,
        modes: ModeArray,
        observed: Values,
        start: DenseNetwork | None,
        loss: Loss,
        usual: float,
        schedule: Schedule,
    ) -> Quantity:
        """Train on `[n, 4]` modes and the `[n]` values observed there, from a network or afresh.

        The standard deviation is the root mean square over the held-out modes, drawn towards `usual`. These modes
        chose the best epoch, so it is rather too small.
        """
        network, errors = train(modes, observed, start, loss, schedule)
        variance = (_WEIGHT * usual**2 + float((errors**2).sum())) / (_WEIGHT + len(errors))
        return cls(network, _FLOOR * float(observed.min()), float(np.sqrt(variance)))

    def predict(self, modes: ModeArray) -> tuple[Values, Values]:
        """Value and standard deviation of its logarithm at `[n, 4]` modes, `[n]` each."""
        return np.maximum(self.network(modes), self.floor), np.full(len(modes), self.log_sd)

    def tensors(self, prefix: str) -> Tensors:
        """The quantity as named arrays."""
        return self.network.tensors(prefix) | {f"{prefix}.floor_and_log_sd": np.array([self.floor, self.log_sd])}

    @classmethod
    def read(cls, tensors: Tensors, prefix: str) -> Quantity:
        """Read what `tensors` wrote.

        Raises:
            CorruptReferenceError: an array is missing or of another shape, or floor or deviation are not positive.
        """
        floor, log_sd = read_array(tensors, f"{prefix}.floor_and_log_sd", 2, positive=True).tolist()
        return cls(DenseNetwork.read(tensors, prefix), floor, log_sd)


@dataclass(frozen=True)
class PowerTrainPredictor:
    """A network for time and one for power, tuned from those of a reference.

    Attributes:
        time: milliseconds per minibatch.
        power: milliwatts.
        gpu_hz: `[k]` GPU frequencies among the modes that were fitted. Another kind of board has others.
    """

    name: ClassVar[str] = "powertrain"
    transfers: ClassVar[bool] = True

    time: Quantity
    power: Quantity
    gpu_hz: Values

    @classmethod
    def fit(
        cls, profile: Profile, reference: PowerTrainPredictor | None = None, schedule: Schedule | None = None
    ) -> PowerTrainPredictor:
        """Train a reference on a corpus, or tune a reference to measured modes.

        The loss is the squared error, and the percentage error where a GPU frequency is none of the reference's: the
        paper changed it by hand for "very different device types" (section 4.3.4).

        Args:
            profile: at least `MIN_MODES` modes; their order does not matter.
            reference: the predictor of another workload or device; None trains all layers afresh.
            schedule: how to train; None is the paper's table 4.

        Raises:
            InvalidInputError: too few modes, or torch is not installed.
        """
        far = reference is not None and not np.isin(profile.modes[:, 2], reference.gpu_hz).all()
        starts = (None, None) if reference is None else (reference.time.network, reference.power.network)
        time, power = _fit(profile, starts, "mape" if far else "mse", schedule)
        return cls(time, power, np.unique(profile.modes[:, 2]))

    def adapted(self, of: Hardware, to: Hardware) -> PowerTrainPredictor:
        """Itself: the networks know nothing of hardware."""
        return self

    def predict(self, modes: ModeArray) -> Prediction:
        """Predict `[n, 4]` modes, measured or not."""
        return _predict(self.time, self.power, modes)

    def save(self) -> bytes:
        """The predictor in safetensors format; the same predictor gives the same bytes."""
        return write_tensors(self.time.tensors("time") | self.power.tensors("power") | {"gpu_hz": self.gpu_hz})

    @classmethod
    def load(cls, weights: bytes) -> PowerTrainPredictor:
        """Read what `save` wrote.

        Raises:
            CorruptReferenceError: these bytes hold no such predictor.
        """
        tensors = read_tensors(weights)
        gpu_hz = read_array(tensors, "gpu_hz", tensor_size(tensors, "gpu_hz"), positive=True)
        return cls(Quantity.read(tensors, "time"), Quantity.read(tensors, "power"), gpu_hz)


@dataclass(frozen=True)
class ScratchPredictor:
    """The same networks, trained on the measured modes alone (the paper's baseline "NN").

    Attributes:
        time: milliseconds per minibatch.
        power: milliwatts.
    """

    name: ClassVar[str] = "scratch"
    transfers: ClassVar[bool] = False

    time: Quantity
    power: Quantity

    @classmethod
    def fit(
        cls, profile: Profile, reference: ScratchPredictor | None = None, schedule: Schedule | None = None
    ) -> ScratchPredictor:
        """Train on measured modes.

        Args:
            profile: at least `MIN_MODES` modes; their order does not matter.
            reference: of no effect: nothing carries over.
            schedule: how to train; None is the paper's table 4.

        Raises:
            InvalidInputError: too few modes, or torch is not installed.
        """
        return cls(*_fit(profile, (None, None), "mse", schedule))

    def adapted(self, of: Hardware, to: Hardware) -> ScratchPredictor:
        """Itself: the networks know nothing of hardware."""
        return self

    def predict(self, modes: ModeArray) -> Prediction:
        """Predict `[n, 4]` modes, measured or not."""
        return _predict(self.time, self.power, modes)

    def save(self) -> bytes:
        """The predictor in safetensors format; the same predictor gives the same bytes."""
        return write_tensors(self.time.tensors("time") | self.power.tensors("power"))

    @classmethod
    def load(cls, weights: bytes) -> ScratchPredictor:
        """Read what `save` wrote.

        Raises:
            CorruptReferenceError: these bytes hold no such predictor.
        """
        tensors = read_tensors(weights)
        return cls(Quantity.read(tensors, "time"), Quantity.read(tensors, "power"))


def _fit(
    profile: Profile, starts: tuple[DenseNetwork | None, DenseNetwork | None], loss: Loss, schedule: Schedule | None
) -> tuple[Quantity, Quantity]:
    """Train the networks for time and power."""
    if len(profile) < MIN_MODES:
        raise InvalidInputError(
            f"{len(profile)} measured modes are too few to fit a predictor: measure at least {MIN_MODES}"
        )
    if schedule is None:
        schedule = Schedule()
    if len(profile) >= MIN_CORPUS_MODES:
        # A profile holds a median for each mode: thousands of them need no repetition.
        schedule = replace(schedule, entries=1)
    profile = profile.rows(np.lexsort(profile.modes.T))
    modes = profile.modes
    return (
        Quantity.fit(modes, profile.minibatch_ms, starts[0], loss, _TIME_LOG_SD, schedule),
        Quantity.fit(modes, profile.power_mw, starts[1], loss, _POWER_LOG_SD, schedule),
    )


def _predict(time: Quantity, power: Quantity, modes: ModeArray) -> Prediction:
    minibatch_ms, time_log_sd = time.predict(modes)
    power_mw, power_log_sd = power.predict(modes)
    return Prediction(minibatch_ms, power_mw, time_log_sd, power_log_sd)
