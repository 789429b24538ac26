"""The faults of a link, and a fleet that has one on its devices' links during a round."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from coordinator.settings import CoordinatorSettings
from tests.fakes.connections import Direction, FaultyLink
from tests.fakes.polling import eventually
from tests.faults.fleet import ALLOWANCE_S, EPOCH_S, REAL, SHORT, Fleet, Pace, Round, running, seconds_until

# --- Faults -----------------------------------------------------------------------------------------------------------
# The faults of a link, and the form in which the tests apply them.


IS_LONG = "FAULTS_DEVICES" in os.environ
DEVICES = int(os.environ.get("FAULTS_DEVICES", "5"))
PACE = REAL if IS_LONG else SHORT


@dataclass(frozen=True)
class Fault:
    """A fault of a link.

    Attributes:
        name: the fault in words.
        begin: begins the fault.
        cuts: whether nothing passes in at least one direction until the fault ends.
        end: ends the fault.
    """

    name: str
    begin: Callable[[FaultyLink, Pace], None]
    cuts: bool = False
    end: Callable[[FaultyLink], None] = FaultyLink.heal

    def __str__(self) -> str:
        return self.name


def _latency(link: FaultyLink, pace: Pace) -> None:
    link.latency_s = pace.latency_s
    link.reset()  # a new connection takes several round trips


def _loss(link: FaultyLink, pace: Pace) -> None:
    link.loss = 0.5


def _bandwidth(link: FaultyLink, pace: Pace) -> None:
    link.bytes_per_s = 64_000.0
    link.reset()


PARTITION = Fault("partition", lambda link, _: link.partition(), cuts=True)
FAULTS = [
    Fault("latency", _latency),
    Fault("50 % loss", _loss),
    Fault("64 kB per s", _bandwidth),
    Fault("half-open to the server", lambda link, _: link.half_open(Direction.TO_SERVER), cuts=True),
    Fault("half-open to the client", lambda link, _: link.half_open(Direction.TO_CLIENT), cuts=True),
    PARTITION,
    Fault("forgotten connections", lambda link, _: link.forget()),
    Fault("all reset at once", lambda link, _: link.reset()),
]

NO_FAULT = Fault("no fault", lambda link, _: None)


def on_each_transport(short: Collection[str]) -> list[pytest.ParameterSet]:
    """Every fault on plaintext and on mutual TLS; in the short form each on one of the two, alternating.

    Args:
        short: the faults that are part of the short form on this link.
    """
    if IS_LONG:
        return [_case(fault, is_certified) for fault in FAULTS for is_certified in (False, True)]
    return [_case(fault, number % 2 == 1, fault.name not in short) for number, fault in enumerate(FAULTS)]


def _case(fault: Fault, is_certified: bool, is_slow: bool = False) -> pytest.ParameterSet:
    return pytest.param((fault, is_certified), marks=[pytest.mark.slow] if is_slow else [])


def name_of(case: tuple[Fault, bool]) -> str:
    """The name of a case, for the test's id."""
    fault, is_certified = case
    return f"{fault} {'with' if is_certified else 'without'} TLS"


# --- Agents link ------------------------------------------------------------------------------------------------------
# A fleet whose devices' links to the coordinator have a fault during a round, from its beginning to recovery.

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
