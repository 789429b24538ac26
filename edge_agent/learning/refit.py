"""Refits a predictor to the journal, and cross-validates it by leaving out one measured mode at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge_agent.learning.transfer import (
    Transfer,
    keep_predictor,
    keep_reference,
    reference_of,
    references_of,
)
from edge_agent.profiling.stored_profile import (
    MeasuredProfile,
    WorkloadFolders,
    chosen_workload,
    read_predictor,
    read_profile,
)
from reference_models import named_reference
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import PowerMode, array_to_modes
from wattfleet.core.prediction import Artefact, Predictor, RooflinePredictor


@dataclass(frozen=True)
class LeftOut:
    """The prediction of a mode from all other measured modes.

    Attributes:
        mode: the mode.
        minibatch_ms: measured time, ms.
        power_w: measured power, W.
        time_error: relative error of the predicted time; positive if it is too long.
        power_error: relative error of the predicted power; positive if it is too high.
    """

    mode: PowerMode
    minibatch_ms: float
    power_w: float
    time_error: float
    power_error: float


@dataclass(frozen=True)
class Refit:
    """A refitted predictor.

    Attributes:
        measured: the measurements.
        folder: where the predictor is stored.
        predictor: the predictor.
        artefact: the predictor as it is stored.
        left_out: one cross-validation result per mode; None if there is no other mode, the fit is to a whole corpus, or
            the predictor is not a roofline predictor.
    """

    measured: MeasuredProfile
    folder: Path
    predictor: Predictor
    artefact: Artefact
    left_out: Sequence[LeftOut] | None


def refit(
    state_directory: Path, workload: str | None, reference: str | None, minibatches_per_epoch: int | None
) -> Refit:
    """Fit the predictor of a workload to its journal, and store it.

    Args:
        state_directory: the agent's state directory.
        workload: name of the workload; None if there is only one.
        reference: the predictor to transfer from, as for `named_reference`. None uses the stored predictor's reference,
            or no reference if it was fitted without one.
        minibatches_per_epoch: minibatches of one pass over the device's data; None uses the stored predictor's number,
            or else the reference's.

    Raises:
        InvalidInputError: no mode was measured, or no reference is known.
        JournalError: the journal is damaged.
        CorruptReferenceError: the reference or the stored predictor is damaged.
    """
    chosen = chosen_workload(state_directory, workload)
    known, folder = chosen.known, chosen.folder
    measured = read_profile(folder, known.workload.facts.batch)
    if measured is None or not len(measured.profile):
        raise InvalidInputError(
            f"{state_directory}: no mode has been measured yet: run `wattfleet agent profile`, or pass the agent's "
            f"directory with --state-dir"
        )
    stored = read_predictor(folder)
    if reference is not None:
        references: tuple[Artefact, ...] = (named_reference(reference),)
        details = (stored or references[0]).details
    elif stored is not None:
        references = tuple(reference_of(digest, state_directory) for digest in references_of(stored))
        details = stored.details
    else:
        raise InvalidInputError(
            f"{state_directory}: no predictor has been fitted yet: pass the reference to transfer from with --reference"
        )
    per_epoch = minibatches_per_epoch or details.workload.minibatches_per_epoch
    transfer = Transfer(references, measured.header, per_epoch, known.workload.facts)
    predictor = transfer.fitted(measured.profile, transfer.priors())
    fitted = transfer.packed(predictor, measured.measured_modes)
    for each in references:
        keep_reference(each, state_directory)
    keep_predictor(fitted, folder)
    if minibatches_per_epoch is not None and folder != state_directory:
        WorkloadFolders(state_directory).note(known.completed(known.workload.facts, minibatches_per_epoch))
    return Refit(measured, folder, predictor, fitted, _left_out(measured, predictor))


def _left_out(measured: MeasuredProfile, predictor: Predictor) -> Sequence[LeftOut] | None:
    if not isinstance(predictor, RooflinePredictor) or len(measured.profile) < 2:
        return None
    time, power = predictor.likeliest.time_remainder.correction, predictor.likeliest.power_remainder.correction
    if not len(time.weights):
        return None
    (of_time, _), (of_power, _) = time.left_out(), power.left_out()
    profile = measured.profile
    columns = (profile.minibatch_ms, profile.power_mw / 1e3, np.expm1(-of_time), np.expm1(-of_power))
    rows = np.stack(columns, axis=1).tolist()
    return [LeftOut(mode, *row) for mode, row in zip(array_to_modes(profile.modes), rows, strict=True)]
