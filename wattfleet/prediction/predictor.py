"""The interface of all predictors of time and power."""

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
"""Fewest measured modes to which every kind of predictor can be fitted, with or without a reference."""

MIN_CORPUS_MODES = 400
"""Fewest modes of a corpus: a profile that is large enough to train a reference, and may be fitted differently."""


@dataclass(frozen=True)
class Prediction:
    """Predicted time and power at `n` modes; their logarithms are modelled as normally distributed.

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
        """The same for some of the modes.

        Args:
            chosen: `[n]` true for the modes to keep.
        """
        return Prediction(*(getattr(self, column.name)[chosen] for column in fields(self)))

    def minibatch_ms_quantile(self, q: float) -> Values:
        """The `q` quantile of the time, `[n]` ms."""
        return np.asarray(self.minibatch_ms * np.exp(normal_quantile(q) * self.time_log_sd))

    def power_mw_quantile(self, q: float) -> Values:
        """The `q` quantile of the power, `[n]` mW."""
        return np.asarray(self.power_mw * np.exp(normal_quantile(q) * self.power_log_sd))


class Predictor(Protocol):
    """A fitted predictor of one workload on one device.

    The `fit` of a class may take further options, all with defaults.

    Attributes:
        transfers: whether a reference changes what this kind of predictor predicts.
    """

    transfers: ClassVar[bool]

    @property
    def name(self) -> str:
        """The kind of predictor, as named in manifests and on command lines."""
        ...

    @classmethod
    def fit(cls: type[P], profile: Profile, reference: P | None = None) -> P:
        """Fit to measured modes, or transfer a reference of the same class to them.

        Raises:
            InvalidInputError: the profile holds too few modes for this kind of predictor.
        """
        ...

    def adapted(self: P, of: Hardware, to: Hardware) -> P:
        """This predictor scaled to another board by the two boards' data sheets, as a start for a transfer.

        Kinds that do not model hardware return themselves.
        """
        ...

    def predict(self, modes: ModeArray) -> Prediction:
        """Predict `[n, 4]` modes, measured or not; all values are finite and positive."""
        ...

    def save(self) -> bytes:
        """Serialize in safetensors format; the same predictor gives the same bytes."""
        ...

    @classmethod
    def load(cls: type[P], weights: bytes) -> P:
        """Read what `save` wrote.

        Raises:
            CorruptReferenceError: the bytes do not hold such a predictor.
        """
        ...


def adapt_to_board(predictor: P, of: Board | None, to: Board | None) -> P:
    """Adapt a predictor to another board if both boards are known; otherwise return it unchanged."""
    return predictor if of is None or to is None else predictor.adapted(of.hardware, to.hardware)
