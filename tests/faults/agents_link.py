"""A fleet whose devices' links to the coordinator have a fault during a round, from its beginning to recovery."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from coordinator.settings import CoordinatorSettings
from tests.fakes.polling import eventually
from tests.faults.device import EPOCH_S
from tests.faults.faults import DEVICES, PACE, Fault
from tests.faults.fleet import ALLOWANCE_S, Fleet, Round, running, seconds_until

DEADLINE_S = 2 * EPOCH_S + ALLOWANCE_S
"""The deadline of a round: twice its planned duration plus the allowance."""

_REPORTS = 5
"""Fronts and states that each device reports during a fault."""


@dataclass
class Outcome:
    """The effects of a fault.

    Attributes:
        rounds: in order: the round in which the fault began, one while a link was slow, and one after recovery.
        state: what the coordinator knew of the devices at the end, by id.
        observed: the devices whose observations were stored at the end, by plan.
        detected_s: seconds until all devices behind a cut link counted as offline; None for other faults.
        recovered_s: seconds from the end of the fault until all devices were back, with all reports acknowledged.
        most_waiting: the most reports that waited in a device's outbox.
        backlog_bytes: the most bytes that coordinator and agents had queued on the link, per device.
        grown_bytes: growth of this process's memory from before the fault to after recovery.
    """

    rounds: list[Round] = field(default_factory=list)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    observed: dict[str, list[str]] = field(default_factory=dict)
    detected_s: float | None = None
    recovered_s: float = 0.0
    most_waiting: int = 0
    backlog_bytes: int = 0
    grown_bytes: int = 0

    def __str__(self) -> str:
        detected = "not cut off" if self.detected_s is None else f"offline after {self.detected_s:.1f} s"
        rounds = ", ".join(f"{each.took_s:.1f}" for each in self.rounds)
        return (
            f"{detected}; rounds took {rounds} s of at most {DEADLINE_S:.1f}; back after {self.recovered_s:.1f} s;"
            f" {self.most_waiting} reports and {self.backlog_bytes:,} bytes waited at most;"
            f" {self.grown_bytes / 2**20:.1f} MiB more"
        )


async def through(
    fault: Fault,
    config: CoordinatorSettings,
    folder: Path,
    *,
    devices: int = DEVICES,
    is_certified: bool = False,
    share: float = 1.0,
) -> Outcome:
    """Begin a fault while all devices train, end it, let the fleet recover, and train another round.

    Args:
        fault: the fault.
        config: a coordinator's configuration.
        folder: folder for all files.
        devices: number of devices.
        is_certified: whether all use mutual TLS.
        share: the share of devices behind the faulty link; below 1, their Flower nodes are gone, too.
    """
    outcome = Outcome()
    shares: Iterable[float] = (share, 1 - share) if share < 1 else (1.0,)
    async with running(config, folder, devices, pace=PACE, is_certified=is_certified, shares=shares) as fleet:
        link, behind = fleet.links[0], fleet.devices[: round(share * devices)]
        process = psutil.Process()
        memory = process.memory_info().rss
        first = fleet.run(1)
        await eventually(lambda: all(device.is_training for device in fleet.devices))
        fault.begin(link, PACE)
        began_s = time.monotonic()
        if share < 1:
            fleet.grid.gone.update(device.device_id for device in behind)
        watching = asyncio.create_task(_watch(fault, fleet, len(behind), began_s, outcome), name="watch the fault")
        for modes in range(100, 100 + _REPORTS):
            for number, device in enumerate(fleet.devices):
                device.report(modes + number)
        await first
        if not fault.cuts:
            await fleet.run(1)
        outage_s = PACE.outage_s if fault.cuts else 0.0
        await asyncio.sleep(began_s + outage_s - time.monotonic())
        fault.end(link)
        fleet.grid.gone.clear()
        outcome.recovered_s = await seconds_until(fleet.is_ready)
        watching.cancel()
        await fleet.run(1)
        await eventually(fleet.is_ready)
        outcome.grown_bytes = process.memory_info().rss - memory
        outcome.rounds, outcome.state, outcome.observed = fleet.rounds, await fleet.state(), await fleet.observed()
    return outcome


async def _watch(fault: Fault, fleet: Fleet, behind: int, began_s: float, outcome: Outcome) -> None:
    while True:
        if fault.cuts and outcome.detected_s is None and await fleet.offline() >= behind:
            outcome.detected_s = time.monotonic() - began_s
        waiting = max(len(device.outbox.after(0)) for device in fleet.devices)
        outcome.most_waiting = max(outcome.most_waiting, waiting)
        backlog = fleet.links[0].waiting_bytes // max(1, behind)
        outcome.backlog_bytes = max(outcome.backlog_bytes, backlog)
        await asyncio.sleep(0.05)
