"""Fits a device's predictor to its measurements, and chooses the modes to measure next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from edge_agent.learning.transfer import Transfer
from edge_agent.profiling.known_workload import KnownWorkload
from edge_agent.profiling.stored_profile import own_batch, own_rows
from wattfleet.choosing import SamplingSettings, next_modes
from wattfleet.modes import ModeArray, Profile
from wattfleet.prediction import Artefact, Prediction, Predictor


@dataclass(frozen=True)
class Fitted:
    """A device's predictor and its prediction.

    Attributes:
        artefact: the predictor as it is stored.
        prediction: the prediction for each of the device's modes, in their order, with the batch size of the fit.
        by_batch: the same for each batch size that a plan may choose.
    """

    artefact: Artefact
    prediction: Prediction
    by_batch: Mapping[int, Prediction] = field(default_factory=dict)


class Fitting(Protocol):
    """Fits the predictor of one device."""

    def fit(self, profile: Profile, measured_modes: int) -> Fitted:
        """Transfer the references to the device, and return the fitted predictor.

        Args:
            profile: measurements, and observations of rounds.
            measured_modes: number of measured modes.

        Raises:
            WattfleetError: the reference cannot be transferred.
        """
        ...

    def next_modes(self, profile: Profile, settings: SamplingSettings, exclude: ModeArray) -> ModeArray:
        """Return `[m, 4]` modes to measure next, chosen by `wattfleet.choosing.sampling.next_modes`.

        Args:
            profile: measurements and observations so far.
            settings: how many modes to choose, and when to stop.
            exclude: `[k, 4]` modes that must not be measured.

        Raises:
            WattfleetError: the reference cannot be transferred.
        """
        ...


OpenFitting = Callable[[], AbstractContextManager[Fitting]]
"""Opens a fitting; leaving the block releases its resources."""

OpenFittingTo = Callable[[KnownWorkload], AbstractContextManager[Fitting]]
"""Opens a fitting to a workload, with its current batch and length."""


class FittingHere:
    """Fits in this process.

    Args:
        transfer: the references and the device.
        modes: `[n, 4]` modes of the device.

    Raises:
        UnusableReferenceError: the reference cannot be used as a predictor for this device.
    """

    def __init__(self, transfer: Transfer, modes: ModeArray) -> None:
        self._transfer = transfer
        self._modes = modes
        self._priors = transfer.priors()

    def fit(self, profile: Profile, measured_modes: int) -> Fitted:
        """See `Fitting.fit`."""
        predictor, n = self._fitted(profile), len(self._modes)
        by_batch = {batch: predictor.predict(self._modes, np.full(n, batch)) for batch in self._transfer.batches}
        packed = self._transfer.packed(predictor, measured_modes)
        return Fitted(packed, self._predicted(predictor, profile), by_batch)

    def next_modes(self, profile: Profile, settings: SamplingSettings, exclude: ModeArray) -> ModeArray:
        """See `Fitting.next_modes`."""
        # Modes measured with another batch help to predict, but still have to be measured with this batch.
        own = own_rows(profile, self._transfer.batch)
        return next_modes(
            own, self._modes, lambda _: self._predicted(self._fitted(profile), profile), settings, exclude=exclude
        )

    def _predicted(self, predictor: Predictor, profile: Profile) -> Prediction:
        batch = own_batch(profile, self._transfer.batch, len(self._modes))
        return predictor.predict(self._modes, batch)

    def _fitted(self, profile: Profile) -> Predictor:
        return self._transfer.fitted(profile, self._priors)
