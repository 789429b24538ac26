"""Clock jumps: no history is deleted early, and no override ends early, in one process and across restarts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from sqlalchemy import URL

from coordinator.clocks import BootClock
from coordinator.settings import StoreSettings
from coordinator.state.records import RunRecord, SupplyOverride
from coordinator.store.store import Store
from tests.fakes.records_to_store import finished_round, old_runs_deleted
from wattfleet.budgets import Override

KEEP = timedelta(days=30)
START = datetime(2026, 6, 1, 12, tzinfo=timezone.utc)


class Machine:
    """A machine with a clock that may jump, and a store that one coordinator after another opens and closes."""

    def __init__(self, location: Path | URL, opened: ExitStack) -> None:
        self.now = START
        self.since_boot_s = 1_000.0
        self.boots = 1
        self._location = location
        self._opened = opened

    def pass_time(self, **duration: float) -> None:
        self.now += timedelta(**duration)
        self.since_boot_s += timedelta(**duration).total_seconds()

    def jump(self, **by: float) -> None:
        self.now += timedelta(**by)

    def reboot(self) -> None:
        self.boots += 1
        self.since_boot_s = 20.0

    def start(self) -> Store:
        store = Store(
            self._location,
            lambda: self.now,
            StoreSettings(max_absence_days=7),
            BootClock(f"boot {self.boots}", lambda: self.since_boot_s),
        )
        self._opened.callback(store.close)
        return store


@pytest.fixture
def machine(location: Path | URL) -> Iterator[Machine]:
    with ExitStack() as opened:
        yield Machine(location, opened)


def with_history(machine: Machine) -> Store:
    store = machine.start()
    store.save(RunRecord("old", "FedAvg", 1, finished=True), finished_round(1, "old"))
    machine.pass_time(days=1)
    store.save(SupplyOverride("site", Override(50, machine.now + timedelta(hours=2))))
    return store


def runs(store: Store) -> list[str]:
    return [record.run_id for record in store.load().runs]


def remaining_s(store: Store, machine: Machine) -> float:
    until = store.load().budget_overrides["site"].until
    assert until is not None
    return (until - machine.now).total_seconds()


def test_no_history_is_deleted_after_a_jump_in_a_running_coordinator(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "coordinator.store")
    store = with_history(machine)
    machine.jump(days=365)
    assert old_runs_deleted(store, KEEP) == []
    store.close()
    after = machine.start()
    assert old_runs_deleted(after, KEEP) == []
    assert runs(after) == ["old"]
    assert "the clock was put forward by 365 days" in caplog.text


@pytest.mark.parametrize("reboots", [False, True])
def test_no_history_is_deleted_after_a_jump_while_no_coordinator_ran(machine: Machine, reboots: bool) -> None:
    with_history(machine).close()
    machine.jump(days=365)
    if reboots:
        machine.reboot()
    store = machine.start()
    assert old_runs_deleted(store, KEEP) == []
    assert runs(store) == ["old"]


def test_history_is_deleted_again_when_it_has_been_kept_long_enough_since_the_jump(machine: Machine) -> None:
    store = with_history(machine)
    machine.jump(days=365)
    store.load()
    machine.pass_time(days=29)
    assert old_runs_deleted(store, KEEP) == []
    store.close()
    machine.pass_time(days=2)
    assert old_runs_deleted(machine.start(), KEEP) == ["old"]


@pytest.mark.parametrize("reboots", [False, True])
def test_history_is_deleted_after_an_absence_without_a_jump(machine: Machine, reboots: bool) -> None:
    store = with_history(machine)
    machine.pass_time(days=26)
    store.require_owner()
    store.close()
    machine.pass_time(days=6)
    if reboots:
        machine.reboot()
    assert old_runs_deleted(machine.start(), KEEP) == ["old"]


@pytest.mark.parametrize("hours", [-26, 1, 24, 24 * 365])
def test_an_override_keeps_its_time_across_a_restart_and_a_jump(machine: Machine, hours: float) -> None:
    with_history(machine).close()
    machine.pass_time(minutes=30)
    machine.jump(hours=hours)
    store = machine.start()
    assert remaining_s(store, machine) == 90 * 60
    assert not store.load().is_clock_doubtful
    store.close()
    assert remaining_s(machine.start(), machine) == 90 * 60


def test_an_override_keeps_its_time_if_the_clock_jumps_while_a_coordinator_runs(machine: Machine) -> None:
    store = with_history(machine)
    machine.pass_time(minutes=30)
    machine.jump(days=1)
    store.require_owner()
    machine.pass_time(minutes=30)
    store.close()
    assert remaining_s(machine.start(), machine) == 60 * 60


def test_an_override_is_doubtful_after_a_reboot_with_an_implausible_clock(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    with_history(machine).close()
    machine.jump(days=8)
    machine.reboot()
    store = machine.start()
    assert store.load().is_clock_doubtful
    assert remaining_s(store, machine) == 2 * 3600
    assert "raise store.max_absence_days" in caplog.text


def test_an_override_ends_in_a_plausible_absence(machine: Machine) -> None:
    with_history(machine).close()
    machine.pass_time(hours=3)
    machine.reboot()
    assert remaining_s(machine.start(), machine) == -3600
