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
"""Makes of `[n, 4]` modes and the predictions of a training alone those beside a device's other duties."""


class NoFrontError(InvalidInputError):
    """The device's duty leaves nothing to plan a training with; the message says why."""


def alone(modes: ModeArray, prediction: Prediction) -> tuple[ModeArray, Prediction]:
    """Leave them as they are, since the device has no other duties."""
    return modes, prediction


@dataclass(frozen=True)
class FittedModes:
    """What one fit tells of a device's modes. It stays valid while only the batch of the training changes.

    Attributes:
        modes: `[n, 4]` modes of the device.
        at_fit: the prediction of each of them, with the batch size of the fit.
        by_batch: the same with each batch size that a plan may choose; empty if it may choose none.
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
        """Whether the fit does not take into account what is known of the workload now."""
        return _dependencies(self.basis) != _dependencies(known)

    def prediction(self, known: KnownWorkload) -> Prediction:
        """Of each of the modes, with the batch size of the latest training."""
        return self.by_batch.get(known.workload.facts.batch or 0, self.at_fit)

    def at(self, mode: PowerMode, known: KnownWorkload) -> Prediction:
        """Of one mode, with the batch size of the latest training.

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
        """The front, over all batch sizes if the fit has predicted those that are offered now, and its workload.

        Args:
            known: what is known of the workload now.
            allowed: `[n]` modes that do not overload the board.
            first_gcycles: CPU cycles of a training's first minibatch, in units of 1e9; 0 if unknown.
            beside: what the device's other duties leave for a training.

        Raises:
            ImplausibleError: no mode's prediction is plausible.
            NoFrontError: no batch size leaves anything beside the device's other duties.
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
        """The front over modes alone, with the batch size of the latest training; see `front`."""
        modes, prediction = beside(*self.of_own_batch(known, allowed))
        return predicted_front(modes, prediction, known.counted_minibatches, first_gcycles)

    def alone_in(self, mode: PowerMode, known: KnownWorkload, first_gcycles: float) -> Front:
        """A front of one mode, without other duties and with the batch size of the latest training; see `front`.

        Raises:
            ImplausibleError: its prediction is not plausible.
            InvalidInputError: the device does not offer the mode.
        """
        one = self.at(mode, known)
        return predicted_front(modes_to_array([mode]), one, known.counted_minibatches, first_gcycles)

    def of_own_batch(self, known: KnownWorkload, allowed: Mask) -> tuple[ModeArray, Prediction]:
        """The allowed modes, and the prediction of each with the batch size of the latest training."""
        return self.modes[allowed], self.prediction(known).among(allowed)


def _dependencies(known: KnownWorkload) -> tuple[Workload, tuple[int, ...]]:
    """What a fit depends on: it predicts all batch sizes that a plan may choose, whichever is trained."""
    workload, offered = known.workload, known.offered_batches
    if offered:
        workload = replace(workload, facts=replace(workload.facts, batch=None, step_flops=None))
    return workload, offered
