"""What every predictor of time and power offers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from wattfleet.modes import Board, Hardware, ModeArray, Profile
from wattfleet.prediction.quantiles import normal_quantile

Values = NDArray[np.float64]
P = TypeVar("P", bound="Predictor")

MIN_MODES = 5
"""Every kind of predictor can be fitted to this many measured modes, with a reference or without."""

MIN_CORPUS_MODES = 400
"""From this many modes on, a profile is a corpus: it makes a reference, and may be fitted in another way."""


@dataclass(frozen=True)
class Prediction:
    """Predicted time and power at `n` modes; the logarithms are taken as normally distributed.

    Attributes:
        minibatch_ms: `[n]` median milliseconds per minibatch.
        power_mw: `[n]` median board milliwatts while training.
        time_log_sd: `[n]` standard deviation of the logarithm of the time (0.03 is about 3 %).
        power_log_sd: `[n]` standard deviation of the logarithm of the power.
    """

    minibatch_ms: Values
    power_mw: Values
    time_log_sd: Values
    power_log_sd: Values

    def among(self, chosen: NDArray[np.bool_]) -> Prediction:
        """What is predicted for some of the modes.

        Args:
            chosen: `[n]` which of them.
        """
        return Prediction(*(getattr(self, column.name)[chosen] for column in fields(self)))

    def minibatch_ms_quantile(self, q: float) -> Values:
        """The time that is not exceeded with probability `q`, `[n]` ms."""
        return np.asarray(self.minibatch_ms * np.exp(normal_quantile(q) * self.time_log_sd))

    def power_mw_quantile(self, q: float) -> Values:
        """The power that is not exceeded with probability `q`, `[n]` mW."""
        return np.asarray(self.power_mw * np.exp(normal_quantile(q) * self.power_log_sd))


class Predictor(Protocol):
    """A fitted predictor of one workload on one device.

    Classes may take further options where they are fitted; none is needed.

    Attributes:
        transfers: whether a reference changes what this kind of predictor predicts.
    """

    transfers: ClassVar[bool]

    @property
    def name(self) -> str:
        """The kind of predictor, as manifests and command lines name it."""
        ...

    @classmethod
    def fit(cls: type[P], profile: Profile, reference: P | None = None) -> P:
        """Fit to measured modes; with a reference of the same class, transfer it.

        Raises:
            InvalidInputError: the profile holds too few modes for this kind of predictor.
        """
        ...

    def adapted(self: P, of: Hardware, to: Hardware) -> P:
        """What to transfer from on another board: scaled by what the data sheets say of the two.

        Kinds that know nothing of hardware are returned as they are.
        """
        ...

    def predict(self, modes: ModeArray) -> Prediction:
        """Predict `[n, 4]` modes, measured or not: finite and positive everywhere."""
        ...

    def save(self) -> bytes:
        """The predictor in safetensors format; the same predictor gives the same bytes."""
        ...

    @classmethod
    def load(cls: type[P], weights: bytes) -> P:
        """Read what `save` wrote.

        Raises:
            CorruptReferenceError: these bytes hold no such predictor.
        """
        ...


def adapt_to_board(predictor: P, of: Board | None, to: Board | None) -> P:
    """A predictor as a start on another board: adapted where both boards are known, as it is elsewhere."""
    return predictor if of is None or to is None else predictor.adapted(of.hardware, to.hardware)
