"""A store with a record of every kind, and everything it returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from sqlalchemy import URL

from coordinator.clocks import BootClock
from coordinator.state.records import (
    DeviceOverrides,
    NodeRecord,
    PinnedReferences,
    PublishedReference,
    RunRecord,
    SupplyOverride,
)
from coordinator.store.store import Store
from coordinator.store.tables import OF_DEVICES, OF_RUNS, of_rounds
from tests.fakes.fronts import front
from tests.fakes.records_to_store import BLANK, comparable_devices, finished_round, planned_round, rounds_of
from tests.fakes.small_fleet import RUN
from tests.fakes.workload_fronts import for_all
from wattfleet.budgets import Override

NOW = datetime(2026, 3, 29, 0, 30, tzinfo=timezone.utc)


def fill(location: Path | URL, devices: int = 12, rounds: int = 5) -> None:
    """Create and fill a store, and close it."""
    with closing(Store(location, lambda: NOW, clock=BootClock("a boot", lambda: 1.0))) as store:
        wide = front(*((1.0 + k, 100.0 - k) for k in range(40)))
        store.save(
            *(
                dataclasses.replace(BLANK, device_id=f"nano-{k}", fronts=for_all(wide), idle_w=3.5)
                for k in range(devices)
            ),
            *(NodeRecord(2**63 + k, f"nano-{k}") for k in range(devices)),
            RunRecord("4710", "FedAdam", 7, {"accuracy": 0.1}, "ValueError: no", True),
            RunRecord(RUN, "FedAvg", rounds, {"accuracy": 0.1}),
        )
        for run_id in ("4710", RUN):
            store.save(*(finished_round(number, run_id) for number in range(1, rounds + 1)))
        store.save(
            planned_round(rounds + 1),
            DeviceOverrides("nano-1", frozenset({"lab", "solar"}), True),
            SupplyOverride("site", Override(45.5, datetime(2026, 3, 29, 2, 30, tzinfo=timezone.utc))),
            PublishedReference("ab" * 32, b"{}" * 400, bytes(range(256)) * 20),
            PinnedReferences(("ab" * 32,)),
        )


def served_by(store: Store) -> dict[str, Any]:
    """Everything that a store returns."""
    kept = store.load()
    served: dict[str, Any] = {
        "devices": comparable_devices(kept),
        **{name: getattr(kept, name) for name in ("nodes", "runs", "rounds", "overrides", "budget_overrides")},
        **{name: getattr(kept, name) for name in ("references", "pinned")},
        "times": [store.times(OF_DEVICES), store.times(OF_RUNS)],
    }
    for run_id in ("4710", RUN):
        served[run_id] = (rounds_of(store, run_id), store.history_of(run_id), store.times(of_rounds(run_id)))
    return served


def everything_in(location: Path | URL, now: Callable[[], datetime] = lambda: NOW) -> dict[str, Any]:
    """Everything that a store returns when it is opened."""
    with closing(Store(location, now)) as store:
        return served_by(store)
