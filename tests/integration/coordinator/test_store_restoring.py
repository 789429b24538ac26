"""A restored backup does not reopen what was closed since it was made."""

from __future__ import annotations

import asyncio
import dataclasses
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from sqlalchemy import URL

from coordinator.settings import CoordinatorSettings
from coordinator.state.identities import FORGOTTEN
from coordinator.state.identity_records import AuditEntry, CertificateRecord, InviteRecord
from coordinator.state.records import (
    DeviceOverrides,
    ForgottenDevice,
    GrantLifetime,
    NodeRecord,
    RunRecord,
    SupplyOverride,
)
from coordinator.store.restoring import ENDED, carry_over
from coordinator.store.store import Store
from tests.fakes.certified import CertifiedFleet, calling, certified, invited, joined
from tests.fakes.records_to_store import BLANK, finished_round, planned_round
from tests.fakes.served import serving
from tests.fakes.shell import command
from wattfleet.budgets import Override
from wattfleet.errors import WattfleetError
from wattfleet_identity.joining import Applicant, join
from wattfleet_identity.peers import Peer, Role
from wattfleet_io.clock import utc_now
from wattfleet_proto.v1 import identity_pb2, identity_pb2_grpc

DAY = timedelta(days=1)
SOON = utc_now() + DAY
RUNNING, ENDED_SINCE, NEWER = "running", "ended since", "newer"


def store(*words: str | Path, **typed: Any) -> str:
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


def save_before(to: Store) -> None:
    """Store what a backup contains."""
    to.save(
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
    runs = {each.run_id: (each.finished, each.error) for each in state.runs}
    assert runs == {RUNNING: (False, ""), ENDED_SINCE: (True, "no luck"), NEWER: (True, ENDED)}
    assert [each.plan_id for each in state.rounds] == [f"{NEWER}/2", f"{RUNNING}/7"], "these may still draw watts"
    assert state.grants.lifetime_s == 900.0
    logged = kept.audit_entries(None, 10)
    assert [each.entry_id for each in logged[:2]] == ["before", "since"]
    assert logged[2].method == "store restore" and len(logged) == 3


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with a backup `backup.db` beside it, and changes since the backup."""
    path = tmp_path / "coordinator.db"
    with closing(Store(path)) as filled:
        save_before(filled)
    store("backup", tmp_path / "backup.db", "--store", path)
    with closing(Store(path)) as filled:
        save_since(filled)
    return path


def test_what_was_closed_since_a_backup_stays_closed(path: Path) -> None:
    out = store("restore", path.with_name("backup.db"), "--store", path)
    with closing(Store(path)) as kept:
        require_closed(kept)
    assert "certificates that stay revoked: device gone, operator bob\n" in out
    assert "devices that stay forgotten: gone\n" in out
    assert "devices that stay drained: worn\n" in out
    changed = "supplies that keep a newer or lower budget: higher since, longer since, lower since, new, sooner since\n"
    assert changed in out
    assert "supplies whose override stays cleared: cleared since\n" in out
    assert f"runs that have ended: {ENDED_SINCE}, {NEWER}\n" in out
    assert "invites that are closed: 1\n" in out
    assert {each.name for each in path.parent.iterdir()} == {
        *("backup.db", "coordinator.db", "coordinator.db.lock", "coordinator.db.replaced-1")
    }


def test_a_restore_can_be_undone_without_reopening_anything(path: Path) -> None:
    store("restore", path.with_name("backup.db"), "--store", path)
    store("restore", path.with_name("coordinator.db.replaced-1"), "--store", path)
    with closing(Store(path)) as kept:
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


def changed(path: Path, before: bytes, after: bytes) -> None:
    """Change a file, as a faulty disk may."""
    content = path.read_bytes()
    assert before in content
    path.write_bytes(content.replace(before, after))


def test_revocations_are_read_from_a_store_whose_other_tables_are_damaged(path: Path) -> None:
    changed(path, b"orin-nano", b"orin-nanX")  # the board of every device
    with pytest.raises(WattfleetError, match="it is damaged"):
        Store(path)
    assert "certificates that stay revoked: device gone, operator bob" in store(
        *("restore", path.with_name("backup.db"), "--store", path)
    )


def damage_certificates(path: Path) -> None:
    changed(path, b"operator/bob", b"operator/Bob")


def remove_file(path: Path) -> None:
    path.unlink()


def start_anew(path: Path) -> None:
    path.unlink()
    Store(path).close()


UNKNOWING = pytest.mark.parametrize("lose", [damage_certificates, remove_file, start_anew])


@UNKNOWING
def test_certificates_that_may_have_been_revoked_are_listed_and_confirmed(
    path: Path, lose: Callable[[Path], None]
) -> None:
    lose(path)
    before = {each.name: each.read_bytes() for each in path.parent.iterdir() if not each.name.endswith(".lock")}
    words = ("restore", path.with_name("backup.db"), "--store", path)
    out = store(*words, typed="n\n")
    assert "the backup has 4 certificates that may have been revoked since" in out
    assert all(f"  {record.peer}, issued on " in out and record.serial in out for record in BACKED_UP.values())
    assert out.endswith("nothing was restored\n")
    after = {each.name: each.read_bytes() for each in path.parent.iterdir() if not each.name.endswith(".lock")}
    assert after == before
    assert f"{path} is restored from" in store(*words, typed="y\n")
    with closing(Store(path)) as kept:
        state = kept.load()
    assert {each.uses_left for each in state.invites} == {0}, "their machines may have enrolled"
    assert state.budget_overrides["lower since"] == Override(50.0, None), "nobody has cleared it"


@UNKNOWING
def test_some_can_be_revoked_before_the_coordinator_starts(path: Path, lose: Callable[[Path], None]) -> None:
    lose(path)
    words = ("restore", path.with_name("backup.db"), "--store", path, "--revoke", "bob", "--revoke", "gone-1", "--yes")
    assert "certificates that stay revoked: device gone, operator bob" in store(*words)
    with closing(Store(path)) as kept:
        valid = {each.peer.name for each in kept.load().certificates if each.is_valid(utc_now())}
    assert valid == {"kept", "worn"}


def test_a_name_that_is_unknown_is_not_revoked_silently(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(WattfleetError, match="no valid certificate has the name or serial number 'bop'"):
        store("restore", path.with_name("backup.db"), "--store", path, "--revoke", "bop")
    assert path.read_bytes() == before


def test_a_backup_of_a_newer_version_is_refused(path: Path) -> None:
    backup = path.with_name("backup.db")
    with closing(sqlite3.connect(backup)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.execute("PRAGMA user_version=0")
    with pytest.raises(WattfleetError, match=rf"{backup} cannot be used .* was written by a newer version"):
        store("restore", backup, "--store", path)


def test_a_restore_removes_what_a_killed_one_has_left(path: Path) -> None:
    left = path.with_name(".coordinator.db.restoring")
    left.mkdir()
    for name in ("restored.db", "restored.db-wal", "former.db-wal"):
        (left / name).write_bytes(b"left by a kill")
    store("restore", path.with_name("backup.db"), "--store", path)
    with closing(Store(path)) as kept:
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
        await asyncio.to_thread(store, "backup", backup, "--store", location)
        await asyncio.to_thread(join, once, Applicant("later", "orin-nano", "6f0c"))
        await service.RevokeCertificates(identity_pb2.RevokeCertificatesRequest(name_or_serial="bob"))
    await asyncio.to_thread(store, "restore", backup, "--store", location)
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
