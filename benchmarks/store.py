"""Measure how long the coordinator's store takes to load after a restart, and to save a fleet's reports."""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from sqlalchemy import URL

from coordinator.repository.writer import Writer
from coordinator.state.records import (
    DeviceRecord,
    NodeRecord,
    ObservedTraining,
    RoundObservation,
    RoundRecord,
    RunRecord,
    StoredRecord,
)
from coordinator.state.workload_fronts import WorkloadFront
from coordinator.store.database import database_url
from coordinator.store.store import Store
from wattfleet.core.choosing import MAX_FRONT_POINTS, Front
from wattfleet.core.modes import PowerMode, modes_to_array
from wattfleet.core.planning import Assignment, Decision, RoundPlan

_MODE = PowerMode(12, 2_201_600, 1_300_500_000, 3_199_000_000)


def measure(location: Path | URL, devices: int, rounds: int, runs: int, at_once: int) -> dict[str, float]:
    """Fill an empty store, and measure loading and storing.

    Args:
        location: path of an SQLite file, or a database's URL.
        devices: number of devices in the fleet. Each has a front with the maximum number of points; half train in each
            round.
        rounds: number of finished rounds of the run that the restart interrupts.
        runs: number of finished runs with the same number of rounds.
        at_once: number of concurrent tasks that report.

    Returns:
        Seconds to fill the store, and to open and load it again. State reports and observations per second, each
        acknowledged when it is on disk. Seconds to store a round when it is planned, and when it is finished.
    """
    fleet = [_device(k) for k in range(devices)]
    chosen = [record.device_id for record in fleet[: max(1, devices // 2)]]
    store = Store(location)
    filled_s = -time.perf_counter()
    store.save(*fleet, *(NodeRecord(k, f"device-{k}") for k in range(devices)))
    for run in range(runs + 1):
        store.save(RunRecord(str(run), "FedAvg", rounds, finished=run < runs))
        for number in range(1, rounds + 1):
            observations = {d: ObservedTraining(d, 9.0, 20.0) for d in chosen}
            store.save(replace(_round(run, number, chosen), observations=observations))
    filled_s += time.perf_counter()
    store.close()

    loaded_s = -time.perf_counter()
    store = Store(location)
    kept = store.load()
    loaded_s += time.perf_counter()
    assert (len(kept.devices), kept.rounds[-1].number) == (devices, rounds)

    planned = _round(runs, rounds + 1, chosen)
    planned_s = -time.perf_counter()
    store.save(planned)
    planned_s += time.perf_counter()
    states = [replace(record, detail="training") for record in kept.devices]
    observed = [RoundObservation(planned.plan_id, ObservedTraining(d, 9.0, 20.0)) for d in chosen]
    states_s = asyncio.run(_reported(store, states, at_once))
    observed_s = asyncio.run(_reported(store, observed, at_once))
    finished_s = -time.perf_counter()
    store.save(replace(planned, wall_s=9.0, observations={each.observed.device_id: each.observed for each in observed}))
    finished_s += time.perf_counter()
    store.close()
    return {
        "filled_s": filled_s,
        "opened_and_loaded_s": loaded_s,
        "states_per_s": len(states) / states_s,
        "observations_per_s": len(observed) / observed_s,
        "round_planned_s": planned_s,
        "round_finished_s": finished_s,
    }


async def _reported(store: Store, records: Sequence[StoredRecord], at_once: int) -> float:
    """Return the seconds until concurrent tasks have stored all records; each task stores one record at a time."""
    writer = Writer(store)
    waiting = iter(records)

    async def report() -> None:
        for record in waiting:
            await writer.save(record)

    began_s = time.perf_counter()
    await asyncio.gather(*(report() for _ in range(at_once)))
    took_s = time.perf_counter() - began_s
    await writer.close()
    return took_s


def _device(number: int) -> DeviceRecord:
    epoch_s = np.linspace(10.0, 90.0, MAX_FRONT_POINTS) + number % 7
    front = Front(
        modes=modes_to_array([_MODE] * MAX_FRONT_POINTS),
        epoch_s=epoch_s,
        power_w=600.0 / epoch_s,
        epoch_log_sd=np.full(MAX_FRONT_POINTS, 0.05),
        power_log_sd=np.full(MAX_FRONT_POINTS, 0.03),
        warmup_s=np.full(MAX_FRONT_POINTS, 4.0),
    )
    return DeviceRecord(f"device-{number}", "agx-orin", "simulated", 18_096, fronts=(WorkloadFront(front),), idle_w=5.0)


def _round(run: int, number: int, chosen: list[str]) -> RoundRecord:
    return RoundRecord(
        plan_id=f"{run}/{number}",
        run_id=str(run),
        number=number,
        epochs=1.0,
        plan=RoundPlan(
            assignments=tuple(Assignment(d, _MODE, 10.0, 25.0, 30.0, 4.0) for d in chosen),
            decisions=tuple(Decision(d, True, "selected: among the devices with the least makespan") for d in chosen),
            duration_s=10.0,
            planned_w=30.0 * len(chosen),
            site_budget_w=30.0 * len(chosen),
        ),
        nodes={device_id: 2**63 + k for k, device_id in enumerate(chosen)},
        idle_w=0.0,
    )


def main() -> None:
    """Measure once and print the figures as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.store", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=10_000, help="set the number of devices in the fleet")
    parser.add_argument("--rounds", type=int, default=10, help="set the number of finished rounds in each run")
    parser.add_argument("--runs", type=int, default=5, help="set the number of finished runs")
    parser.add_argument("--at-once", type=int, default=1_000, help="set the number of concurrent reports")
    parser.add_argument("--store", help="use the empty database at this URL; None for a temporary SQLite file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wattfleet-") as folder:
        location = database_url(arguments.store) if arguments.store else Path(folder, "coordinator.db")
        figures = measure(location, arguments.devices, arguments.rounds, arguments.runs, arguments.at_once)
    print(json.dumps({name: round(figure, 3) for name, figure in figures.items()}, indent=2))


if __name__ == "__main__":
    main()
