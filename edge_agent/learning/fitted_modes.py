"""The modes of a device as one fit predicts them, with every batch size that a plan may choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edge_agent.profiling.known_workload import KnownWorkload
from wattfleet.choosing import Front, predicted_front
from wattfleet.errors import InvalidInputError
from wattfleet.modes import ModeArray, PowerMode, Workload, modes_to_array
from wattfleet.prediction import Prediction

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


def _dependencies(known: KnownWorkload) -> tuple[Workload, tuple[int, ...]]:
    """Return what a fit depends on. The trained batch size is not part of it if a fit predicts several."""
    workload, offered = known.workload, known.offered_batches
    if offered:
        workload = replace(workload, facts=replace(workload.facts, batch=None, step_flops=None))
    return workload, offered
