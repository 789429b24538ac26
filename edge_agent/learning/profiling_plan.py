"""Measures a device's modes, as a profiling method selects them, and fits the device's predictor to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace

import numpy as np

from edge_agent.devices.device import Device
from edge_agent.learning.fitting import Fitted, Fitting
from edge_agent.profiling.journal import Journal
from edge_agent.profiling.mode_measurement import ExcludedModes, measuring_s
from edge_agent.profiling.profiler import Profiler
from edge_agent.workloads.loading import OpenSteps
from wattfleet.core.choosing import (
    MEASURED_LOSSES,
    Advice,
    BoardFigures,
    SamplingSettings,
    WorkloadChanges,
    compare_methods,
    descending_modes,
    grid_modes,
    search_within_budgets,
)
from wattfleet.core.choosing import descending_modes as descending
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import (
    BOARDS,
    MethodRecord,
    ModeArray,
    PowerMode,
    Profile,
    ProfilingMethod,
    Renewal,
    Task,
    array_to_modes,
    modes_to_array,
)
from wattfleet.core.prediction import Artefact, restore_predictor

# --- Method advice ----------------------------------------------------------------------------------------------------
# Predicts from a reference what profiling would cost on a board, and recommends a profiling method.


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


# --- Profiling plan ---------------------------------------------------------------------------------------------------

BATCH = 3
"""Modes measured between two fits; on a board, fitting and predicting all modes takes about a second."""


@dataclass(frozen=True)
class ProfilingProgress:
    """The progress of a profile.

    Attributes:
        done: modes measured.
        total: modes to measure, unless it stops early.
        detail: describes the last step.
    """

    done: int
    total: int
    detail: str


def profile_device(
    device: Device,
    open_steps: OpenSteps,
    journal: Journal,
    fitting: Fitting,
    limit: int,
    seed: int,
    report: Callable[[ProfilingProgress], None],
    tolerance: float = SamplingSettings.tolerance,
    method: ProfilingMethod = ProfilingMethod.TRANSFER,
    budgets_mw: Sequence[float] = (),
) -> Fitted:
    """Measure up to `limit` modes and fit the device's predictor to them.

    - `transfer`, `scratch`: A few modes are spread over the mode space. The others are those that would be chosen under
    budgets along the predicted front, in batches with a fit before each. The best of thousands of predictions tends
      to be too optimistic until it is measured (see `docs/choosing.md`). Measuring stops early if no further
      measurement is expected to help.
    - `binary-search`: the modes that a search for each budget measures.
    - `grid`: the modes of a uniform grid, in descending order.
    - `brute-force`: every mode, in descending order.

    Args:
        device: the board.
        open_steps: starts the workload; not called if nothing is left to measure.
        journal: earlier measurements; new ones are appended, so a restart continues where it stopped.
        fitting: fits the device's predictor.
        limit: maximum number of modes to measure.
        seed: random seed for the spread modes.
        report: called with the progress after every mode.
        tolerance: stop once no measurement is expected to shorten a step by more than this share.
        method: the method that selects the modes. It is recorded in the journal before the first mode that it selects.
        budgets_mw: the budgets of `binary-search`, mW.

    Returns:
        The final fit, to all modes in the journal.
    """
    settings = SamplingSettings(limit=min(limit, len(device.modes)), batch=BATCH, tolerance=tolerance, seed=seed)
    profiler = Profiler(device)

    def measured() -> Profile:
        return Profile.of(journal.measurements)

    def choose() -> ModeArray:
        if method is ProfilingMethod.BINARY_SEARCH:
            return _searched_modes(device, journal, budgets_mw)[: max(0, settings.limit - len(journal.measurements))]
        if method is ProfilingMethod.GRID:
            return _missing_modes(grid_modes(device.modes, settings.limit), device, journal)
        if method is ProfilingMethod.BRUTE_FORCE:
            return _missing_modes(device.modes, device, journal)
        left_out = modes_to_array(profiler.left_out)
        return fitting.next_modes(
            measured(), settings, np.vstack([ExcludedModes.of(journal).not_tried(device.modes), left_out])
        )

    if not journal.measurements and len(ExcludedModes.of(journal).not_tried(device.modes)) >= len(device.modes):
        # Since no mode could be measured, the cause was the board, not the modes; it may have recovered.
        bound = len(device.modes) if journal.renewal is None else journal.renewal.modes
        journal.append(Renewal("no mode could be measured", bound))
    chosen = choose()
    if len(chosen) and journal.method is not method:
        journal.append(MethodRecord(str(method)))
    with open_steps() if len(chosen) else nullcontext() as step:
        while step is not None and len(chosen):
            with closing(profiler.profile(array_to_modes(chosen), step, journal)) as records:
                for record in records:
                    report(ProfilingProgress(len(journal.records), settings.limit, f"measured {record.mode.label()}"))
            chosen = choose()
    return fitting.fit(measured(), len(journal.records))


def _searched_modes(device: Device, journal: Journal, budgets_mw: Sequence[float]) -> ModeArray:
    """Return the next mode of every unfinished search, in descending order."""
    # A mode that the board does not sustain is too high for any budget, so the search continues below it.
    power_mw = dict.fromkeys(array_to_modes(ExcludedModes.of(journal).not_tried(device.modes)), math.inf)
    power_mw |= {measurement.mode: measurement.power_mw for measurement in journal.measurements}
    missing: set[PowerMode] = set()

    def power_of(mode: PowerMode) -> float | None:
        if mode not in power_mw:
            missing.add(mode)
        return power_mw.get(mode)

    search_within_budgets(device.modes, budgets_mw, power_of)
    return descending_modes(modes_to_array(missing))


def _missing_modes(wanted: ModeArray, device: Device, journal: Journal) -> ModeArray:
    """Return those of `[n, 4]` modes that are neither measured nor given up, in descending order."""
    given_up = set(array_to_modes(ExcludedModes.of(journal).not_tried(device.modes)))
    missing = journal.remaining(array_to_modes(descending_modes(wanted)))
    return modes_to_array(mode for mode in missing if mode not in given_up)
