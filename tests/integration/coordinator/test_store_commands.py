"""`wattfleet coordinator store`: checks, backups and restores, and that a restored backup reopens nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result
from sqlalchemy import URL

from coordinator.settings import CoordinatorSettings
from coordinator.state.identities import FORGOTTEN
from coordinator.state.identity_records import AuditEntry, CertificateRecord, InviteRecord
from coordinator.state.records import (
    BatteryCharge,
    CountedEnergy,
    DeviceOverrides,
    ForgottenDevice,
    GrantLifetime,
    NodeRecord,
    RunRecord,
    SupplyEnergyBudget,
    SupplyOverride,
)
from coordinator.store import checksums
from coordinator.store.database import newest_version
from coordinator.store.restoring import ENDED, Restoration, carry_over
from coordinator.store.store import Store
from tests.fakes.served import CertifiedFleet, calling, certified, command, invited, joined, serving
from tests.fakes.short_forms import first
from tests.fakes.stored_records import (
    BLANK,
    NEXT_VERSION,
    everything_in,
    fill,
    finished_round,
    next_version,
    planned_round,
    served_by,
)
from wattfleet.common import cli
from wattfleet.common.clock import utc_now
from wattfleet.common.identity.joining import Applicant, join
from wattfleet.common.identity.peers import Peer, Role
from wattfleet.core.budgets import Charge, Override, Period, PeriodBudget
from wattfleet.core.errors import WattfleetError
from wattfleet_proto.v1 import identity_pb2, identity_pb2_grpc

# --- Store commands ---------------------------------------------------------------------------------------------------
# `wattfleet coordinator store`: checks, backups and restores of a store, with and without a running coordinator.


_WRITES_FOR_S = 30.0


def store(*arguments: str | Path) -> str:
    """The output of a command, which has to succeed."""
    result: Result = CliRunner().invoke(cli.wattfleet, ["coordinator", "store", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.output


def refused(*arguments: str | Path) -> str:
    """The output of a command that fails: one line."""
    with pytest.raises(WattfleetError) as refusal:
        store(*arguments)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "coordinator.db"
    fill(path)
    return path


def damage(path: Path) -> None:
    """Change a device's name directly in the file, as a faulty disk may."""
    content = path.read_bytes()
    assert b"nano-7" in content
    path.write_bytes(content.replace(b"nano-7", b"nano-X"))


def test_check_counts_the_rows_of_an_undamaged_store(path: Path) -> None:
    said = store("check", "--store", path)
    assert "device: 12 rows" in said and said.endswith(f"{path} is undamaged\n")


def test_check_and_backup_refuse_a_damaged_store(path: Path, tmp_path: Path) -> None:
    damage(path)
    for words in (("check",), ("backup", tmp_path / "copy.db")):
        said = refused(*words, "--store", path)
        assert said.startswith(f"{path} cannot be used as the coordinator's store: it is damaged")
        assert said.endswith(f"restore a backup with `wattfleet coordinator store restore BACKUP --store {path}`")
    assert not list(tmp_path.glob("*copy*"))


def test_a_backup_beside_a_coordinator_has_all_that_was_stored(path: Path, tmp_path: Path) -> None:
    with closing(Store(path)) as running:
        running.save(BLANK)
        store("check", "--store", path)
        store("backup", tmp_path / "copy.db", "--store", path)
        right = served_by(running)
        running.save(replace(BLANK, detail="later"))
        assert everything_in(tmp_path / "copy.db") == right


def test_a_backup_ends_while_others_write_all_the_time(path: Path, tmp_path: Path) -> None:
    ended, writes = threading.Event(), 0
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE filler (content)")
        connection.executemany("INSERT INTO filler VALUES (?)", [(bytes(2**20),)] * 24)
        connection.execute("DROP TABLE filler")  # its pages stay in the file

    def write() -> None:
        nonlocal writes
        until_s = time.monotonic() + _WRITES_FOR_S
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            checksums.prepare(connection)
            connection.execute("PRAGMA journal_mode=WAL")  # as a coordinator does
            connection.execute("PRAGMA synchronous=OFF")
            while not ended.is_set() and time.monotonic() < until_s:
                connection.execute("UPDATE device SET detail = ?", (f"row {writes}",))
                writes += 1

    writing = threading.Thread(target=write)
    writing.start()
    try:
        store("backup", tmp_path / "copy.db", "--store", path)
        assert writing.is_alive(), "it ended before the writes did"
    finally:
        ended.set()
        writing.join()
    assert writes and "device: 12 rows" in store("check", "--store", tmp_path / "copy.db")


def test_a_backup_does_not_replace_a_file(path: Path, tmp_path: Path) -> None:
    (tmp_path / "copy.db").write_text("mine")
    assert refused("backup", tmp_path / "copy.db", "--store", path).endswith("choose another name, or remove it first")
    assert (tmp_path / "copy.db").read_text() == "mine"


def test_a_restored_store_serves_what_was_backed_up_and_the_old_file_is_kept(path: Path, tmp_path: Path) -> None:
    backup = tmp_path / "copy.db"
    store("backup", backup, "--store", path)
    right = everything_in(path)
    damage(path)
    damaged = path.read_bytes()
    path.with_name("coordinator.db-wal").write_bytes(b"left by a kill")
    said = store("restore", backup, "--store", path)
    assert f"{path} was kept as {path}.replaced-1" in said
    assert path.with_name("coordinator.db.replaced-1").read_bytes() == damaged
    assert path.with_name("coordinator.db.replaced-1-wal").read_bytes() == b"left by a kill"
    assert everything_in(path) == right


class Killed(BaseException):
    """Represents SIGKILL."""


def killed_before(monkeypatch: pytest.MonkeyPatch, step: int) -> list[tuple[str, str]]:
    """Make the process die after `step` changes of the folder; returns the names of these changes and their targets."""
    made: list[tuple[str, str]] = []

    def dying(name: str) -> None:
        change = getattr(os, name)

        def changed(*arguments: Any, **options: Any) -> Any:
            if len(made) == step:
                raise Killed
            made.append((name, str(arguments[-1])))
            return change(*arguments, **options)

        monkeypatch.setattr(os, name, changed)

    for name in ("link", "replace", "unlink"):
        dying(name)
    return made


def restore(backup: Path, path: Path) -> None:
    with Restoration(backup, path) as restoration:
        restoration.put_in_place()


@pytest.mark.parametrize("step", first(4, [0, 3, 7, 11, 1, 2, 4, 5, 6, 8, 9, 10]))
def test_a_restore_that_is_killed_leaves_the_old_or_the_new_store(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    backup, folder = tmp_path / "copy.db", tmp_path / "killed"
    store("backup", backup, "--store", path)
    new = everything_in(path)
    folder.mkdir()
    with closing(Store(path)) as writing:
        writing.save(BLANK)  # it is only in the write-ahead log
        assert path.with_name("coordinator.db-wal").stat().st_size
        for each in tmp_path.glob("coordinator.db*"):
            shutil.copy(each, folder / each.name)
    old = everything_in(path)
    assert old != new
    with monkeypatch.context() as patched:
        made = killed_before(patched, step)
        with suppress(Killed):
            restore(backup, folder / path.name)
    is_restored = ("replace", str(folder / path.name)) in made
    assert everything_in(folder / path.name) == (new if is_restored else old)
    restore(backup, folder / path.name)
    assert everything_in(folder / path.name) == new


def test_a_backup_can_be_restored_where_no_store_is(path: Path, tmp_path: Path) -> None:
    store("backup", tmp_path / "copy.db", "--store", path)
    store("restore", tmp_path / "copy.db", "--store", tmp_path / "new.db")
    assert everything_in(tmp_path / "new.db") == everything_in(path)


def test_nothing_is_restored_while_a_coordinator_uses_the_store(path: Path, tmp_path: Path) -> None:
    store("backup", tmp_path / "copy.db", "--store", path)
    with closing(Store(path)) as running:
        running.save(BLANK)
        assert "stop it before you restore a backup" in refused("restore", tmp_path / "copy.db", "--store", path)
        assert len(running.load().devices) == 13


def test_what_is_no_good_backup_is_not_restored(path: Path, tmp_path: Path) -> None:
    right = everything_in(path)
    bad = tmp_path / "copy.db"
    assert f"{bad} is not a file" in refused("restore", bad, "--store", path)
    bad.write_text("cores,cpu_khz\n" * 100)
    assert f"{bad} cannot be used" in refused("restore", bad, "--store", path)
    sqlite3.connect(bad.with_name("empty.db")).close()
    assert "has no tables" in refused("restore", bad.with_name("empty.db"), "--store", path)
    other = bad.with_name("other.db")
    with closing(sqlite3.connect(other)) as connection, connection:
        connection.execute("CREATE TABLE device (something)")
        connection.execute("PRAGMA user_version=7")
    said = f"{other} has tables but no version of them, so it is no store: name the file of a store"
    for words in (("restore", other, "--store", path), ("check", "--store", other)):
        assert refused(*words).endswith(said)
    bad.unlink()
    store("backup", bad, "--store", path)
    damage(bad)
    assert "it is damaged" in refused("restore", bad, "--store", path)
    assert everything_in(path) == right


@pytest.mark.parametrize(
    ("command", "instead"), [("check", "pg_amcheck"), ("backup", "pg_dump"), ("restore", "pg_restore")]
)
def test_for_postgresql_its_own_tools_are_named(command: str, instead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATTFLEET_COORDINATOR_STORE_LOCATION", "postgresql://fleet:hunter2@db.example/watts")
    said = refused(command, *([] if command == "check" else ["copy.db"]))
    assert instead in said and "hunter2" not in said


def test_the_store_is_that_of_the_settings(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATTFLEET_COORDINATOR_STORE_LOCATION", str(path))
    assert f"{path} is undamaged" in store("check")


def test_an_upgrade_copies_the_file_first(path: Path, tmp_path: Path) -> None:
    right = everything_in(path)
    with closing(sqlite3.connect(path)) as connection:
        before = list(connection.iterdump())
    version = newest_version()
    with next_version(tmp_path / "migrations"):
        Store(path).close()
    copy = tmp_path / f"coordinator.db.tables-{version}.backup"
    assert copy.stat().st_mode == path.stat().st_mode
    with closing(sqlite3.connect(copy)) as connection:
        assert list(connection.iterdump()) == before
    assert everything_in(copy) == right


def test_a_backup_of_an_earlier_version_is_restored_and_upgraded(path: Path, tmp_path: Path) -> None:
    right = everything_in(path)
    store("backup", tmp_path / "copy.db", "--store", path)
    with next_version(tmp_path / "migrations"):
        assert "device: 12 rows" in store("check", "--store", tmp_path / "copy.db")
        for _ in range(2):  # in place of a store of the earlier version, and of one of this version
            store("restore", tmp_path / "copy.db", "--store", path)
            with closing(sqlite3.connect(path)) as connection:
                assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [(NEXT_VERSION,)]
        assert everything_in(path) == right


def test_a_full_backup_disk_is_told_and_leaves_nothing(path: Path, small_disk: Path) -> None:
    with open(small_disk / "rest", "wb") as file:
        file.write(bytes(16 * 2**20 - 64 * 2**10))
    said = refused("backup", small_disk / "copy.db", "--store", path)
    assert "no space for" in said and "free some space" in said
    assert [each.name for each in small_disk.iterdir()] == ["rest"]


# --- Store restoring --------------------------------------------------------------------------------------------------
# A restored backup does not reopen what was closed since it was made.

DAY = timedelta(days=1)
SOON, BEFORE = utc_now() + DAY, utc_now() - DAY
RUNNING, ENDED_SINCE, NEWER = "running", "ended since", "newer"


def store_command(*words: str | Path, **typed: Any) -> str:
    """The output of `wattfleet coordinator store`."""
    return command("store", *map(str, words), **typed).output


def certificate(name: str, role: Role = Role.DEVICE, serial: str = "") -> CertificateRecord:
    return CertificateRecord(serial or f"{name}-1", Peer("lab", role, name), "ab" * 32, utc_now(), utc_now() + 30 * DAY)


def invite(name: str, uses_left: int = 2) -> InviteRecord:
    now = utc_now()
    return InviteRecord(name, Role.DEVICE, "", "", frozenset(), now, "operator anna", now + DAY, uses_left)


def revoked(record: CertificateRecord, reason: str = "stolen") -> CertificateRecord:
    return dataclasses.replace(record, revoked_at=utc_now(), reason=reason)


def entry(name: str) -> AuditEntry:
    return AuditEntry(name, utc_now(), "operator anna", "RevokeCertificates", f"name={name}")


DEVICES = ("kept", "gone", "worn")
BACKED_UP = {name: certificate(name) for name in DEVICES} | {"bob": certificate("bob", Role.OPERATOR)}


def counted(plan_id: str, set_aside_j: float, spent_j: float) -> CountedEnergy:
    return CountedEnergy(plan_id, "supply/roof", BEFORE, SOON, set_aside_j, spent_j)


def per_day(joules: float) -> PeriodBudget:
    return PeriodBudget(joules, Period.DAY)


PER_WEEK = PeriodBudget(9000.0, Period.WEEK)


def save_before(to: Store) -> None:
    """Store what a backup contains."""
    to.save(
        SupplyEnergyBudget("lower since", per_day(500.0)),
        SupplyEnergyBudget("higher since", per_day(400.0)),
        SupplyEnergyBudget("weekly since", per_day(300.0)),
        SupplyEnergyBudget("cleared since", per_day(200.0)),
        *(BatteryCharge("supply/roof", 0.9, BEFORE), BatteryCharge("device/worn", 0.5, SOON)),
        *(counted("reported since", 70.0, 0.0), counted("as before", 0.0, 30.0)),
        *(dataclasses.replace(BLANK, device_id=name) for name in DEVICES),
        NodeRecord(5, "gone"),
        *BACKED_UP.values(),
        *(invite("used up"), invite("used once"), invite("open")),
        DeviceOverrides("worn", frozenset({"lab"}), supply="roof"),
        SupplyOverride("lower since", Override(50.0, None)),
        SupplyOverride("higher since", Override(40.0, None)),
        SupplyOverride("cleared since", Override(500.0, None)),
        SupplyOverride("sooner since", Override(50.0, None)),
        SupplyOverride("longer since", Override(50.0, SOON)),
        SupplyOverride("as before", Override(50.0, SOON)),
        *(RunRecord(RUNNING, "FedAvg", 9), RunRecord(ENDED_SINCE, "FedAvg", 9)),
        entry("before"),
    )


def save_since(to: Store) -> None:
    """Store what has changed since the backup."""
    to.save(
        SupplyEnergyBudget("lower since", per_day(100.0)),
        SupplyEnergyBudget("higher since", per_day(600.0)),
        SupplyEnergyBudget("weekly since", PER_WEEK),
        SupplyEnergyBudget("cleared since", None),
        SupplyEnergyBudget("new", per_day(800.0)),
        *(BatteryCharge("supply/roof", 0.3, SOON), BatteryCharge("device/worn", 0.6, BEFORE)),
        *(counted("reported since", 0.0, 65.0), counted("planned since", 40.0, 0.0)),
        *(revoked(BACKED_UP["bob"]), revoked(BACKED_UP["gone"], FORGOTTEN), ForgottenDevice("gone")),
        *(certificate("later"), revoked(certificate("later and revoked"))),
        *(invite("used up", 0), invite("used once", 1), invite("new")),
        DeviceOverrides("worn", frozenset(), True),
        DeviceOverrides("later", frozenset({"exhibition"}), supply="roof"),
        SupplyOverride("lower since", Override(30.0, None)),
        SupplyOverride("higher since", Override(60.0, SOON)),
        SupplyOverride("cleared since", None),
        SupplyOverride("sooner since", Override(50.0, SOON)),
        SupplyOverride("longer since", Override(50.0, None)),
        SupplyOverride("new", Override(20.0, None)),
        *(RunRecord(ENDED_SINCE, "FedAvg", 9, error="no luck", finished=True), RunRecord(NEWER, "FedAvg", 9)),
        *(finished_round(1, NEWER), planned_round(2, NEWER), planned_round(7, RUNNING)),
        *(GrantLifetime(900.0), entry("since")),
    )


def require_closed(kept: Store) -> None:
    """Check a restored store: whatever was closed since the backup is closed, and all else is as it was."""
    state = kept.load()
    accepted = {each.peer.name for each in state.certificates if each.is_valid(utc_now())}
    assert accepted == {"kept", "worn", "later"}
    assert {each.peer.name for each in state.certificates} == accepted | {"bob", "gone", "later and revoked"}
    assert {each.token_hash: each.uses_left for each in state.invites} == {
        **{"used up": 0, "used once": 1},
        **{"open": 2, "new": 2},
    }
    assert {each.device_id for each in state.devices} == {"kept", "worn"} and state.nodes == {}
    assert sorted(state.overrides, key=lambda each: each.device_id) == [
        DeviceOverrides("later", frozenset({"exhibition"}), supply="roof"),
        DeviceOverrides("worn", frozenset({"lab"}), True, supply="roof"),
    ]
    assert state.budget_overrides == {
        "lower since": Override(30.0, None),
        "higher since": Override(40.0, SOON),
        "sooner since": Override(50.0, SOON),
        "longer since": Override(50.0, None),
        "as before": Override(50.0, SOON),
        "new": Override(20.0, None),
    }, "never above what the replaced store had"
    assert state.energy_budgets == {
        "lower since": per_day(100.0),
        "higher since": per_day(400.0),
        "weekly since": PER_WEEK,
        "cleared since": per_day(200.0),
        "new": per_day(800.0),
    }
    assert state.charges == {"supply/roof": Charge(0.3, SOON), "device/worn": Charge(0.5, SOON)}, "the newest"
    assert {each.plan_id: (each.set_aside_j, each.spent_j) for each in state.counted} == {
        "reported since": (0.0, 65.0),
        "as before": (0.0, 30.0),
        "planned since": (40.0, 0.0),
    }
    runs = {each.run_id: (each.finished, each.error) for each in state.runs}
    assert runs == {RUNNING: (False, ""), ENDED_SINCE: (True, "no luck"), NEWER: (True, ENDED)}
    assert [each.plan_id for each in state.rounds] == [f"{NEWER}/2", f"{RUNNING}/7"], "these may still draw watts"
    assert state.grants.lifetime_s == 900.0
    logged = kept.audit_entries(None, 10)
    assert [each.entry_id for each in logged[:2]] == ["before", "since"]
    assert logged[2].method == "store restore" and len(logged) == 3


@pytest.fixture
def backed_up(tmp_path: Path) -> Path:
    """A store with a backup `backup.db` beside it, and changes since the backup."""
    backed_up = tmp_path / "coordinator.db"
    with closing(Store(backed_up)) as filled:
        save_before(filled)
    store_command("backup", tmp_path / "backup.db", "--store", backed_up)
    with closing(Store(backed_up)) as filled:
        save_since(filled)
    return backed_up


def test_what_was_closed_since_a_backup_stays_closed(backed_up: Path) -> None:
    out = store_command("restore", backed_up.with_name("backup.db"), "--store", backed_up)
    with closing(Store(backed_up)) as kept:
        require_closed(kept)
    assert "certificates that stay revoked: device gone, operator bob\n" in out
    assert "devices that stay forgotten: gone\n" in out
    assert "devices that stay drained: worn\n" in out
    changed = "supplies that keep a newer or lower budget: higher since, longer since, lower since, new, sooner since\n"
    assert changed in out
    assert "supplies whose override stays cleared: cleared since\n" in out
    assert "supplies that keep a newer or lower energy budget: lower since, new, weekly since\n" in out
    assert "rounds whose energy still counts for budgets and batteries: 2\n" in out
    assert f"runs that have ended: {ENDED_SINCE}, {NEWER}\n" in out
    assert "invites that are closed: 1\n" in out
    assert {each.name for each in backed_up.parent.iterdir()} == {
        *("backup.db", "coordinator.db", "coordinator.db.lock", "coordinator.db.replaced-1")
    }


def test_a_restore_can_be_undone_without_reopening_anything(backed_up: Path) -> None:
    store_command("restore", backed_up.with_name("backup.db"), "--store", backed_up)
    store_command("restore", backed_up.with_name("coordinator.db.replaced-1"), "--store", backed_up)
    with closing(Store(backed_up)) as kept:
        state = kept.load()
    assert {each.peer.name for each in state.certificates if each.is_valid(utc_now())} == {"kept", "worn", "later"}
    assert {each.run_id for each in state.runs if not each.finished} == {RUNNING}
    assert state.overrides[0].drained or state.overrides[1].drained


@pytest.mark.parametrize("location", ["sqlite", "postgresql"], indirect=True)
def test_the_same_is_carried_over_between_two_stores(location: Path | URL, tmp_path: Path) -> None:
    with closing(Store(location)) as restored, closing(Store(tmp_path / "former.db")) as former:
        save_before(restored)
        save_before(former)
        save_since(former)
    carry_over(tmp_path / "former.db", location)
    with closing(Store(location)) as kept:
        require_closed(kept)


def changed(backed_up: Path, before: bytes, after: bytes) -> None:
    """Change a file, as a faulty disk may."""
    content = backed_up.read_bytes()
    assert before in content
    backed_up.write_bytes(content.replace(before, after))


def test_revocations_are_read_from_a_store_whose_other_tables_are_damaged(backed_up: Path) -> None:
    changed(backed_up, b"orin-nano", b"orin-nanX")  # the board of every device
    with pytest.raises(WattfleetError, match="it is damaged"):
        Store(backed_up)
    assert "certificates that stay revoked: device gone, operator bob" in store_command(
        *("restore", backed_up.with_name("backup.db"), "--store", backed_up)
    )


def damage_certificates(backed_up: Path) -> None:
    changed(backed_up, b"operator/bob", b"operator/Bob")


def remove_file(backed_up: Path) -> None:
    backed_up.unlink()


def start_anew(backed_up: Path) -> None:
    backed_up.unlink()
    Store(backed_up).close()


UNKNOWING = pytest.mark.parametrize("lose", [damage_certificates, remove_file, start_anew])


@UNKNOWING
def test_certificates_that_may_have_been_revoked_are_listed_and_confirmed(
    backed_up: Path, lose: Callable[[Path], None]
) -> None:
    lose(backed_up)
    before = {each.name: each.read_bytes() for each in backed_up.parent.iterdir() if not each.name.endswith(".lock")}
    words = ("restore", backed_up.with_name("backup.db"), "--store", backed_up)
    out = store_command(*words, typed="n\n")
    assert "the backup has 4 certificates that may have been revoked since" in out
    assert all(f"  {record.peer}, issued on " in out and record.serial in out for record in BACKED_UP.values())
    assert out.endswith("nothing was restored\n")
    after = {each.name: each.read_bytes() for each in backed_up.parent.iterdir() if not each.name.endswith(".lock")}
    assert after == before
    assert f"{backed_up} is restored from" in store_command(*words, typed="y\n")
    with closing(Store(backed_up)) as kept:
        state = kept.load()
    assert {each.uses_left for each in state.invites} == {0}, "their machines may have enrolled"
    assert state.budget_overrides["lower since"] == Override(50.0, None), "nobody has cleared it"


@UNKNOWING
def test_some_can_be_revoked_before_the_coordinator_starts(backed_up: Path, lose: Callable[[Path], None]) -> None:
    lose(backed_up)
    words = (
        "restore",
        backed_up.with_name("backup.db"),
        "--store",
        backed_up,
        "--revoke",
        "bob",
        "--revoke",
        "gone-1",
        "--yes",
    )
    assert "certificates that stay revoked: device gone, operator bob" in store_command(*words)
    with closing(Store(backed_up)) as kept:
        valid = {each.peer.name for each in kept.load().certificates if each.is_valid(utc_now())}
    assert valid == {"kept", "worn"}


def test_a_name_that_is_unknown_is_not_revoked_silently(backed_up: Path) -> None:
    before = backed_up.read_bytes()
    with pytest.raises(WattfleetError, match="no valid certificate has the name or serial number 'bop'"):
        store_command("restore", backed_up.with_name("backup.db"), "--store", backed_up, "--revoke", "bop")
    assert backed_up.read_bytes() == before


def test_a_backup_of_a_newer_version_is_refused(backed_up: Path) -> None:
    backup = backed_up.with_name("backup.db")
    with closing(sqlite3.connect(backup)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.execute("PRAGMA user_version=0")
    with pytest.raises(WattfleetError, match=rf"{backup} cannot be used .* was written by a newer version"):
        store_command("restore", backup, "--store", backed_up)


def test_a_restore_removes_what_a_killed_one_has_left(backed_up: Path) -> None:
    left = backed_up.with_name(".coordinator.db.restoring")
    left.mkdir()
    for name in ("restored.db", "restored.db-wal", "former.db-wal"):
        (left / name).write_bytes(b"left by a kill")
    store_command("restore", backed_up.with_name("backup.db"), "--store", backed_up)
    with closing(Store(backed_up)) as kept:
        require_closed(kept)
    assert not left.exists()


async def test_a_revoked_operator_stays_out_and_newer_devices_can_be_revoked(
    config: CoordinatorSettings, tmp_path: Path
) -> None:
    fleet = CertifiedFleet.create(tmp_path / "authority")
    settings = certified(config, fleet.authority.folder)
    location, backup = settings.store.location, tmp_path / "backup.db"
    operator = fleet.identity(Role.OPERATOR)
    async with serving(settings) as served, calling(served, operator) as client:
        service = identity_pb2_grpc.IdentityServiceStub(client.channel)
        bob = await joined(service, Role.OPERATOR, Applicant(), "bob")
        once = await invited(service, Role.DEVICE)
        await asyncio.to_thread(store_command, "backup", backup, "--store", location)
        await asyncio.to_thread(join, once, Applicant("later", "orin-nano", "6f0c"))
        await service.RevokeCertificates(identity_pb2.RevokeCertificatesRequest(name_or_serial="bob"))
    await asyncio.to_thread(store_command, "restore", backup, "--store", location)
    async with serving(settings) as served, calling(served, operator) as client:
        service = identity_pb2_grpc.IdentityServiceStub(client.channel)
        asked: Any = identity_pb2.ListInvitesRequest()
        async with calling(served, bob) as stranger:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await identity_pb2_grpc.IdentityServiceStub(stranger.channel).ListInvites(asked)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(WattfleetError, match="this invite cannot be used"):
            address = served.bound.enrolment_address
            again = dataclasses.replace(once, address=address)
            await asyncio.to_thread(join, again, Applicant("thief", "orin-nano", "6f0d"))
        asked = identity_pb2.RevokeCertificatesRequest(name_or_serial="later")
        assert len((await service.RevokeCertificates(asked)).certificates) == 1
