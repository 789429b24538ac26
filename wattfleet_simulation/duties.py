"""The duties of a simulated fleet, and whether its boards can keep them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.devices.virtual.virtual_board import VirtualBoard
from edge_agent.serving.known_inference import batch_sizes
from edge_agent.serving.simulated_duty import LARGEST_BATCH, SWITCH_MS, served, simulated_duty
from wattfleet.choosing import KnownModes
from wattfleet.duties import ConstantArrivals, Demand, Duty, keep_duty
from wattfleet.errors import InvalidInputError
from wattfleet.modes import Profile, Task
from wattfleet_simulation.devices import SimulatedDevice as FleetDevice

_MODES = 400
"""How many of a board's modes are tried; the fastest one is among them."""


def duties_named(texts: Sequence[str]) -> list[Duty]:
    """Parse the values of `--duty`; see `edge_agent.serving.simulated_duty.simulated_duty`.

    Raises:
        InvalidInputError: a value has another form, names a network without measurements, or has a number out of range.
    """
    duties = []
    for text in texts:
        try:
            duties.append(simulated_duty(text))
        except InvalidInputError as error:
            raise InvalidInputError(f"--duty: {error}") from None
    return duties


def require_kept(devices: Sequence[FleetDevice], boards: Mapping[str, VirtualBoard]) -> None:
    """Check that each board can keep its duty, by its true values, without regard to training.

    Args:
        devices: the fleet.
        boards: each device's board, by device id.

    Raises:
        InvalidInputError: a board replays measurements, or has no mode that keeps its duty; the text gives a remedy.
    """
    for device in devices:
        if device.duty is None:
            continue
        board = boards[device.device_id]
        if not isinstance(board, SimulatedDevice):
            raise InvalidInputError(
                f"{device.device_id}: a replayed board has no inference measurements: leave out --duty or --device-csv"
            )
        try:
            _require_kept(board, simulated_duty(device.duty))
        except InvalidInputError as error:
            raise InvalidInputError(f"--duty {device.duty}: {device.device_id}: {error}") from None


def _require_kept(board: SimulatedDevice, duty: Duty) -> None:
    """Check one board; see `require_kept`. The errors are those of `wattfleet.duties.keep_duty`."""
    assert isinstance(duty.arrivals, ConstantArrivals), "simulated requests have a constant rate"
    highest = board.modes[[int(np.lexsort(board.modes.T)[-1])]]
    modes = np.unique(np.concatenate([board.modes[:: max(1, len(board.modes) // _MODES)], highest]), axis=0)
    batches = batch_sizes(LARGEST_BATCH)
    values = [board.truth(modes, served(duty.workload, batch)) for batch in batches]
    inference = Profile(
        np.tile(modes, (len(batches), 1)),
        np.concatenate([batch_ms for batch_ms, _ in values]),
        np.concatenate([power_mw for _, power_mw in values]),
        np.repeat(batches, len(modes)),
        Task.INFERENCE,
    )
    training = Profile(modes, *board.truth(modes))
    demand = Demand(duty.arrivals.per_s, duty.latency_ms, duty.quantile)
    keep_duty(KnownModes.only_measured(training), KnownModes.only_measured(inference), demand, SWITCH_MS)
