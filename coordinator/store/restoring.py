"""Restores a store from a backup without reopening what operators have closed since the backup was made.

A backup brings the past back: certificates that were revoked since would be valid again, used invites could be used
again, drained devices would train. So the store that is replaced is read, too, and where both know something, the
stricter of the two counts. Certificates about which the replaced store knows nothing are reported, so that a person
decides. PostgreSQL has its own tools for backups; `carry_over` then does the same between two databases.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sqlite3
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from types import TracebackType

from sqlalchemy import URL

from coordinator.errors import DamagedStoreError, StoreInUseError
from coordinator.settings import StoreSettings
from coordinator.state.identities import FORGOTTEN, MAX_AUDIT_ENTRIES, Identities
from coordinator.state.identity_records import AuditEntry, CertificateRecord, InviteRecord
from coordinator.state.records import (
    BatteryCharge,
    DeviceOverrides,
    ForgottenDevice,
    GrantLifetime,
    RoundRecord,
    RunRecord,
    StoredRecord,
    SupplyEnergyBudget,
    SupplyOverride,
)
from coordinator.store import checksums, tables
from coordinator.store.checksums import UNREADABLE, driver_connection
from coordinator.store.database import READS, database_url, open_engine, typed_opening_errors, version_of
from coordinator.store.ownership import FileLock
from coordinator.store.store import SIDECARS, Store, StoredState, check_file, copy_file
from wattfleet.common.atomic_files import sync_folder
from wattfleet.common.clock import utc_now
from wattfleet.common.identity.peers import Role
from wattfleet.core.budgets import Override
from wattfleet.core.errors import InvalidInputError

ENDED = "the coordinator's store was restored from a backup from before the run"
_IDENTITY_TABLES = ("invite", "certificate", "audit_entry")


@dataclass(frozen=True)
class Known:
    """What a store contains, as far as it can be read.

    Attributes:
        certificates: by serial number.
        invites: by the hash of the token.
        entries: the audit log, oldest first.
        state: everything else; None if the store is damaged, but these tables are not.
    """

    certificates: dict[str, CertificateRecord]
    invites: dict[str, InviteRecord]
    entries: Sequence[AuditEntry]
    state: StoredState | None

    @classmethod
    def of(
        cls,
        certificates: Iterable[CertificateRecord],
        invites: Iterable[InviteRecord],
        entries: Sequence[AuditEntry],
        state: StoredState | None = None,
    ) -> Known:
        """Index records by their keys."""
        return cls(
            {each.serial: each for each in certificates}, {each.token_hash: each for each in invites}, entries, state
        )


@dataclass
class CarriedOver:
    """What a restored store takes over from the one that it replaces.

    Attributes:
        records: what to store.
        revoked: certificates that are valid in the backup, and were revoked since.
        issued: how many certificates were issued since.
        closed_invites: how many invites are open in the backup, and were used or cancelled since.
        forgotten: devices that were forgotten since.
        drained: devices that were drained since.
        budgets: supplies whose overrides are lower than in the backup, end at another time, or are new.
        cleared: supplies whose overrides were cleared since.
        energy_budgets: supplies whose energy budgets are lower than in the backup, for another period, or new.
        counted_rounds: how many rounds have drawn since what counts for energy budgets and batteries.
        ended: runs that are newer than the backup, or have ended since.
        unaccounted: certificates that are valid in the backup, of which the replaced store knows nothing. They may have
            been revoked.
    """

    records: list[StoredRecord] = field(default_factory=list)
    revoked: list[CertificateRecord] = field(default_factory=list)
    issued: int = 0
    closed_invites: int = 0
    forgotten: list[str] = field(default_factory=list)
    drained: list[str] = field(default_factory=list)
    budgets: list[str] = field(default_factory=list)
    cleared: list[str] = field(default_factory=list)
    energy_budgets: list[str] = field(default_factory=list)
    counted_rounds: int = 0
    ended: list[str] = field(default_factory=list)
    unaccounted: list[CertificateRecord] = field(default_factory=list)


def known_in(store: Store) -> Known:
    """Read all that a store contains, apart from the rounds that a coordinator does not continue with."""
    state = store.load()
    return Known.of(state.certificates, state.invites, store.audit_entries(None, MAX_AUDIT_ENTRIES), state)


def carried_over(
    backup: Known,
    former: Known | None,
    now: datetime,
    has_round: Callable[[str], bool] = lambda plan_id: False,
    revoke: Collection[str] = (),
) -> CarriedOver:
    """Decide what a restored store takes over: where both stores know something, the stricter one counts.

    Args:
        backup: what the restored store contains.
        former: what the replaced store contains; None if it does not exist or cannot be read.
        now: the time.
        has_round: returns whether the backup contains a round, given the id of its plan.
        revoke: names or serial numbers of further certificates to revoke.

    Raises:
        UnknownRecordError: no valid certificate has one of these names or serial numbers.
    """
    found = CarriedOver()
    _carry_identities(found, backup, former, now, revoke)
    if former is not None and former.state is not None and backup.state is not None:
        _carry_operator(found, backup, backup.state, former, former.state)
        _carry_energy(found, backup.state, former.state)
        _carry_runs(found, backup.state, former.state, has_round)
    return found


def _carry_identities(
    found: CarriedOver, backup: Known, former: Known | None, now: datetime, revoke: Collection[str]
) -> None:
    of_former = former or Known.of([], [], [])
    certificates = dict(backup.certificates)
    for serial, since in of_former.certificates.items():
        before = backup.certificates.get(serial)
        if since.not_after <= now:
            continue
        if before is None:
            found.issued += 1
        elif since.revoked_at is None or before.revoked_at is not None:
            continue
        else:
            found.revoked.append(since)
        certificates[serial] = since
        found.records.append(since)
    identities = Identities()
    identities.restore((), certificates.values())
    for name in revoke:
        revoked = identities.revoke(name, "revoked when a backup was restored", now)
        found.revoked += revoked
        found.records += revoked
    # Only now, because these may be among them.
    unaccounted = backup.certificates.keys() - of_former.certificates.keys()
    found.unaccounted = [each for each in identities.certificates(now) if each.serial in unaccounted]
    found.unaccounted = [each for each in found.unaccounted if each.revoked_at is None]
    for token, invite in backup.invites.items():
        invite_since = of_former.invites.get(token)
        left = min(invite.uses_left, 0 if invite_since is None else invite_since.uses_left)
        if left < invite.uses_left:
            found.closed_invites += invite.is_open(now) and left == 0
            found.records.append(replace(invite, uses_left=left))
    found.records += [each for token, each in of_former.invites.items() if token not in backup.invites]
    logged = {each.entry_id for each in backup.entries}
    found.records += [each for each in of_former.entries if each.entry_id not in logged]


def _carry_operator(found: CarriedOver, backup: Known, before: StoredState, former: Known, state: StoredState) -> None:
    """Carry over what operators have set for devices and budgets, as far as it is stricter or unknown to the backup."""
    devices_before = {each.device_id: each for each in before.overrides}
    for since in state.overrides:
        known = devices_before.get(since.device_id)
        changed: DeviceOverrides = since if known is None else replace(known, drained=known.drained or since.drained)
        if changed != known:
            found.records.append(changed)
        if since.drained and not (known is not None and known.drained):
            found.drained.append(since.device_id)
    for supply, override in state.budget_overrides.items():
        # It ends when that of the replaced store does: an override may limit its supply as well as raise its budget, so
        # neither the earlier nor the later end would always be the stricter one.
        of_backup = before.budget_overrides.get(supply, override)
        kept = Override(min(override.watts, of_backup.watts), override.until)
        if supply not in before.budget_overrides or kept != of_backup:
            found.budgets.append(supply)
            found.records.append(SupplyOverride(supply, kept))
    # A store that was begun anew knows no overrides either, but does not know the audit log of those who set them.
    if not {each.entry_id for each in backup.entries}.isdisjoint(each.entry_id for each in former.entries):
        found.cleared = [supply for supply in before.budget_overrides if supply not in state.budget_overrides]
    found.records += [SupplyOverride(supply, None) for supply in found.cleared]
    # A device that the replaced store does not know was forgotten, or enrolled after an earlier restore of that store.
    were_forgotten = {
        each.peer.name
        for each in former.certificates.values()
        if each.peer.role is Role.DEVICE and each.reason == FORGOTTEN
    }
    known_since = {each.device_id for each in state.devices}
    found.forgotten = sorted(
        each.device_id
        for each in before.devices
        if each.device_id in were_forgotten and each.device_id not in known_since
    )
    found.records += [ForgottenDevice(each) for each in found.forgotten]


def _carry_energy(found: CarriedOver, backup: StoredState, former: StoredState) -> None:
    """Carry over what has been drawn, the newest stated charges, and energy budgets unless they were raised.

    A budget that was removed since is that of the backup again: what has been drawn counts, with or without it.
    """
    for supply, since in former.energy_budgets.items():
        known = backup.energy_budgets.get(supply)
        kept = since
        if known is not None and (known.per, known.timezone) == (since.per, since.timezone):
            kept = replace(since, budget_j=min(since.budget_j, known.budget_j))
        if kept != known:
            found.energy_budgets.append(supply)
            found.records.append(SupplyEnergyBudget(supply, kept))
    drawn = set(former.counted) - set(backup.counted)
    found.counted_rounds = len({each.plan_id for each in drawn})
    in_order = sorted(drawn, key=lambda each: (each.planned_at, each.plan_id, each.holder))
    found.records += in_order
    for holder, charge in former.charges.items():
        of_backup = backup.charges.get(holder)
        if of_backup is None or of_backup.measured_at < charge.measured_at:
            found.records.append(BatteryCharge(holder, charge.share, charge.measured_at))


def _carry_runs(found: CarriedOver, backup: StoredState, former: StoredState, has_round: Callable[[str], bool]) -> None:
    """End runs that are newer than the backup or have ended since; carry over the rounds that may still draw watts."""
    before = {each.run_id: each for each in backup.runs}
    since = {each.run_id: each for each in former.runs}
    runs: dict[str, RunRecord] = {}
    for run_id, run in since.items():
        known = before.get(run_id)
        if known is None and not run.finished:
            runs[run_id] = replace(run, finished=True, error=ENDED)
        elif known is not None and run.finished and not known.finished:
            runs[run_id] = run
    found.ended = list(runs)
    given_up = {each.plan_id for each in former.grants.given_up.values()}
    rounds: list[RoundRecord] = [
        each
        for each in former.rounds
        if (each.plan_id in given_up or (each.wall_s is None and not since[each.run_id].finished))
        and not has_round(each.plan_id)
    ]
    for each in rounds:
        if each.run_id not in before:
            runs.setdefault(each.run_id, since[each.run_id])
    carried = {each.plan_id for each in rounds}
    found.records += [*runs.values(), *rounds]
    found.records += [
        each
        for each in former.grants.given_up.values()
        if each.limit_w is not None
        or (each.plan_id is not None and (each.plan_id in carried or has_round(each.plan_id)))
    ]
    if former.grants.lifetime_s > backup.grants.lifetime_s:
        found.records.append(GrantLifetime(former.grants.lifetime_s))


def carry_over(former: Path | URL, restored: Path | URL, now: Callable[[], datetime] = utc_now) -> CarriedOver:
    """Carry over from one store to another one; no coordinator may use either of them.

    Args:
        former: the store that is replaced.
        restored: the store that was restored from a backup.
        now: returns the date and time, with a UTC offset.

    Raises:
        DamagedStoreError: one of them does not contain what was written to it.
        InvalidInputError: one of them cannot be used as a store.
        StoreInUseError: a coordinator uses one of them.
        StoreUnavailableError: a database does not answer.
    """
    with ExitStack() as opened:
        stores = [Store(location, now) for location in (former, restored)]
        for store in stores:
            opened.callback(store.close)
        return _carry_into(stores[1], known_in(stores[0]), stores[0].name, now())


def _carry_into(
    store: Store, former: Known | None, source: str, now: datetime, revoke: Collection[str] = ()
) -> CarriedOver:
    found = carried_over(
        known_in(store), former, now, lambda plan_id: store.round_of(plan_id) is not None, revoke=revoke
    )
    summary = f"{source}: {len(found.revoked)} certificates revoked since"
    entry = AuditEntry(secrets.token_hex(16), now, "the coordinator's machine", "store restore", summary)
    store.save(*found.records, entry)
    return found


class Restoration:
    """Replaces a store's SQLite file by a checked backup; the previous file is kept next to it.

    Everything is prepared in a folder beside the store when the context begins. The store is only replaced by
    `put_in_place`, in steps that may be interrupted.

    Attributes:
        carried: what the restored store takes over from the replaced one.
    """

    def __init__(
        self, backup: Path, path: Path, revoke: Collection[str] = (), now: Callable[[], datetime] = utc_now
    ) -> None:
        """Restore a backup.

        Args:
            backup: the backup.
            path: the store.
            revoke: names or serial numbers of certificates to revoke in the restored store.
            now: returns the date and time, with a UTC offset.
        """
        self.carried = CarriedOver()
        self._backup = backup
        self._path = path
        self._revoke = revoke
        self._now = now
        self._lock = FileLock(path)
        self._folder = path.with_name(f".{path.name}.restoring")
        self._draft = self._folder / "restored.db"

    def __enter__(self) -> Restoration:
        """Check the backup, and prepare the restored store.

        Raises:
            StoreInUseError: a coordinator uses the store.
            InvalidInputError: the backup has no tables, or was written by a newer version.
            DamagedStoreError: the backup is damaged.
            UnknownRecordError: no valid certificate has a name that was to be revoked.
            StoreFullError: there is no space for the copies.
            OSError: a file cannot be written.
        """
        if not self._lock.take():
            raise StoreInUseError(f"a coordinator uses {self._path}: stop it before you restore a backup")
        try:
            check_file(self._backup)
            self._clear()
            self._folder.mkdir(mode=0o700)
            copy_file(self._backup, self._draft)
            _require_known_version(self._draft, self._backup)
            former = _read(self._path, self._folder) if self._path.exists() else None
            settings = StoreSettings(check_rows=False)  # the backup was checked above
            with closing(Store(self._draft, self._now, settings)) as store:
                self.carried = _carry_into(store, former, str(self._backup), self._now(), self._revoke)
            _as_one_file(self._draft)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove what was prepared, and release the store."""
        try:
            self._clear()
        finally:
            self._lock.release()

    def put_in_place(self) -> Path | None:
        """Replace the store.

        Returns:
            The new path of the previous file; None if there was no file.

        Raises:
            OSError: a file cannot be written.
        """
        path = self._path
        replaced = _free_name(path) if path.exists() else None
        if replaced is not None:
            # The old file's write-ahead log is written into it first, so that the file is complete if this process is
            # killed.
            for sidecar in SIDECARS:
                with suppress(FileNotFoundError):
                    os.link(path.with_name(path.name + sidecar), replaced.with_name(replaced.name + sidecar))
            _write_log_into(path)
        for sidecar in SIDECARS:  # SQLite would treat them as the new file's
            with suppress(FileNotFoundError):
                os.unlink(path.with_name(path.name + sidecar))
        if replaced is not None:
            os.link(path, replaced)
        os.replace(self._draft, path)
        sync_folder(path.parent)
        return replaced

    def _clear(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _read(path: Path, folder: Path) -> Known | None:
    """Read the store that is replaced, without changing it; None if it cannot be read.

    Args:
        path: the store.
        folder: an empty folder for a copy of it.
    """
    copy = folder / "former.db"
    # With SQLite's own copy, files would be left beside the store.
    for end in ("", "-wal"):
        with suppress(FileNotFoundError):
            shutil.copyfile(path.with_name(path.name + end), copy.with_name(copy.name + end))
    try:
        with closing(Store(copy)) as store:
            return known_in(store)
    except (DamagedStoreError, InvalidInputError, sqlite3.Error, *UNREADABLE):
        pass
    try:
        return _read_identities(copy)
    except (DamagedStoreError, InvalidInputError, OSError, sqlite3.Error, *UNREADABLE):
        return None


def _read_identities(copy: Path) -> Known | None:
    """Read the invites, the certificates and the audit log of a damaged store; None if they are damaged, too."""
    engine = open_engine(database_url(copy))
    try:
        with typed_opening_errors(str(copy)), engine.execution_options(**READS).connect() as connection:
            file = driver_connection(connection)
            checks = [file.execute(f"PRAGMA integrity_check({table})").fetchall() for table in _IDENTITY_TABLES]
            if any(check != [("ok",)] for check in checks) or checksums.damaged(file, tables=_IDENTITY_TABLES):
                return None
            return Known.of(
                tables.certificates(connection),
                tables.invites(connection),
                tables.audit_entries(connection, None, MAX_AUDIT_ENTRIES),
            )
    finally:
        engine.dispose()


def _require_known_version(draft: Path, backup: Path) -> None:
    """Check that this version of Wattfleet knows the tables of a backup."""
    engine = open_engine(database_url(draft))
    try:
        with typed_opening_errors(str(backup)), engine.execution_options(**READS).connect() as connection:
            version_of(connection)
    finally:
        engine.dispose()


def _as_one_file(path: Path) -> None:
    """Write a file's write-ahead log into the file, which is then complete on disk."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free_name(path: Path) -> Path:
    """An unused name next to a file."""
    number = 1
    while any(path.with_name(f"{path.name}.replaced-{number}{end}").exists() for end in ("", *SIDECARS)):
        number += 1
    return path.with_name(f"{path.name}.replaced-{number}")


def _write_log_into(path: Path) -> None:
    """Write a file's write-ahead log into the file, unless the file is damaged."""
    with suppress(sqlite3.Error), closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(FULL)")
