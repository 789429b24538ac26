"""Saves, loads and deletes invites, certificates, and entries of the audit log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, delete, func, select

from coordinator.state.identity_records import AuditEntry, CertificateRecord, ExpiredIdentities, InviteRecord
from coordinator.state.records import StoredRecord
from coordinator.store.statements import Statements
from coordinator.store.tables import AuditEntryRow, CertificateRow, InviteRow
from wattfleet_identity.peers import Peer, Role


def save_identities(connection: Connection, statements: Statements, records: Sequence[StoredRecord]) -> None:
    """Save invites, certificates and entries of the audit log."""
    invites = [
        {**_values(each), "role": each.role.value, "tags": sorted(each.tags)}
        for each in records
        if isinstance(each, InviteRecord)
    ]
    certificates = [{**_values(each), "peer": each.peer.uri} for each in records if isinstance(each, CertificateRecord)]
    entries = [_values(each) for each in records if isinstance(each, AuditEntry)]
    for statement, values in (
        (statements.invite, invites),
        (statements.certificate, certificates),
        (statements.audit_entry, entries),
    ):
        if values:
            connection.execute(statement, values)


def drop(connection: Connection, expired: ExpiredIdentities) -> None:
    """Delete expired records."""
    connection.execute(delete(InviteRow).where(InviteRow.expires_at <= expired.now))
    connection.execute(delete(CertificateRow).where(CertificateRow.not_after <= expired.now))
    connection.execute(delete(AuditEntryRow).where(AuditEntryRow.at < expired.now - expired.keep))
    newest = connection.scalar(select(func.max(AuditEntryRow.order))) or 0
    connection.execute(delete(AuditEntryRow).where(AuditEntryRow.order <= newest - expired.max_entries))


def invites(connection: Connection) -> list[InviteRecord]:
    """All stored invites."""
    return [
        InviteRecord(**{**_columns(row, InviteRecord), "role": Role(row.role), "tags": frozenset(row.tags)})
        for row in connection.execute(select(InviteRow.__table__))
    ]


def certificates(connection: Connection) -> list[CertificateRecord]:
    """All stored certificates."""
    return [
        CertificateRecord(**{**_columns(row, CertificateRecord), "peer": Peer.from_uri(row.peer)})
        for row in connection.execute(select(CertificateRow.__table__))
    ]


def audit_entries(connection: Connection, since: datetime | None, limit: int) -> list[AuditEntry]:
    """The newest entries of the audit log, oldest first.

    Args:
        connection: in a transaction.
        since: leaves out earlier entries; None for all.
        limit: the most entries.
    """
    newest = select(AuditEntryRow.__table__).order_by(AuditEntryRow.order.desc()).limit(limit)
    if since is not None:
        newest = newest.where(AuditEntryRow.at >= since)
    return [AuditEntry(**_columns(row, AuditEntry)) for row in reversed(connection.execute(newest).all())]


def _values(record: InviteRecord | CertificateRecord | AuditEntry) -> dict[str, Any]:
    return {each.name: getattr(record, each.name) for each in fields(record)}


def _columns(row: Row[Any], of: type[InviteRecord | CertificateRecord | AuditEntry]) -> dict[str, Any]:
    return {each.name: getattr(row, each.name) for each in fields(of)}
