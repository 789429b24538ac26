"""Fits a device's predictor to its measurements, and chooses the modes to measure next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edge_agent.learning.transfer import Transfer
from edge_agent.profiling.known_workload import KnownWorkload
from edge_agent.profiling.stored_profile import own_batch, own_rows
from wattfleet.core.choosing import Front, SamplingSettings, next_modes, predicted_front
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import (
    JournalHeader,
    ModeArray,
    PowerMode,
    Profile,
    Task,
    Workload,
    WorkloadFacts,
    modes_to_array,
)
from wattfleet.core.prediction import Artefact, Prediction, Predictor

# --- Fitted modes -----------------------------------------------------------------------------------------------------
# The modes of a device as one fit predicts them, with every batch size that a plan may choose.


Mask = NDArray[np.bool_]

Beside = Callable[[ModeArray, Prediction], tuple[ModeArray, Prediction]]
"""Converts `[n, 4]` modes and the predictions of a training without duties into those beside the device's duty."""


class NoFrontError(InvalidInputError):
    """The device's duty leaves no mode to plan a training with; the message gives the reason."""


def alone(modes: ModeArray, prediction: Prediction) -> tuple[ModeArray, Prediction]:
    """Return modes and predictions unchanged, since the device has no other duties."""
    return modes, prediction


@dataclass(frozen=True)
class FittedModes:
    """The predictions of one fit for a device's modes. It stays valid while only the batch of the training changes.

    Attributes:
        modes: `[n, 4]` modes of the device.
        at_fit: the prediction for each of these modes, with the batch size of the fit.
        by_batch: the same for each batch size that a plan may choose; empty if a plan may not choose one.
        basis: what was known of the workload when the fit began.
    """

    modes: ModeArray
    at_fit: Prediction
    by_batch: Mapping[int, Prediction]
    basis: KnownWorkload

    @property
    def has_choice(self) -> bool:
        """Whether the fit predicts several batch sizes, of which a plan may choose one."""
        return bool(self.by_batch)

    def is_outdated(self, known: KnownWorkload) -> bool:
        """Return whether more is known of the workload now than when the fit began."""
        return _dependencies(self.basis) != _dependencies(known)

    def prediction(self, known: KnownWorkload) -> Prediction:
        """Return the prediction for each mode, with the batch size of the latest training."""
        return self.by_batch.get(known.workload.facts.batch or 0, self.at_fit)

    def at(self, mode: PowerMode, known: KnownWorkload) -> Prediction:
        """Return the prediction for one mode, with the batch size of the latest training.

        Raises:
            InvalidInputError: the device does not offer the mode.
        """
        is_mode = (self.modes == modes_to_array([mode])).all(axis=1)
        if not is_mode.any():
            raise InvalidInputError(f"this device does not offer the mode {mode.label()}")
        return self.prediction(known).among(is_mode)

    def front(
        self, known: KnownWorkload, allowed: Mask, first_gcycles: float, beside: Beside = alone
    ) -> tuple[Front, Workload]:
        """Return the front and its workload; the front has all batch sizes offered now, if the fit has predicted them.

        Args:
            known: what is known of the workload now.
            allowed: `[n]` booleans: whether the mode does not overload the board.
            first_gcycles: CPU cycles of a training's first minibatch, in units of 1e9; 0 if unknown.
            beside: converts predictions of a training without duties into those beside the device's duty.

        Raises:
            ImplausibleError: no mode's prediction is plausible.
            NoFrontError: the device's other duties leave no mode for any batch size.
        """
        by_batch = self.by_batch
        if not by_batch or tuple(by_batch) != known.offered_batches:
            return self.front_of_own_batch(known, allowed, first_gcycles, beside), self.basis.workload
        left: dict[int, tuple[ModeArray, Prediction]] = {}
        why_none: NoFrontError | None = None
        for size, each in by_batch.items():
            try:
                left[size] = beside(self.modes[allowed], each.among(allowed))
            except NoFrontError as error:
                why_none = why_none or error
        if why_none is not None and not left:
            raise why_none
        counts = [len(modes) for modes, _ in left.values()]
        per_epoch = np.repeat([known.minibatches_of(size) for size in left], counts)
        batch = np.repeat(list(left), counts)
        modes = np.vstack([modes for modes, _ in left.values()])
        prediction = Prediction.joined([each for _, each in left.values()])
        return predicted_front(modes, prediction, per_epoch, first_gcycles, batch), known.workload

    def front_of_own_batch(
        self, known: KnownWorkload, allowed: Mask, first_gcycles: float, beside: Beside = alone
    ) -> Front:
        """Return the front for the batch size of the latest training only; see `front`."""
        modes, prediction = beside(*self.of_own_batch(known, allowed))
        return predicted_front(modes, prediction, known.counted_minibatches, first_gcycles)

    def alone_in(self, mode: PowerMode, known: KnownWorkload, first_gcycles: float) -> Front:
        """Return a front of one mode, without other duties and for the batch size of the latest training; see `front`.

        Raises:
            ImplausibleError: its prediction is not plausible.
            InvalidInputError: the device does not offer the mode.
        """
        one = self.at(mode, known)
        return predicted_front(modes_to_array([mode]), one, known.counted_minibatches, first_gcycles)

    def of_own_batch(self, known: KnownWorkload, allowed: Mask) -> tuple[ModeArray, Prediction]:
        """Return the allowed modes, and the prediction for each with the batch size of the latest training."""
        return self.modes[allowed], self.prediction(known).among(allowed)


def _dependencies(known: KnownWorkload) -> tuple[Workload, tuple[int, ...], bool]:
    """Return what a fit depends on. The trained batch size is not part of it if a fit predicts several."""
    workload, offered = known.workload, known.offered_batches
    if offered:
        workload = replace(workload, facts=replace(workload.facts, batch=None, step_flops=None))
    # The rows of an estimated length are dropped once the app reports its own.
    return workload, offered, known.is_length_estimated


# --- Fitting ----------------------------------------------------------------------------------------------------------


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
        """Return `[m, 4]` modes to measure next, chosen by `wattfleet.core.choosing.sampling.next_modes`.

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


# --- Inference fitting ------------------------------------------------------------------------------------------------
# Predicts inference on a device from the same references as its training.


@dataclass(frozen=True)
class InferenceFitting:
    """Fits predictors of inference from one set of references.

    Attributes:
        references: the predictors to transfer from, the most important first.
        header: describes the device; its workload and batch size are replaced.
        others_of: returns the stored predictors of the device's other workloads, given the workload to predict.
        open_fitting: opens a fitting for a transfer.
    """

    references: Sequence[Artefact]
    header: JournalHeader
    others_of: Callable[[str], tuple[Artefact, ...]]
    open_fitting: Callable[[Transfer], AbstractContextManager[Fitting]]

    def __call__(self, workload: str, batches: tuple[int, ...], rows: Profile) -> Mapping[int, Prediction]:
        """Return predictions for all modes of the device, by batch size.

        Args:
            workload: name of the inference workload.
            batches: the batch sizes to predict.
            rows: measured rows of the workload; may be empty.

        Raises:
            WattfleetError: no predictor can be fitted.
        """
        transfer = Transfer(
            tuple(self.references),
            replace(self.header, workload=workload, minibatch=max(batches)),
            1,
            WorkloadFacts(Task.INFERENCE),
            self.others_of(workload),
            (),
            batches,
        )
        with self.open_fitting(transfer) as fitting:
            return fitting.fit(rows, len(rows)).by_batch
