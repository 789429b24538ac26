"""Predicts from a reference what profiling would cost on a board, and recommends a profiling method."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from edge_agent.profiling.measuring_time import measuring_s
from wattfleet.choosing import MEASURED_LOSSES, Advice, BoardFigures, WorkloadChanges, compare_methods
from wattfleet.choosing import descending_modes as descending
from wattfleet.errors import InvalidInputError
from wattfleet.modes import BOARDS, ModeArray, Task
from wattfleet.prediction import Artefact, restore_predictor


def board_figures(
    reference: Artefact, board_kind: str, modes: ModeArray, minibatch_ms: float | None = None
) -> BoardFigures:
    """Predict a board before anything is measured.

    Args:
        reference: the predictor to transfer from.
        board_kind: the board, such as `agx-orin`; the reference is adapted to it if it is known.
        modes: `[n, 4]` modes of the board.
        minibatch_ms: milliseconds of the workload's minibatch in the board's highest mode; all predicted times are
            scaled to it. None uses the workload of the reference.

    Raises:
        InvalidInputError: the reference is for another task, or a number is out of range.
        CorruptReferenceError: the reference is damaged.
    """
    facts = reference.details.facts
    if facts is not None and facts.task is not Task.TRAINING:
        raise InvalidInputError(f"the reference is for {facts.task}: choose a reference for training")
    predicted = restore_predictor(reference, BOARDS.get(board_kind)).predict(modes)
    if minibatch_ms is not None:
        if not 0 < minibatch_ms < float("inf"):
            raise InvalidInputError(f"--minibatch-ms must be finite and above 0, not {minibatch_ms:g}")
        highest = int((modes == descending(modes)[0]).all(axis=1).argmax())
        scaled = predicted.minibatch_ms * (minibatch_ms / predicted.minibatch_ms[highest])
        predicted = replace(predicted, minibatch_ms=np.asarray(scaled))
    return BoardFigures(modes, predicted, measuring_s(modes, predicted.minibatch_ms))


def advised_profile(board: BoardFigures, training_h: float, changes: WorkloadChanges, budgets: int) -> Advice:
    """Return the advice for a profile to be measured now.

    Args:
        board: the board.
        training_h: hours of all training planned.
        changes: how often the workload changes during these hours.
        budgets: number of budgets known in advance.

    Raises:
        InvalidInputError: a number is out of range.
    """
    losses = [loss for loss in MEASURED_LOSSES if loss.limit != 0]
    return compare_methods(board, training_h, changes, budgets or None, losses)
