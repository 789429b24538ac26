"""Measures a device's modes: first spread over the mode space, then along the predicted front."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass

from edge_agent.devices.device import Device
from edge_agent.learning.fitting import Fitted, Fitting
from edge_agent.profiling.excluded_modes import ExcludedModes
from edge_agent.profiling.journal import Journal
from edge_agent.profiling.journal_records import Renewal
from edge_agent.profiling.profiler import Profiler
from edge_agent.workloads.step import OpenSteps
from wattfleet.choosing import SamplingSettings
from wattfleet.modes import ModeArray, Profile, array_to_modes

BATCH = 3
"""Modes measured between two fits; fitting and predicting all modes take a board about a second."""


@dataclass(frozen=True)
class Progress:
    """The progress of a profile.

    Attributes:
        done: modes measured.
        total: modes to measure, unless it stops early.
        detail: the last step, in words.
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
    report: Callable[[Progress], None],
    tolerance: float = SamplingSettings.tolerance,
) -> Fitted:
    """Measure up to `limit` modes and fit the device's predictor to them.

    A few modes are spread over the mode space. The rest are those that would be chosen under budgets along the
    predicted front, in batches with a fit before each. The best of thousands of predictions tends to be too optimistic
    until it is measured (see `docs/choosing.md`). Measuring stops early if no further measurement is expected
    to help.

    Args:
        device: the board.
        open_steps: starts the workload; not called if nothing is left to measure.
        journal: earlier measurements; new ones are appended, so a restart continues where it stopped.
        fitting: fits the device's predictor.
        limit: maximum number of modes to measure.
        seed: random seed of the spread modes.
        report: receives the progress after every mode.
        tolerance: stop once no measurement is expected to shorten a step by more than this share.

    Returns:
        The final fit, to all modes in the journal.
    """
    settings = SamplingSettings(limit=min(limit, len(device.modes)), batch=BATCH, tolerance=tolerance, seed=seed)
    profiler = Profiler(device)

    def measured() -> Profile:
        return Profile.of(journal.measurements)

    def choose() -> ModeArray:
        return fitting.next_modes(measured(), settings, ExcludedModes.of(journal).given_up)

    if not journal.measurements and len(ExcludedModes.of(journal).given_up) >= len(device.modes):
        # No mode could be measured, so the cause was the board, not the modes; it may have recovered.
        bound = len(device.modes) if journal.renewal is None else journal.renewal.modes
        journal.append(Renewal("no mode could be measured", bound))
    chosen = choose()
    with open_steps() if len(chosen) else nullcontext() as step:
        while step is not None and len(chosen):
            with closing(profiler.profile(array_to_modes(chosen), step, journal)) as records:
                for record in records:
                    report(Progress(len(journal.records), settings.limit, f"measured {record.mode.label()}"))
            chosen = choose()
    return fitting.fit(measured(), len(journal.records))
