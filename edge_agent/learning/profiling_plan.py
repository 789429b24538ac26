"""Which modes an agent measures, and in which order: first spread over the space, then along the predicted front."""

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
"""Modes chosen between two fits: a fit and a prediction of all modes take a board's own cores a second or so."""


@dataclass(frozen=True)
class Progress:
    """How far a profile is.

    Attributes:
        done: modes measured.
        total: modes that will be, unless it ends early.
        detail: the last one, in words.
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

    A few fill the space; the rest are those that would be chosen under budgets along the predicted front, in batches
    with a fit before each: the best of thousands of predicted modes is too good to be true until it was measured
    (see `docs/choosing.md`). It ends early once no measurement promises a better choice.

    Args:
        device: the board.
        open_steps: begins what is trained; not called where nothing is left to be measured.
        journal: what was measured before; what is measured now is added, so a restart goes on where it stopped.
        fitting: fits the device's predictor.
        limit: modes to measure at most.
        seed: of the spread modes.
        report: called after every measured mode.
        tolerance: the share by which a choice must still promise to get faster for it to go on.

    Returns:
        What was fitted at the end; the journal has what it was fitted to.
    """
    settings = SamplingSettings(limit=min(limit, len(device.modes)), batch=BATCH, tolerance=tolerance, seed=seed)
    profiler = Profiler(device)

    def measured() -> Profile:
        return Profile.of(journal.measurements)

    def choose() -> ModeArray:
        return fitting.next_modes(measured(), settings, ExcludedModes.of(journal).given_up)

    if not journal.measurements and len(ExcludedModes.of(journal).given_up) >= len(device.modes):
        # Not even one mode could be measured: that was the board's state, not the modes', and may be over by now.
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
