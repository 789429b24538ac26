"""A fleet that trains continuously, over a hundred times faster than real boards: no process's usage grows.

`make test-all` lets it train for seconds. `make soak` runs for an hour (`SOAK_S`), and writes a table and a plot to
`SOAK_OUT`. The coordinator, the agents, Flower's server and its nodes are separate processes that use mutual TLS.
Boards are simulated: an epoch takes minutes on their virtual clocks, and a moment on this machine.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from tests.fakes.process_fleet import FleetFolder, ForkedProcess, LedgerReader
from tests.soak.usage import QUANTITIES, Bound, Member, Sample, Usage, draw, growths, write_csv
from wattfleet.common.identity.channels import open_async_channel
from wattfleet_proto.v1 import operator_pb2, operator_pb2_grpc

SOAK_S = float(os.environ.get("SOAK_S", "4"))
OUT = os.environ.get("SOAK_OUT")
IS_LONG = SOAK_S > 120
DEVICES = 4
SAMPLES = 400 if IS_LONG else 30
ROUNDS, MINIBATCHES = 10, 30_000 if IS_LONG else 6000
PROFILE_MODES = 6
SPEED = 100.0
STARTS_WITHIN_S = 600.0
_MIB = 1024.0
BOUNDS = {
    # Within seconds, caches, the allocator's arenas and pools of threads still fill up. The long form is stricter.
    "memory_kib": Bound(2 * _MIB, 0.02) if IS_LONG else Bound(16 * _MIB, 0.1),
    "descriptors": Bound(1.0 if IS_LONG else 4.0),
    "threads": Bound(1.0 if IS_LONG else 8.0),
    "children": Bound(1.0),
    "files": Bound(2.0 if IS_LONG else 8.0),
    "disk_kib": Bound(256.0, 0.02) if IS_LONG else Bound(2 * _MIB),
}


class Trained:
    """What Flower's server and nodes have recorded."""

    def __init__(self, ledger: Path) -> None:
        self._ledger = LedgerReader(ledger)
        self.seconds = 0.0
        self.rounds = 0
        self.runs: list[str] = []

    def look(self) -> float:
        """Seconds that all boards have trained so far, on their own clocks."""
        for entry in self._ledger.look():
            self.seconds += entry.get("epoch_s", 0.0)
            self.rounds += "finished" in entry
            self.runs += [entry["run"]] if "run" in entry else []
        return self.seconds


async def delete_old_runs(fleet: FleetFolder, coordinator: str, trained: Trained) -> None:
    """Delete old runs as an operator's cron job does; otherwise the history of runs grows, as intended."""
    async with open_async_channel(coordinator, fleet.operator) as channel:
        operator = operator_pb2_grpc.OperatorServiceStub(channel)
        while True:
            await asyncio.sleep(SOAK_S / 100)
            old, trained.runs = trained.runs[:-2], trained.runs[-2:]
            if old:
                async for _ in operator.DeleteRuns(operator_pb2.DeleteRunsRequest(run_ids=old)):
                    pass


# The short form is `tests/chaos/test_campaign.py`: the same fleet, whose growth seconds cannot show.
@pytest.mark.slow
@pytest.mark.timeout(2 * STARTS_WITHIN_S + 2 * SOAK_S)
async def test_a_fleet_that_trains_without_pause_does_not_grow(short_folder: Path) -> None:
    fleet = FleetFolder(short_folder, [f"nano-{k}" for k in range(DEVICES)])
    kept = short_folder / "coordinator"
    kept.mkdir()
    policy = ("--site-budget-w", "40", "--policy", "random", "--clients", "3", "--profile-modes", str(PROFILE_MODES))
    coordinator = fleet.coordinator("coordinator", str(kept / "coordinator.db"), "127.0.0.1:0", *policy)
    started = [coordinator]
    trained, samples = Trained(fleet.ledger), list[Sample]()
    deleting: asyncio.Task[None] | None = None

    async def until_it(has_begun: str, rounds: int) -> None:
        give_up_s = time.monotonic() + STARTS_WITHIN_S
        while not fleet.announced("coordinator").exists() or (
            rounds and (trained.look() == 0 or trained.rounds < rounds)
        ):
            for process in started:
                assert process.is_running, process.last_words
            assert time.monotonic() < give_up_s, f"it has not {has_begun}: {[each.last_words for each in started]}"
            await asyncio.sleep(0.05)

    try:
        await until_it("served", 0)
        address = fleet.address("coordinator")
        started += [fleet.agent(device_id, address) for device_id in fleet.device_ids]
        started += fleet.flower(address, ROUNDS, MINIBATCHES, 0.0)
        deleting = asyncio.create_task(delete_old_runs(fleet, address, trained))
        members = [Member(each.name, each.pid, _folder_of(each, fleet, kept)) for each in started]
        # Profiling is over once each device has trained.
        await until_it("trained", 15 if IS_LONG else 3)

        began_s, before_s, before = time.monotonic(), trained.seconds, trained.rounds
        while (at_s := time.monotonic() - began_s) < SOAK_S:
            for process in started:
                assert process.is_running, process.last_words
            assert not deleting.done(), deleting.exception()
            usages = await asyncio.to_thread(lambda: {member.name: member.usage() for member in members})
            samples.append(Sample(at_s, trained.look() - before_s, usages))
            if OUT:
                write_csv(samples, Path(OUT) / "soak.csv")
            await asyncio.sleep(max(0.0, len(samples) * SOAK_S / SAMPLES - (time.monotonic() - began_s)))
    finally:
        if deleting is not None:
            deleting.cancel()
            with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await deleting
        for process in reversed(started):
            process.kill() if process.name in ("flower", "nodes") else process.stop()

    speed = samples[-1].trained_s / DEVICES / samples[-1].at_s
    found = list(growths(samples, BOUNDS))
    print(f"{samples[-1].at_s:,.0f} s, {trained.rounds - before:,} rounds, {len(samples)} samples")
    print(f"boards trained {samples[-1].trained_s / 3600:,.1f} h in all: {speed:,.0f} times the wall clock each")
    print("\n".join(str(each) for each in found))
    if OUT:
        draw(samples, Path(OUT) / "soak.png")
    assert [str(each) for each in found if not each.is_flat] == []
    assert not IS_LONG or speed >= SPEED


def _folder_of(process: ForkedProcess, fleet: FleetFolder, kept: Path) -> Path | None:
    if process.name == "coordinator":
        return kept
    return fleet.state(process.name) if process.name in fleet.device_ids else None


# --- Test growth ------------------------------------------------------------------------------------------------------
# Which series of samples the soak's trend test counts as growth.

ONE_EACH = dict.fromkeys(QUANTITIES, Bound(1.0))
FLAT = Usage(memory_kib=50_000, descriptors=20, threads=10, children=0, files=4, disk_kib=900)
COUNT = 100


def growing(**values: np.ndarray) -> list[str]:
    """The quantities that grow too much, given their values over time."""
    samples = [
        Sample(10.0 * k, 0.0, {"agent": replace(FLAT, **{name: float(each[k]) for name, each in values.items()})})
        for k in range(COUNT)
    ]
    return [each.quantity for each in growths(samples, ONE_EACH) if not each.is_flat]


def test_a_leak_of_a_descriptor_every_minute_is_growth_and_a_busy_moment_is_not() -> None:
    time = np.arange(COUNT)
    assert growing(descriptors=20 + time // 6) == ["descriptors"]
    assert growing(descriptors=20 + 30 * (time % 10 == 0), threads=10 + time % 3) == []


def test_what_fills_up_at_the_start_and_stays_is_not_growth() -> None:
    time = np.arange(COUNT)
    assert growing(memory_kib=50_000 + 100 * np.minimum(time, COUNT // 2)) == []
    assert growing(memory_kib=50_000 + 100 * time) == ["memory_kib"]


def test_a_noisy_slow_leak_is_growth() -> None:
    noise = np.random.default_rng(0).normal(0, 2, COUNT)
    assert growing(disk_kib=900 + noise) == []
    assert growing(disk_kib=900 + noise + 0.1 * np.arange(COUNT)) == ["disk_kib"]
