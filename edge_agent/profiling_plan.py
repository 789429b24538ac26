"""Which modes an agent measures, and in which order: first spread over the space, then near the predicted front."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edge_agent.devices.device import SoftDevice
from edge_agent.journal import Journal
from edge_agent.profiler import Profiler
from wattfleet.modes import ModeArray, as_array, as_modes
from wattfleet.profile import Profile
from wattfleet.roofline import FEWEST_MODES, RooflinePredictor
from wattfleet.sampling import front_modes, spread_modes

_SPREAD_SHARE = 0.6
_FRONT_BATCH = 5


@dataclass(frozen=True)
class Progress:
    """How far a profile is.

    Attributes:
        done: modes measured.
        total: modes that will be.
        detail: the last one, in words.
    """

    done: int
    total: int
    detail: str


def profile_device(
    device: SoftDevice,
    journal: Journal,
    reference: RooflinePredictor,
    limit: int,
    seed: int,
    report: Callable[[Progress], None],
) -> RooflinePredictor:
    """Measure up to `limit` modes and fit the device's predictor to them.

    Three fifths fill the space; the rest are those that would be chosen, in batches with a fit before each: the
    best of thousands of predicted modes is too good to be true until it was measured (see `docs/predicting.md`).

    Args:
        device: the board.
        journal: what was measured before; what is measured now is added, so a restart goes on where it stopped.
        reference: the predictor to transfer from.
        limit: modes to measure at most.
        seed: of the spread modes.
        report: told of every measured mode.

    Returns:
        The fitted predictor; the journal has what it was fitted to.
    """
    limit = min(limit, len(device.modes))
    profiler = Profiler(device)

    def measure(modes: ModeArray) -> None:
        for record in profiler.profile(as_modes(modes), device.step, journal):
            report(Progress(len(journal.records), limit, f"measured {record.mode.label()}"))

    def fitted() -> RooflinePredictor:
        return RooflinePredictor.fit(Profile.of(record.measurement for record in journal.records), reference)

    spread = max(min(limit, FEWEST_MODES), round(limit * _SPREAD_SHARE))
    measure(spread_modes(device.modes, spread, seed))
    while (left := limit - len(journal.records)) > 0:
        measured = as_array(record.mode for record in journal.records)
        prediction = fitted().predict(device.modes)
        measure(front_modes(prediction, device.modes, measured, min(left, _FRONT_BATCH)))
    return fitted()
